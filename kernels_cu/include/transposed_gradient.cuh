// From scores to P and to dS where keys are rows: S^T of a warpgroup, 64 keys by kQueries queries, in the
// accumulators of wgmma.
#pragma once
#include "score_tile.cuh"
#include "warpgroup.cuh"

// kAny: softcap, ALiBi and any scale; otherwise scale > 0 and the band only.
template <class Math, bool kAny, int kQueries>
struct TransposedGradient {
    using Accumulator = float[kQueries / 2];
    NarrowBand band;
    int32_t first_key;                 // of the warp
    int32_t whole_first, whole_end;    // tiles of queries in which every pair of the block counts
    float unit_log2;

    CF_DEVICE TransposedGradient(const Score& rule, const Band& of_band, int32_t first_key_of_block,
                                 int32_t keys_of_block, int warpgroup)
        : band(of_band),
          first_key(first_key_of_block + 64 * warpgroup + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16),
          unit_log2(kAny ? kLog2e : static_cast<float>(rule.scale * 1.4426950408889634)) {
        const int32_t last_key = first_key_of_block + keys_of_block - 1;
        whole_first = cdiv(of_band.first_query(last_key), kQueries);
        whole_end = last_key < of_band.seqlen_k ? of_band.end_query(first_key_of_block) / kQueries : 0;
    }
    // S becomes P, times what softcap makes of a gradient; rP is P alone, as an operand. lse_log2: shared
    // address of the tile's, +inf where P is 0.
    CF_DEVICE void weigh(Accumulator& rS, uint32_t (&rP)[kQueries / 16][4], uint32_t lse_log2,
                         const TileScore<Math>& score, int32_t tile) const {
        const Positions<true> at(first_key, tile * kQueries);
        const bool whole = tile >= whole_first && tile < whole_end;
        if constexpr (!kAny) {
            if (!whole) mask_band(as_tile(rS), at, band);
            each_column(lse_log2, [&](int n, float2 row_lse) {
                exponentials(column(rS, n), row_lse);
                pack_column(rP, column(rS, n), n);
            });
        } else {
            // why column by column: what a score goes through needs registers for one column only.
            const float inverse_cap = score.head.softcap == 0 ? 0.0f : 1.0f / score.head.softcap;
            each_column(lse_log2, [&](int n, float2 row_lse) {
                auto& x = column(rS, n);
                float slope[4];
                Positions<true> here = at;
                here.column += 8 * n;
                score.cap(x);
        CF_UNROLL
                for (int e = 0; e < 4; e++) {
                    const float tanh = x[0][0][e] * inverse_cap;
                    slope[e] = 1 - tanh * tanh;
                }
                score.add_alibi(x, here);
                if (!whole) mask_band(x, here, band);
                exponentials(x, row_lse);
                pack_column(rP, x, n);
                CF_UNROLL
                for (int e = 0; e < 4; e++) x[0][0][e] *= slope[e];
            });
        }
    }
    // dP becomes dS. delta: shared address of the tile's.
    CF_DEVICE static void differentiate(Accumulator& rDP, const Accumulator& rP, uint32_t delta) {
        each_column(delta, [&](int n, float2 row_delta) {
            CF_UNROLL
            for (int e = 0; e < 4; e++)
                rDP[4 * n + e] = rP[4 * n + e] * (rDP[4 * n + e] - (e % 2 ? row_delta.y : row_delta.x));
        });
    }

  private:
    using Column = float[1][1][4];    // of 8 queries, as fragments of mma.cuh
    CF_DEVICE static Column& column(Accumulator& x, int n) { return reinterpret_cast<Column&>(x[4 * n]); }

    // Calls act(n, what the thread's two queries have) for each column.
    template <class Act>
    CF_DEVICE static void each_column(uint32_t of_queries, Act act) {
        CF_UNROLL
        for (int n = 0; n < kQueries / 8; n++)
            act(n, ld_shared<float2>(of_queries + 32 * n + threadIdx.x % 4 * 8));
    }
    CF_DEVICE void exponentials(Column& x, float2 row_lse) const {
        CF_UNROLL
        for (int e = 0; e < 4; e++)
            x[0][0][e] = ex2(fmaf(x[0][0][e], unit_log2, e % 2 ? -row_lse.y : -row_lse.x));
    }
    CF_DEVICE static void pack_column(uint32_t (&rP)[kQueries / 16][4], const Column& x, int n) {
        CF_UNROLL
        for (int half = 0; half < 2; half++)
            rP[n / 2][n % 2 * 2 + half] =
                pack<typename Math::Element>(x[0][0][2 * half], x[0][0][2 * half + 1]);
    }
};
