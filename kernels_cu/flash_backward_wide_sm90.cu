// Attention backward on Hopper for head dims above 128, dK and dV: as flash_backward_sm90.cu, but both warpgroups
// have the same keys, and each half of the columns of dK and dV. flash_backward_wide_dq_sm90.cu computes dQ.
// Design note: docs/kernels/wide.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2.
//   [A2.6]  a block owns the keys K_j, V_j of one head; dK = 0, dV = 0                (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them
//   [A2.10] S^T = K_j Q_i^T                                                 (the first warpgroup)
//   [A2.11] P^T = e^(score(S^T) - LSE), 0 where a pair is outside the band  (the first)
//   [A2.12] dV = dV + P^T dO_i                                              (both, half of the columns each)
//   [A2.13] dP^T = V_j dO_i^T                                               (the second)
//   [A2.14] dS^T = P^T * (dP^T - delta), times what softcap makes of a gradient    (the second)
//   [A2.16] dK = dK + dS^T Q_i                                              (both)
//
// Grid:   x = ceil(seqlen_k / kBlockN) * heads_k * batch, as in flash_backward_sm90.cu.
// Block:  two warpgroups of consumers; then a warpgroup of helpers: a thread that loads tiles, a warp for LSE, a
//         warp for delta.
// Shared: K, V; two stages of Q, dO, LSE and delta; P^T of two steps, dS^T, and for softcap the weights of
//         gradients; barriers. dK and dV are staged in K and V.
//
// Assumes: what flash_backward_sm90.cu does.
// Not here: mask, bias, dropout (flash_backward.cu).
#include "hopper/backward.cuh"
#include "tile/epilogue.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 256
#define CF_HEAD_DIM_V 256
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_THREADS 384
#define CF_SHARED_BYTES 223232
#endif
constexpr int kHeadDim = CF_HEAD_DIM, kHalf = kHeadDim / 2;
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
constexpr bool kAny = Mask::CF_MASK == Mask::any;
static_assert(CF_THREADS == 384 && kBlockM == 64 && kBlockN == 64 && kHeadDim % 128 == 0);
static_assert(CF_HEAD_DIM_V == kHeadDim, "one product multiplies K by Q and V by dO");

struct Kernel {
    using Element = CF_ELEMENT;
    static constexpr bool kAny = ::kAny;
    static constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V, kSwizzleOfK = 128;
    static constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
    static constexpr int kDOStages = kStages, kPairTiles = kAny ? 4 : 3;
    // why not subtracted: L2 is the limit, not shared memory.
    static constexpr bool kSumsDQ = false, kSubtracted = false, kSpans = false;
};
using Block = HopperBackward<Kernel>;
using Element = Kernel::Element;
using QTile = Block::QTile;
using KTile = Block::KTile;
using PairTile = Block::PairTile;
using Step = Block::Step;
using SharedStorage = Block::SharedStorage;
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Which of the pair tiles: P^T of two steps by stage, dS^T, and what dS^T has as a factor where that is not P^T.
enum Pair { kP = 0, kDS = kStages, kWeights = kAny ? kDS + 1 : kP };

// What the lanes of this warp have written into a tile with store_fragments.
CF_DEVICE void load_fragments(uint32_t (&r)[kBlockM / 16][4], const PairTile& tile) {
    const int lane = threadIdx.x % 32, row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
    CF_UNROLL
    for (int k = 0; k < kBlockM / 16; k++)
        ldmatrix_x4(r[k], smem_addr(tile.data) + PairTile::offset(row, 2 * k + lane / 16));
}

CF_DEVICE void consume(const HopperBackwardParams& p, SharedStorage& s, const WorkTile& work, int warpgroup) {
    float rDK[kHalf / 2] = {}, rDV[kHalf / 2] = {};
    const bool scores = warpgroup == 0;    // S and P are this warpgroup's; of the other one dP and dS

    if (work.tiles.first < work.tiles.end) {
        // why one product for both: ptxas serialises products in branches.
        const ByRows<KTile> keys(scores ? s.k : s.v);
        const ByRows<QTile> queries(scores ? s.q[0] : s.d_o[0]);
        const int column = warpgroup * kHalf;
        const ByRows<PairTile> weights(s.pairs[kP]), ds(s.pairs[kDS]);
        const ByColumns<QTile> q_columns(s.q[0], column), do_columns(s.d_o[0], column);
        const Block::Gradient gradient(p.call.score, work.band, work.whole, work.first_key, 0);

        // sync: K and V have come.
        mbar_wait(s.keys_full, 0);
        const int32_t rows_of_keys = work.sequence.seqlen_k - work.first_key;
        if (rows_of_keys < kBlockN) clear_after(rows_of_keys, s.k, s.v);

        // [A2.8]
#pragma unroll 1
        for (Step step(p.call, work); step.exists(); step.advance()) {
            const int stage = step.at.stage;
            // [A2.10] [A2.13]
            float rX[kBlockM / 2];
            const int32_t rows = work.sequence.seqlen_q - step.tile * kBlockM;
            if (scores || rows < kBlockM) s.q_ring.wait(step.at);
            if (!scores || rows < kBlockM) s.do_ring.wait(step.at);
            if (rows < kBlockM) clear_after(rows, s.q[stage], s.d_o[stage]);
            wgmma_fence_operand(rX);
            wgmma_fence();
            multiply(rX, keys, queries.of_tile(stage), false);
            wgmma_commit();
            // sync: LSE and delta have come.
            mbar_wait(s.statistics[stage], step.at.phase);
            // sync: S or dP is in registers.
            wgmma_wait<0>();
            wgmma_fence_operand(rX);
            // [A2.11]
            if (scores) {
                uint32_t rP16[kBlockM / 16][4];
                gradient.recompute_p(rX, rP16, smem_addr(s.terms.lse_log2[stage]),
                                     TileScore<Block::Product>(p.call.score, work.sequence, step.head),
                                     step.tile);
                store_fragments(s.pairs[kP + stage], 0, 0, rP16);
                if constexpr (kAny) {
                    to_fragments<Element>(rP16, rX);
                    store_fragments(s.pairs[kWeights], 0, 0, rP16);
                }
                fence_proxy_async();
            }
            // sync: P is in shared memory. And what the step before last had there is read no more: the other
            // warpgroup waited for that dV before it came here in the step between.
            bar_sync(kPComplete, kConsumerThreads);
            // [A2.12]
            s.do_ring.wait(step.at);
            wgmma_fence_operand(rDV);
            wgmma_fence();
            multiply(rDV, weights.of_tile(stage), do_columns.of_tile(stage), true);
            wgmma_commit();
            // [A2.14]
            if (!scores) {
                uint32_t r16[kBlockM / 16][4];
                load_fragments(r16, s.pairs[kAny ? kWeights : kP + stage]);
                gradient.compute_ds(rX, r16, smem_addr(s.terms.delta[stage]));
                to_fragments<Element>(r16, rX);
                store_fragments(s.pairs[kDS], 0, 0, r16);
                fence_proxy_async();
            }
            // sync: dS is in shared memory. That of the step before was read before P was complete.
            bar_sync(kDSComplete, kConsumerThreads);
            // [A2.16]
            s.q_ring.wait(step.at);
            wgmma_fence_operand(rDK);
            wgmma_fence();
            multiply(rDK, ds, q_columns.of_tile(stage), true);
            wgmma_commit();
            // sync: dV and dK are in registers; dO, Q and dS in use no more.
            wgmma_wait<0>();
            wgmma_fence_operand(rDV);
            wgmma_fence_operand(rDK);
            s.do_ring.release(step.at);
            s.q_ring.release(step.at);
        }
        // why no barrier before dK and dV are staged in K and V: no product has read these since P was complete.
    }

    const Shape& shape = p.call.shape;
    const int32_t warp_row = static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16, column = warpgroup * kHalf;
    const int64_t row = work.sequence.first_k + work.first_key + warp_row;
    const int32_t rows = work.sequence.rows_k - work.first_key - warp_row;    // of the warp that exist
    const uint32_t staging = (warpgroup * kBlockN + warp_row) * kHalf * sizeof(Element);
    const auto store = [&](const Tensor& to, int32_t columns, const KTile& tile, auto& rGradient,
                           float scale) {
        const float factor[1][2] = {{scale, scale}};
        const bool floats = p.call.float_gradients;
        store_warp_rows<Block::Product>(
            as_tile(rGradient), factor,
            rows_of_result<Element>(to, work.batch, work.kv_head, row, rows, columns, column, floats),
            smem_addr(tile.data) + staging, floats);
    };
    store(p.call.dk, shape.head_dim, s.k, rDK, static_cast<float>(p.call.score.scale));
    store(p.call.dv, shape.head_dim_v, s.v, rDV, 1.0f);
}

CF_DEVICE void dkdv(const HopperBackwardParams& p) {
    Block::run(
        p, [&](SharedStorage& s, const WorkTile& work, int warpgroup) { consume(p, s, work, warpgroup); });
}

CF_KERNEL(HopperBackwardParams, CF_THREADS, 1, dkdv)
