// Attention backward on Hopper, of 16-bit inputs: TMA, wgmma, warp specialisation. dK and dV from registers, dQ by bulk
// additions to FP32 sums; flash_backward.cu has the passes before (delta) and after (dq_convert).
// Design note: docs/kernels/backward_sm90.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, with the transposed products and the
// roles of FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 3.
//   [A2.6]  a block owns the keys K_j, V_j of one head; dK = 0, dV = 0                (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them
//   [A2.10] S^T = K_j Q_i^T
//   [A2.11] P^T = e^(score(S^T) - LSE), 0 where a pair is outside the band; kind spans: or masked by spans and blocks
//   [A2.12] dV = dV + P^T dO_i
//   [A2.13] dP^T = V_j dO_i^T
//   [A2.14] dS^T = P^T * (dP^T - delta), times what softcap makes of a gradient
//   [A2.15] dQ_i = dQ_i + dS K_j, in FP32 in global memory
//   [A2.16] dK = dK + dS^T Q_i
// Deterministic, with counters (dq_turns): blocks add to a tile of dQ in turns, in the order of dq_order.cuh. The
// first one stores; without counters sums are 0 at launch. Not of kind spans, which goes through tiles that
// flash_reach_of_keys, before it, has found to be seen.
//
// Grid:   x = ceil(seqlen_k / kBlockN) * heads_k * batch, in the order of lpt_key_tile: longest first,
//         heads in sections of L2 size; with counters blocks are numbered as they start. Packed: seqlen_k is the longest; blocks past the end of their sequence
//         return.
// Block:  two warpgroups of consumers, each with 64 of the block's keys as rows of S^T, dP^T, dK and dV, and
//         with half of dQ; then a warpgroup of helpers: a thread that loads tiles, a warp for LSE, a warp for
//         delta, a thread that adds dQ.
// Shared: K, V; two stages of Q, dO (one at head dim 192) and dS^T; LSE and delta, as an operand (one stage) or as
//         floats (two); a buffer for dQ; barriers; of kind spans a bit of each pair of two partial tiles. dK and dV
//         are staged in K and V.
//
// Assumes: what tensor maps require: base and strides of q, k, v, dO multiples of 16 bytes, last axes
//         contiguous; rows of dk and dv start on 16-byte boundaries; seqlens below 2^30; scale > 0 unless
//         kMask is any; q, k, v and dO finite. lse is the forward pass's. Where products subtract them, |LSE| /
//         scale and |delta| are below 2^31.
// Not here: mask, bias, dropout (flash_backward.cu).
#include "hopper/backward.cuh"
#include "tile/epilogue.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 128
#define CF_THREADS 384
#define CF_SHARED_BYTES 198656
#endif
constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V;    // the largest of q and k, and of v
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
static_assert(CF_THREADS == 384 && kBlockM % 16 == 0 && kBlockN == 128);
constexpr Mask kMask = Mask::CF_MASK;
// dK and dV fill more than half of the registers, and the tiles shared memory.
constexpr bool kScarce = kHeadDim + kHeadDimV > 256;

struct Kernel {
    using Element = CF_ELEMENT;
    static constexpr bool kAny = kMask == Mask::any;
    static constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V;
    static constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
    // why 64 at head dim 192: half of the columns are three blocks then, see DQHalf.
    static constexpr int kSwizzleOfK = kHeadDim == 64 || kHeadDim % 128 == 0 ? 128 : 64;
    static constexpr int kDOStages = kScarce ? 1 : kStages, kPairTiles = kStages;
    static constexpr bool kSumsDQ = true, kSpans = kMask == Mask::spans;
    // why not: softcap comes between S and LSE, and where registers are scarce there are none for the operand.
    static constexpr bool kSubtracted = !kAny && !kScarce;
};
using Block = HopperBackward<Kernel>;
using Element = Kernel::Element;
using QTile = Block::QTile;
using DOTile = Block::DOTile;
using KTile = Block::KTile;
using VTile = Block::VTile;
using DSTile = Block::PairTile;
using Sums = Block::Sums;
using Step = Block::Step;
using SharedStorage = Block::SharedStorage;    // pairs: dS^T of two steps
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// The products in flight while a warpgroup computes. why not always the same: operands of products in flight take
// registers beside dK and dV. They do not all fit with 128 queries, with head dim 128 under softcap or ALiBi, or with head
// dims 192 and 128.
// Whether dP is in flight while P is computed from S:
constexpr bool kEarlyDP = !kScarce && (!Kernel::kAny || kHeadDim < 128);
// When dV starts: alone, so that P is no longer needed when dP starts; right after dP, or when dP is complete, so that
// it overlaps with dS; or when dS is complete.
enum class Start { alone, beside_dp, after_dp, after_ds };
constexpr Start kDV = kScarce ? (Kernel::kAny ? Start::alone : Start::beside_dp)
                              : (kEarlyDP && kBlockM < 128 ? Start::after_dp : Start::after_ds);
// P is rounded when dV starts. why: the fragments do not fit beside S and dP of 128 queries.
constexpr bool kLateRounding = kDV == Start::after_ds && kBlockM == 128;
// dS is made of P as it was rounded. why: P in float does not fit beside its fragments and dP.
constexpr bool kRoundedP = kScarce || Block::kQueryRows;

// The half of dQ that a warpgroup stores: 64 of 128 rows, or half of the columns. Columns are computed in whole
// blocks of K's tile: of an even number of blocks every other one, else all that hold a column of the half, and
// head dims 64 and 96 do some twice.
template <class DSTile> struct DQHalf {
    static constexpr bool kByRows = kBlockM == 128, kEven = !kByRows && KTile::kBlocks % 2 == 0;
    static constexpr int kEvery = kEven ? 2 : 1, kBlock = KTile::kBlockColumns;
    static constexpr int kHalf = kByRows ? kHeadDim : kHeadDim / 2;
    static constexpr int kColumns = kByRows || kEven ? kHalf : 64;    // computed
    static constexpr int kSecond = kByRows ? 0 : kEven ? kBlock : kHalf / kBlock * kBlock;
    static_assert(kByRows || kEven || kSecond + kColumns == kHeadDim, "the second half ends with the tile");
    static_assert(kEvery * kSecond / 16 % Sums::kColumnGroups == 0, "places of columns add up");
    using Accumulator = float[kColumns / 2];
    const int warpgroup;
    const ByColumns<DSTile> ds;
    const ByColumns<KTile, kEvery> k;

    CF_DEVICE DQHalf(SharedStorage& s, int warpgroup)
        : warpgroup(warpgroup), ds(s.pairs[0], kByRows ? 64 * warpgroup : 0), k(s.k, kSecond * warpgroup) {}
    CF_DEVICE void multiply(Accumulator& rDQ, int stage) const {
        ::multiply(rDQ, ds.of_tile(stage), k, false);
    }
    CF_DEVICE void store(SharedStorage& s, const Accumulator& rDQ) const {
        const int warp_row = (kByRows ? 64 * warpgroup : 0) + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
        const int first = kSecond * warpgroup;    // column that is computed
        const uint32_t to = smem_addr(s.dq) + (Sums::place(warp_row, first / 8, 0) + threadIdx.x % 32) * 4;
        CF_UNROLL
        for (int i = 0; i < kColumns / 2; i++) {
            const int n = i / 4 * 8, column = n / kBlock * kEvery * kBlock + n % kBlock;
            const bool mine = kEven || (warpgroup == 0 ? n < kHalf : kSecond + n >= kHeadDim - kHalf);
            if (mine) st_shared(to + Sums::place(0, column / 8, i % 4) * 4, rDQ[i]);
        }
    }
    CF_DEVICE static void store_ds(DSTile& to, int warpgroup, const uint32_t (&rDS)[kBlockM / 16][4]) {
        store_fragments(to, 64 * warpgroup, 0, rDS);
    }
};
// The same transposed: dQ^T = K^T dS^T, whose rows are columns of K, 64 for each warpgroup. why: rows of a product come
// in 64, columns in 8, and so the queries of a tile may be any multiple of 16.
template <class DSTile> struct TransposedDQHalf {
    static_assert(DSTile::kRows == kBlockM && kHeadDim == 128, "a block of 64 columns for each warpgroup");
    using Accumulator = float[kBlockM / 2];
    const int warpgroup;
    const ByColumns<KTile> k;
    const ByRows<DSTile> ds;    // rows are queries

    CF_DEVICE TransposedDQHalf(SharedStorage& s, int warpgroup)
        : warpgroup(warpgroup), k(s.k, 64 * warpgroup), ds(s.pairs[0]) {}
    CF_DEVICE void multiply(Accumulator& rDQ, int stage) const {
        ::multiply(rDQ, k, ds.of_tile(stage), false);
    }
    CF_DEVICE void store(SharedStorage& s, const Accumulator& rDQ) const {
        const int warp = 4 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32;
        const uint32_t to = smem_addr(s.dq) + (Sums::transposed(16 * warp, 0) + threadIdx.x % 32 * 4) * 4;
        CF_UNROLL
        for (int n = 0; n < kBlockM / 8; n++)
            st_shared(to + Sums::transposed(0, n) * 4,
                      float4{rDQ[4 * n], rDQ[4 * n + 1], rDQ[4 * n + 2], rDQ[4 * n + 3]});
    }
    CF_DEVICE static void store_ds(DSTile& to, int warpgroup, const uint32_t (&rDS)[kBlockM / 16][4]) {
        const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
        // layout: a lane has the address of a row of one of four 8 x 8 blocks, keys 0 and 8, and queries 8 on.
        const int query = lane / 16 * 8 + lane % 8, chunk = 8 * warpgroup + 2 * warp + lane / 8 % 2;
        CF_UNROLL
        for (int k = 0; k < kBlockM / 16; k++)
            stmatrix_x4_trans(smem_addr(to.data) + DSTile::offset(16 * k + query, chunk), rDS[k]);
    }
};

template <bool kTransposed, class DSTile> struct HalfOf {
    using Type = DQHalf<DSTile>;
};
template <class DSTile> struct HalfOf<true, DSTile> {
    using Type = TransposedDQHalf<DSTile>;
};
using DQ = HalfOf<Block::kQueryRows, DSTile>::Type;

CF_DEVICE void consume(const HopperBackwardParams& p, SharedStorage& s, const WorkTile& work, int warpgroup) {
    float rDK[kHeadDim / 2] = {}, rDV[kHeadDimV / 2] = {};

    if (work.tiles.first < work.tiles.end) {
        const ByRows<KTile> k(s.k, 64 * warpgroup);
        const ByRows<VTile> v(s.v, 64 * warpgroup);
        const ByRows<QTile> q(s.q[0]);
        const ByRows<DOTile> d_o(s.d_o[0]);
        const ByColumns<QTile> q_columns(s.q[0]);
        const ByColumns<DOTile> do_columns(s.d_o[0]);
        const DQ dq(s, warpgroup);
        const ByRows<DSTile> ds_rows(s.pairs[0], 64 * warpgroup);
        const Block::Gradient gradient(p.call.score, work.band, work.whole, work.first_key, warpgroup);

        // sync: K and V have come.
        mbar_wait(s.keys_full, 0);
        const int32_t keys = work.sequence.seqlen_k - work.first_key;
        if (keys < kBlockN) clear_after(keys, s.k, s.v);

        // [A2.8]
#pragma unroll 1
        for (Step step(p.call, work); step.exists(); step.advance()) {
            const int stage = step.at.stage, do_stage = step.do_at().stage;
            // [A2.10]
            float rS[kBlockM / 2], rDP[kBlockM / 2];
            s.q_ring.wait(step.at);
            const int32_t rows = work.sequence.seqlen_q - step.tile * kBlockM;
            if (rows < kBlockM) {
                s.do_ring.wait(step.do_at());
                clear_after(rows, s.q[stage], s.d_o[do_stage]);
            }
            uint32_t rUnits[1][4];
            Block::Terms::units(rUnits);
            // sync: LSE and delta have come.
            if constexpr (Kernel::kSubtracted) mbar_wait(s.statistics[stage], step.at.phase);
            wgmma_fence_operand(rS);
            wgmma_fence();
            multiply(rS, k, q.of_tile(stage), false);
            s.terms.subtract(rS, rUnits, true);
            wgmma_commit();
            // [A2.13]
            const auto start_dp = [&] {
                s.do_ring.wait(step.do_at());
                wgmma_fence_operand(rDP);
                wgmma_fence();
                multiply(rDP, v, d_o.of_tile(do_stage), false);
                wgmma_commit();
            };
            if constexpr (kEarlyDP) start_dp();
            // sync: LSE and delta have come.
            if constexpr (!Kernel::kSubtracted) mbar_wait(s.statistics[stage], step.at.phase);
            // sync: S is in registers.
            wgmma_wait<kEarlyDP ? 1 : 0>();
            wgmma_fence_operand(rS);
            if constexpr (Kernel::kSubtracted) {
                // why not with dP: ptxas would hold the units twice, until S is there.
                wgmma_fence();
                s.terms.subtract(rDP, rUnits, false);
                wgmma_commit();
            }
            // [A2.11]
            uint32_t rP16[kBlockM / 16][4], rDS16[kBlockM / 16][4];
            uint32_t rWeights[kBlockM / 16][4];    // of gradients, rounded, where they are not P
            const uint32_t lse_log2 = s.terms.address(true, stage), delta = s.terms.address(false, stage);
            const uint32_t at_hand = static_cast<uint32_t>(step.tile);
            const TileScore<Block::Product> score(p.call.score, work.sequence, step.head);
            Block::apply_mask(s, rS, stage, gradient.warp_key);
            if constexpr (kScarce && Kernel::kAny)
                gradient.recompute_p(rS, rP16, rWeights, lse_log2, score, step.tile);
            else if constexpr (kLateRounding) gradient.recompute_p(rS, lse_log2, step.tile);
            else gradient.recompute_p(rS, rP16, lse_log2, score, step.tile);
            // [A2.12]
            const auto start_dv = [&] {
                if constexpr (kLateRounding) to_fragments<Element>(rP16, rS);
                wgmma_fence_operand(rDV);
                wgmma_fence();
                multiply(rDV, rP16, do_columns.of_tile(do_stage), true);
                wgmma_commit();
            };
            if constexpr (kDV == Start::alone) {
                s.do_ring.wait(step.do_at());
                start_dv();
                // sync: dV is in registers, P in use no more.
                wgmma_wait<0>();
            }
            if constexpr (!kEarlyDP) start_dp();
            if constexpr (kDV == Start::beside_dp) start_dv();
            // why: or ptxas waits for dP before it makes P.
            if constexpr (kEarlyDP) pin_schedule(at_hand);
            // sync: dP is in registers.
            wgmma_wait<kDV == Start::beside_dp ? 1 : 0>();
            wgmma_fence_operand(rDP);
            if constexpr (kDV == Start::after_dp) start_dv();
            // [A2.14]
            if constexpr (!kRoundedP) gradient.compute_ds(rDP, rS, delta);
            else if constexpr (Kernel::kAny) gradient.compute_ds(rDP, rWeights, delta);
            else gradient.compute_ds(rDP, rP16, delta);
            to_fragments<Element>(rDS16, rDP);
            DQ::store_ds(s.pairs[stage], warpgroup, rDS16);
            if constexpr (kDV == Start::after_ds) start_dv();
            fence_proxy_async();
            // sync: all of dS is in shared memory before products read it. And the other warpgroup has read
            // the dS of two steps ago, which is overwritten above: it waited for that dQ before it came here
            // in the step between.
            bar_sync(kDSComplete, kConsumerThreads);
            if constexpr (kScarce) {
                // sync: dV is in registers, dO in use no more. why already here: dQ takes the registers of P.
                wgmma_wait<0>();
                wgmma_fence_operand(rDV);
                s.do_ring.release(step.do_at());
            }
            // [A2.15]
            DQ::Accumulator rDQ;
            wgmma_fence_operand(rDQ);
            wgmma_fence();
            dq.multiply(rDQ, stage);
            wgmma_commit();
            // [A2.16]
            wgmma_fence_operand(rDK);
            wgmma_fence();
            // why dS from shared memory: its registers are those of dQ, too.
            if constexpr (kScarce) multiply(rDK, ds_rows.of_tile(stage), q_columns.of_tile(stage), true);
            else multiply(rDK, rDS16, q_columns.of_tile(stage), true);
            wgmma_commit();
            // sync: dQ is in registers, and dV; dO, LSE and delta in use no more.
            wgmma_wait<1>();
            wgmma_fence_operand(rDQ);
            if constexpr (!kScarce) {
                wgmma_fence_operand(rDV);
                s.do_ring.release(step.do_at());
            }
            // sync: the dQ of the step before has left shared memory. In the first step none has to, and the
            // wait for the other parity of a fresh barrier passes.
            mbar_wait(s.dq_empty, stage ^ 1);
            dq.store(s, rDQ);
            fence_proxy_async();
            // sync: all lanes have stored before one arrives for the helper.
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbar_arrive(s.dq_full);
            // sync: dK is in registers, Q and the fragments of dS in use no more.
            wgmma_wait<0>();
            wgmma_fence_operand(rDK);
            s.q_ring.release(step.at);
        }
        // sync: no product reads K or V any more, through which dK and dV leave.
        bar_sync(kKeysRead, kConsumerThreads);
    }

    const Shape& shape = p.call.shape;
    const int32_t warp_row = 64 * warpgroup + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16;
    const int64_t row = work.sequence.first_k + work.first_key + warp_row;
    const int32_t rows = work.sequence.rows_k - work.first_key - warp_row;    // of the warp that exist
    const auto store = [&](const Tensor& to, int32_t columns, const auto& tile, auto& rGradient,
                           float scale) {
        const float factor[1][2] = {{scale, scale}};
        const bool floats = p.call.float_gradients;
        store_warp_rows<Block::Product>(
            as_tile(rGradient), factor,
            rows_of_result<Element>(to, work.batch, work.kv_head, row, rows, columns, 0, floats),
            smem_addr(tile.data) + warp_row * int(sizeof tile.data / kBlockN), floats);
    };
    store(p.call.dk, shape.head_dim, s.k, rDK, static_cast<float>(p.call.score.scale));
    store(p.call.dv, shape.head_dim_v, s.v, rDV, 1.0f);
}

CF_DEVICE void dqkv(const HopperBackwardParams& p) {
    Block::run(
        p, [&](SharedStorage& s, const WorkTile& work, int warpgroup) { consume(p, s, work, warpgroup); });
}

CF_KERNEL(HopperBackwardParams, CF_THREADS, 1, dqkv)
