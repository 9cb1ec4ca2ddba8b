// Attention backward on Hopper: TMA, wgmma, warp specialisation. dK and dV from registers, dQ by bulk
// additions to FP32 sums; flash_backward.cu has the passes before (delta) and after (dq_convert).
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, with the transposed products and the
// roles of FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 3.
//   [A2.6]  a block owns the keys K_j, V_j of one head; dK = 0, dV = 0                (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them
//   [A2.10] S^T = K_j Q_i^T
//   [A2.11] P^T = e^(score(S^T) - LSE), 0 where a pair is outside the band
//   [A2.12] dV = dV + P^T dO_i
//   [A2.13] dP^T = V_j dO_i^T
//   [A2.14] dS^T = P^T * (dP^T - delta), times what softcap makes of a gradient
//   [A2.15] dQ_i = dQ_i + dS K_j, in FP32 in global memory
//   [A2.16] dK = dK + dS^T Q_i
// Deterministic, with counters (dq_turns): blocks add to a tile of dQ in turns, those of the first keys first.
//
// Grid:   x = ceil(seqlen_k / kBlockN) * heads_k * batch, in the order of keys_in_sections: longest first,
//         heads in sections of L2 size; with counters blocks are numbered as they start. Packed: seqlen_k is the longest; blocks past the end of their sequence
//         return.
// Block:  two warpgroups of consumers, each with 64 of the block's keys as rows of S^T, dP^T, dK and dV, and
//         with half of dQ; then a warpgroup of helpers: a thread that loads tiles, a warp for LSE, a warp for
//         delta, a thread that adds dQ.
// Shared: K, V; two stages of Q, dO, LSE, delta and dS^T; dQ on its way to memory; barriers. dK and dV leave
//         through K and V.
//
// Assumes: what tensor maps ask for: base and strides of q, k, v, dO multiples of 16 bytes, last axes
//         contiguous; rows of dk and dv start on 16-byte boundaries; seqlens below 2^30; scale > 0 unless
//         kMask is any; q, k, v and dO finite. lse is the forward pass's.
// Not here: mask, bias, dropout (flash_backward.cu).
#include "backward_sm90.cuh"
#include "epilogue.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 128
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 128
#define CF_THREADS 384
#define CF_SHARED_BYTES 198656
#endif
constexpr int kHeadDim = CF_HEAD_DIM;    // the largest head dim of q, k and v
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
static_assert(CF_THREADS == 384 && kBlockM % 64 == 0 && kBlockN == 128);
constexpr Mask kMask = Mask::CF_MASK;

struct Kernel {
    using Element = CF_ELEMENT;
    static constexpr bool kAny = kMask == Mask::any;
    static constexpr int kHeadDim = CF_HEAD_DIM, kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
    static constexpr int kSumRows = CF_BLOCK_M, kDOStages = kStages, kPairTiles = kStages;
};
using Block = HopperBackward<Kernel>;
using Element = Kernel::Element;
using QTile = Block::QTile;
using KTile = Block::KTile;
using DSTile = Block::PairTile;
using Sums = Block::Sums;
using Step = Block::Step;
using SharedStorage = Block::SharedStorage;    // pairs: dS^T of two steps
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Named barriers of the consumers.
enum Barrier { kDSComplete = kCleared + 1, kKeysRead };
// dP is under way while P is made of S, dV while dS is made of dP. why not always: the operands of what is under
// way are registers too, beside dK and dV, and with 128 queries, or with softcap and ALiBi on top of head dim
// 128, all of it does not fit.
constexpr bool kEarlyDP = kMask == Mask::band || kHeadDim < 128;
constexpr bool kEarlyDV = kEarlyDP && kBlockM == 64;

// The half of dQ that a warpgroup stores: 64 of 128 rows, or half of the columns. Of columns it computes the
// whole blocks of K's tile that hold its half; head dims 64 and 96 do some twice.
struct DQHalf {
    static constexpr bool kByRows = kBlockM == 128;
    static constexpr int kColumns = kByRows ? kHeadDim : 64;    // computed
    static constexpr int kHalf = kByRows ? kHeadDim : kHeadDim / 2;
    static constexpr int kSecond = kByRows ? 0 : kHalf / KTile::kBlockColumns * KTile::kBlockColumns;
    static_assert(kSecond + kColumns == kHeadDim || kByRows, "the second half ends with the tile");
    static_assert(kSecond / 16 % Sums::kColumnGroups == 0, "places of columns add up");
    int warpgroup;

    CF_DEVICE int row() const { return kByRows ? 64 * warpgroup : 0; }
    CF_DEVICE int column() const { return kSecond * warpgroup; }    // the first that is computed

    CF_DEVICE void store(SharedStorage& s, const float (&rDQ)[kColumns / 2]) const {
        const int warp_row = row() + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
        const uint32_t to = smem_addr(s.dq) + (Sums::place(warp_row, column() / 8, 0) + threadIdx.x % 32) * 4;
        CF_UNROLL
        for (int i = 0; i < kColumns / 2; i++) {
            const int column = i / 4 * 8;
            const bool mine = warpgroup == 0 ? column < kHalf : kSecond + column >= kHeadDim - kHalf;
            if (mine) st_shared(to + Sums::place(0, i / 4, i % 4) * 4, rDQ[i]);
        }
    }
};

CF_DEVICE void consume(const HopperBackwardParams& p, SharedStorage& s, const Work& work, int warpgroup) {
    float rDK[kHeadDim / 2] = {}, rDV[kHeadDim / 2] = {};

    if (work.tiles.first < work.tiles.end) {
        const ByRows<KTile> k(s.k, 64 * warpgroup), v(s.v, 64 * warpgroup);
        const ByRows<QTile> q(s.q[0]), d_o(s.d_o[0]);
        const ByColumns<QTile> q_columns(s.q[0]), do_columns(s.d_o[0]);
        const DQHalf dq{warpgroup};
        const ByColumns<DSTile> ds(s.pairs[0], dq.row());
        const ByColumns<KTile> k_columns(s.k, dq.column());
        const Block::Gradient gradient(p.call.score, work.band, work.whole, work.first_key, warpgroup);

        // sync: K and V have come.
        mbar_wait(s.keys_full, 0);
        const int32_t keys = work.sequence.seqlen_k - work.first_key;
        if (keys < kBlockN) clear_after(keys, s.k, s.v);

        // [A2.8]
#pragma unroll 1
        for (Step step(work); step.exists(); step.advance()) {
            const int stage = step.at.stage;
            // [A2.10]
            float rS[kBlockM / 2], rDP[kBlockM / 2];
            s.q_ring.wait(step.at);
            const int32_t rows = work.sequence.seqlen_q - step.tile * kBlockM;
            if (rows < kBlockM) {
                s.do_ring.wait(step.at);
                clear_after(rows, s.q[stage], s.d_o[stage]);
            }
            wgmma_own(rS);
            wgmma_fence();
            multiply(rS, k, q.of_tile(stage), false);
            wgmma_commit();
            // [A2.13]
            const auto start_dp = [&] {
                s.do_ring.wait(step.at);
                wgmma_own(rDP);
                wgmma_fence();
                multiply(rDP, v, d_o.of_tile(stage), false);
                wgmma_commit();
            };
            if constexpr (kEarlyDP) start_dp();
            // sync: LSE and delta have come.
            mbar_wait(s.statistics[stage], step.at.phase);
            // sync: S is in registers.
            wgmma_wait<kEarlyDP ? 1 : 0>();
            wgmma_own(rS);
            // [A2.11]
            uint32_t rP16[kBlockM / 16][4], rDS16[kBlockM / 16][4];
            gradient.weigh(rS, rP16, smem_addr(s.lse_log2[stage]),
                           TileScore<Block::Product>(p.call.score, work.sequence, step.head), step.tile);
            if constexpr (!kEarlyDP) start_dp();
            // sync: dP is in registers.
            wgmma_wait<0>();
            wgmma_own(rDP);
            // [A2.12]
            const auto start_dv = [&] {
                wgmma_own(rDV);
                wgmma_fence();
                multiply(rDV, rP16, do_columns.of_tile(stage), true);
                wgmma_commit();
            };
            if constexpr (kEarlyDV) start_dv();
            // [A2.14]
            gradient.differentiate(rDP, rS, smem_addr(s.delta[stage]));
            to_fragments<Element>(rDS16, rDP);
            store_fragments(s.pairs[stage], 64 * warpgroup, 0, rDS16);
            if constexpr (!kEarlyDV) start_dv();
            fence_proxy_async();
            // sync: all of dS is in shared memory before products read it. And the other warpgroup has read
            // the dS of two steps ago, which is overwritten above: it waited for that dQ before it came here
            // in the step between.
            bar_sync(kDSComplete, kConsumerThreads);
            // [A2.15]
            float rDQ[DQHalf::kColumns / 2];
            wgmma_own(rDQ);
            wgmma_fence();
            multiply(rDQ, ds.of_tile(stage), k_columns, false);
            wgmma_commit();
            // [A2.16]
            wgmma_own(rDK);
            wgmma_fence();
            multiply(rDK, rDS16, q_columns.of_tile(stage), true);
            wgmma_commit();
            // sync: dV and dQ are in registers; dO, LSE and delta in use no more.
            wgmma_wait<1>();
            wgmma_own(rDV);
            wgmma_own(rDQ);
            s.do_ring.release(step.at);
            // sync: the dQ of the step before has left shared memory. In the first step none has to, and the
            // wait for the other parity of a fresh barrier passes.
            mbar_wait(s.dq_empty, stage ^ 1);
            dq.store(s, rDQ);
            fence_proxy_async();
            // sync: all lanes have stored before one tells the helper.
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbar_arrive(s.dq_full);
            // sync: dK is in registers, Q and the fragments of dS in use no more.
            wgmma_wait<0>();
            wgmma_own(rDK);
            s.q_ring.release(step.at);
        }
        // sync: no product reads K or V any more, through which dK and dV leave.
        bar_sync(kKeysRead, kConsumerThreads);
    }

    const Shape& shape = p.call.shape;
    const int32_t warp_row = 64 * warpgroup + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16;
    const int64_t row = work.sequence.first_k + work.first_key + warp_row;
    const int32_t rows = work.sequence.rows_k - work.first_key - warp_row;    // of the warp that exist
    const uint32_t staging = warp_row * kHeadDim * sizeof(Element);
    const auto store = [&](const Tensor& to, int32_t columns, const KTile& tile, auto& rGradient, float scale) {
        const float factor[1][2] = {{scale, scale}};
        store_warp_rows<Block::Product>(as_tile(rGradient), factor,
                                 {head_rows<Element>(to, work.batch, work.kv_head, row), to.row, rows, columns},
                                 smem_addr(tile.data) + staging);
    };
    store(p.call.dk, shape.head_dim, s.k, rDK, static_cast<float>(p.call.score.scale));
    store(p.call.dv, shape.head_dim_v, s.v, rDV, 1.0f);
}

CF_DEVICE void dqkv(const HopperBackwardParams& p) {
    Block::run(p, [&](SharedStorage& s, const Work& work, int warpgroup) { consume(p, s, work, warpgroup); });
}

CF_KERNEL(HopperBackwardParams, CF_THREADS, 1, dqkv)
