// The epilogue of the Hopper forward kernels: O = O / row_sum, rounded, and LSE, from registers to global memory.
// Design note: docs/kernels/forward_sm90.md.
//
// K has to define
//   Params     with o_map and call
//   OTile      SwizzledTile: what of O leaves at a time, 16 rows of all or of a part of the columns
//   Storage    with q_ring; o(stage, warpgroup, warp), an OTile
//   Softmax kMask kHeadDimV
#pragma once
#include "hopper/store_floats.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/warpgroup.cuh"
#include "tile/online_softmax.cuh"

// Whether O of 16 bits may leave as floats, for partial results.
// why not above head dim 128, but in variants of their own: the branch costs instructions in the main loop.
#if !defined(CF_STORES_FLOATS)
#define CF_STORES_FLOATS 0    // 1: such a variant
#endif
template <class K, class Output>
constexpr bool kStoresFloats = (CF_STORES_FLOATS || K::QTile::kColumns <= 128) &&
                               sizeof(typename K::QTile::Element) == 2 && sizeof(Output) == 2;

// [A2.21] for the rows of a warpgroup: O, staged in its part of the shared memory of Q, as many columns as fit there at a
// time, and LSE.
// unit: from a score as the softmax has found it to natural units; value_unit: on O.
template <class K, class Output>
CF_DEVICE void epilogue(const typename K::Params& p, typename K::Storage& s, const WorkTile<K>& tile,
                        int warpgroup, int q_stage, const typename K::Softmax& softmax, float unit,
                        float value_unit, float (&rO)[K::kHeadDimV / 2]) {
    const WorkTile<K> work = tile;    // why: there are registers again, and it is read once
    const Score& rule = p.call.score;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t first_row = work.first_row + 64 * warpgroup + 16 * warp;
    const int64_t first_q = work.sequence.first_q;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t row = first_row + 8 * half + lane / 4, head = work.head(row);
        float sink = -kInfinity;
        // why: or ptxas keeps this constant from before the main loop, which has no register for it.
        if constexpr (K::kMask == Mask::spans) sink = __uint_as_float(opaque(__float_as_uint(-kInfinity)));
        if (rule.sinks) sink = static_cast<const float*>(rule.sinks)[head * rule.sinks_head];
        const auto end = softmax.finalize(0, half, unit, sink);
        softmax.rescale_row(as_tile(rO), 0, half, end.normaliser * value_unit);
        if (p.call.lse.data && lane % 4 == 0 && work.exists(row))
            st_global(head_rows<float>(p.call.lse, work.batch, head, first_q + work.rows.query(row)),
                      end.lse);
    }
    const bool floats = kStoresFloats<K, Output> && p.call.float_o;
    auto& sO = s.o(q_stage, warpgroup, warp);
    constexpr int kPart = K::OTile::kColumns;
    static_assert(!kStoresFloats<K, Output> || kPart == K::kHeadDimV);
    CF_UNROLL
    for (int first = 0; first < K::kHeadDimV; first += kPart) {
        if (floats) {
            store_floats(p.call, work, first_row, 0, rO);
        } else {
            uint32_t rounded[kPart / 16][4];
            to_fragments<Output>(rounded, reinterpret_cast<float (&)[kPart / 2]>(rO[first / 2]));
            store_warp_fragments(sO, 0, 0, rounded);
            // sync: every lane's part of O is visible to the lanes of the warp and to the copy engine.
            fence_proxy_async();
            __syncwarp();
        }
        const bool leader = elect_one();
        // why: rows past the end of a packed sequence are those of the next one; elsewhere what is beyond the queries is
        // outside the tensor, and dropped. why of_warp: where lanes might part, ptxas spills.
        const bool packed = p.call.shape.packed;
        if (!floats && packed &&
            warp_uniform(work.rows.query(first_row + 15) - work.sequence.seqlen_q) >= 0) {
            const auto place = [&](int i) -> Output* {
                const int32_t row = first_row + i;
                if (!work.exists(row)) return nullptr;
                Output* to =
                    head_rows<Output>(p.call.o, work.batch, work.head(row), first_q + work.rows.query(row));
                return to + first;
            };
            copy_rows(place, sO, 16, p.call.shape.head_dim_v - first);
            // sync: every lane has read its part before the next Q comes.
            __syncwarp();
        } else if (!floats && leader) {
            store_tile(p.o_map, sO, first, work.rows.head(first_row), work.row_of_q(first_row), work.group,
                       packed ? 0 : work.batch);
            tma_store_commit();
            tma_store_wait_read<0>();
        }
        if (first + kPart < K::kHeadDimV) {
            // sync: this part has been read, and the next one may overwrite it.
            __syncwarp();
        } else if (leader) {
            mbar_arrive(s.q_ring.empty[q_stage]);
        }
    }
}
