// P and dS from scores where queries are rows: S of a warpgroup, 64 queries by kKeys keys, in the accumulators
// of wgmma. transposed_gradient.cuh is the same where keys are.
// Design note: docs/kernels/wide.md.
#pragma once
#include "hopper/capped_score.cuh"
#include "hopper/warpgroup.cuh"

// kAny: softcap, ALiBi and any scale; otherwise scale > 0 and the band only.
template <class Math, bool kAny, int kKeys> struct QueryGradient {
    using Accumulator = float[kKeys / 2];
    const NarrowBand&
        band;       // why a reference: it is in shared memory, and costs no register while it is not read
    Range whole;    // blocks of keys in which every pair counts
    int32_t warp_query;    // the warp's first one
    float unit_log2;
    float lse_log2[2], delta[2];    // of the thread's two rows

    CF_DEVICE QueryGradient(const BackwardParams& call, const Sequence& sequence, const NarrowBand& of_band,
                            int32_t head, int32_t first_query)
        : band(of_band), warp_query(first_query + static_cast<int>(threadIdx.x) % 128 / 32 * 16),
          unit_log2(static_cast<float>(call.score.scale * 1.4426950408889634)) {
        const Band wide(call.score, sequence);
        const int32_t last = smaller(first_query + 63, sequence.seqlen_q - 1);
        whole = {cdiv(wide.first_key(last), kKeys), wide.end_key(first_query) / kKeys};
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t query = warp_query + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
            const bool exists = query < sequence.seqlen_q;
            const int64_t row = sequence.first_q + query;
            const auto of_row = [&](const Rows& rows, float missing) {
                return exists ? ld_global(head_rows<float>(rows, sequence.batch, head, row)) : missing;
            };
            // why: rows without keys have an LSE of -inf, and P is 0 for one of +inf.
            const float lse = of_row(call.lse, kInfinity);
            lse_log2[half] = lse == -kInfinity ? kInfinity : lse * kLog2e;
            delta[half] = of_row(call.delta, 0.0f);
        }
    }
    // S becomes P, times what softcap makes of a gradient.
    CF_DEVICE void recompute_p(Accumulator& rS, const TileScore<Math>& score, int32_t block) const {
        const int32_t first_key = block * kKeys;
        if constexpr (kAny) {
            const CappedScore<Math> capped(score.head);
            capped.apply(rS);
            mask(rS, block);
            // layout: of the thread's first pair; the |offset + query - key| of others is constants away.
            const int in_warp =
                static_cast<int>(threadIdx.x) % 32 / 4 - static_cast<int>(threadIdx.x) % 4 * 2;
            const float distance = static_cast<float>(score.head.offset + warp_query - first_key + in_warp);
            const float alibi = -kLog2e * score.head.slope;
            each([&](int i, int n, int e) {
                using At = Positions<false>;
                const float step = static_cast<float>(At::row_step(0, e) - At::column_step(n, e));
                const float p = ex2(rS[i] + fmaf(alibi, fabsf(distance + step), -lse_log2[e / 2]));
                rS[i] = p * capped.slope(rS[i]);
            });
        } else {
            mask(rS, block);
            each([&](int i, int, int e) { rS[i] = ex2(fmaf(rS[i], unit_log2, -lse_log2[e / 2])); });
        }
    }
    // dP becomes dS.
    CF_DEVICE void compute_ds(Accumulator& rDP, const Accumulator& rP) const {
        each([&](int i, int, int e) { rDP[i] = rP[i] * (rDP[i] - delta[e / 2]); });
    }

  private:
    CF_DEVICE void mask(Accumulator& rS, int32_t block) const {
        if (contains(whole, block)) return;
        mask_band(as_tile(rS), Positions<false>(warp_query, block * kKeys), band);
    }
    // Calls act(i, n, e) for element i, which is [0][n][e] of mma.cuh.
    template <class Act> CF_DEVICE static void each(Act act) {
        CF_UNROLL
        for (int i = 0; i < kKeys / 2; i++) act(i, i / 4, i % 4);
    }
};
