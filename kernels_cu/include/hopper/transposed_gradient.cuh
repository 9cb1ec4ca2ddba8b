// P and dS from scores where keys are rows: S^T of a warpgroup, 64 keys by kQueries queries, in the
// accumulators of wgmma.
// Design note: docs/kernels/backward_sm90.md.
#pragma once
#include "hopper/capped_score.cuh"
#include "hopper/warpgroup.cuh"

// kAny: softcap, ALiBi and any scale; otherwise scale > 0 and the band only.
// kMasks: the band is applied here; else the caller has applied it.
// kSubtracted: S and dP come without LSE / scale and delta, see query_terms.cuh; their addresses are not used.
template <class Math, bool kAny, int kQueries, bool kSubtracted, bool kMasks = true>
struct TransposedGradient {
    using Accumulator = float[kQueries / 2];
    // why references: these are in shared memory, and cost no register while they are not read.
    const NarrowBand& band;
    const Range& whole;          // tiles of queries in which every pair of the block counts
    const int32_t& first_key;    // of the block
    int warp_key;                // the warp's first one, counted from there
    float unit_log2;

    CF_DEVICE TransposedGradient(const Score& rule, const NarrowBand& of_band, const Range& whole_tiles,
                                 const int32_t& first_key_of_block, int warpgroup)
        : band(of_band), whole(whole_tiles), first_key(first_key_of_block),
          warp_key(64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16),
          unit_log2(static_cast<float>(rule.scale * 1.4426950408889634)) {}
    CF_DEVICE static Range whole_tiles(const Band& band, int32_t first_key_of_block, int32_t keys_of_block) {
        const int32_t last_key = first_key_of_block + keys_of_block - 1;
        return {cdiv(band.first_query(last_key), kQueries),
                last_key < band.seqlen_k ? band.end_query(first_key_of_block) / kQueries : 0};
    }
    // S becomes P, times what softcap makes of a gradient; rP is P alone, as an operand. lse_log2: shared
    // address of the tile's, +inf where P is 0.
    CF_DEVICE void recompute_p(Accumulator& rS, uint32_t (&rP)[kQueries / 16][4], uint32_t lse_log2,
                               const TileScore<Math>& score, int32_t tile) const {
        recompute_p(rS, rP, lse_log2, score, tile, [](int, const float (&)[4]) {});
    }
    // The same, and at once rWeights, what S becomes, rounded.
    CF_DEVICE void recompute_p(Accumulator& rS, uint32_t (&rP)[kQueries / 16][4],
                               uint32_t (&rWeights)[kQueries / 16][4], uint32_t lse_log2,
                               const TileScore<Math>& score, int32_t tile) const {
        recompute_p(rS, rP, lse_log2, score, tile,
                    [&](int n, const float (&weights)[4]) { pack_column(rWeights, weights, n); });
    }
    // S becomes P, not rounded.
    CF_DEVICE void recompute_p(Accumulator& rS, uint32_t lse_log2, int32_t tile) const {
        static_assert(!kAny, "softcap's factor would be lost");
        mask(rS, tile);
        each_column(lse_log2, [&](int n, float2 row_lse) { exponentiate(column(rS, n), row_lse); });
    }
    template <class Keep>
    CF_DEVICE void recompute_p(Accumulator& rS, uint32_t (&rP)[kQueries / 16][4], uint32_t lse_log2,
                               const TileScore<Math>& score, int32_t tile, Keep keep) const {
        if constexpr (kAny) {
            const CappedScore<Math> capped(score.head);
            capped.apply(rS);
            mask(rS, tile);
            // layout: of the thread's first pair; the |offset + query - key| of others is constants away.
            const int in_block =
                static_cast<int>(threadIdx.x) % 4 * 2 - static_cast<int>(threadIdx.x) % 32 / 4;
            const float distance = static_cast<float>(score.head.offset + tile * kQueries - first_key) +
                                   static_cast<float>(in_block - warp_key);
            const float alibi = -kLog2e * score.head.slope;
            each_column(lse_log2, [&](int n, float2 row_lse) {
                auto& s = column(rS, n);
                float p[4];
                CF_UNROLL
                for (int e = 0; e < 4; e++) {
                    using At = Positions<true>;
                    const float step = static_cast<float>(At::column_step(n, e) - At::row_step(0, e));
                    p[e] = ex2(s[e] + fmaf(alibi, fabsf(distance + step), -of(row_lse, e)));
                }
                pack_column(rP, p, n);
                CF_UNROLL
                for (int e = 0; e < 4; e++) s[e] = p[e] * capped.slope(s[e]);
                keep(n, s);
            });
        } else {
            mask(rS, tile);
            each_column(lse_log2, [&](int n, float2 row_lse) {
                exponentiate(column(rS, n), row_lse);
                pack_column(rP, column(rS, n), n);
            });
        }
    }
    // dP becomes dS. delta: shared address of the tile's.
    CF_DEVICE static void compute_ds(Accumulator& rDP, const Accumulator& rP, uint32_t delta) {
        each_column(delta, [&](int n, float2 row_delta) {
            CF_UNROLL
            for (int e = 0; e < 4; e++) rDP[4 * n + e] = rP[4 * n + e] * (rDP[4 * n + e] - of(row_delta, e));
        });
    }
    // The same of dP that is counted in `unit`.
    CF_DEVICE static void compute_ds(Accumulator& rDP, const Accumulator& rP, uint32_t delta, float unit) {
        each_column(delta, [&](int n, float2 row_delta) {
            CF_UNROLL
            for (int e = 0; e < 4; e++)
                rDP[4 * n + e] = rP[4 * n + e] * fmaf(rDP[4 * n + e], unit, -of(row_delta, e));
        });
    }
    // The same with rounded factors, fragments of to_fragments. For dS a rounding more, for the thread half the
    // registers.
    CF_DEVICE static void compute_ds(Accumulator& rDP, const uint32_t (&rFactors)[kQueries / 16][4],
                                     uint32_t delta) {
        each_column(delta, [&](int n, float2 row_delta) {
            CF_UNROLL
            for (int e = 0; e < 4; e++) {
                using Element = typename Math::Element;
                const auto* factor = reinterpret_cast<const Element*>(&rFactors[n / 2][n % 2 * 2 + e / 2]);
                rDP[4 * n + e] = widen(factor[e % 2]) * (rDP[4 * n + e] - of(row_delta, e));
            }
        });
    }

  private:
    // The thread's elements of 8 queries.
    CF_DEVICE static float (&column(Accumulator& x, int n))[4] {
        return reinterpret_cast<float (&)[4]>(x[4 * n]);
    }
    CF_DEVICE void mask(Accumulator& rS, int32_t tile) const {
        if (!kMasks || contains(whole, tile)) return;
        mask_band(as_tile(rS), Positions<true>(first_key + warp_key, tile * kQueries), band);
    }
    // Calls act(n, what the thread's two queries have) for each column.
    template <class Act>
    CF_DEVICE static void each_column(uint32_t of_queries, Act act) {
        CF_UNROLL
        for (int n = 0; n < kQueries / 8; n++)
            act(n, kSubtracted ? float2{0, 0} : ld_shared<float2>(of_queries + 32 * n + threadIdx.x % 4 * 8));
    }
    CF_DEVICE void exponentiate(float (&x)[4], float2 row_lse) const {
        CF_UNROLL
        for (int e = 0; e < 4; e++) x[e] = ex2(fmaf(x[e], unit_log2, -of(row_lse, e)));
    }
    CF_DEVICE static float of(float2 of_queries, int e) { return e % 2 ? of_queries.y : of_queries.x; }
    CF_DEVICE static void pack_column(uint32_t (&rP)[kQueries / 16][4], const float (&x)[4], int n) {
        CF_UNROLL
        for (int half = 0; half < 2; half++)
            rP[n / 2][n % 2 * 2 + half] = pack<typename Math::Element>(x[2 * half], x[2 * half + 1]);
    }
};
