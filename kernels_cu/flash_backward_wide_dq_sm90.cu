// Attention backward on Hopper for head dims above 128, dQ: a block owns queries, and nothing is added in memory.
// flash_backward_wide_sm90.cu computes dK and dV.
// Design note: docs/kernels/wide.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, with its loops exchanged, as
//   flash_backward.cu has them in pass dq.
//   [A2.8]  a block owns the queries Q_i, dO_i of one head; dQ = 0; for each block of keys that the band lets see
//           one of them
//   [A2.10] S = Q_i K_j^T
//   [A2.11] P = e^(score(S) - LSE), 0 where a pair is outside the band
//   [A2.13] dP = dO_i V_j^T
//   [A2.14] dS = P * (dP - delta), times what softcap makes of a gradient
//   [A2.15] dQ_i = dQ_i + dS K_j
//
// Grid:   x = ceil(seqlen_q / kBlockM) * heads_q * batch, in the order of lpt_query_tile: longest first, heads in
//         sections of L2 size. Packed: seqlen_q is the longest; blocks past the end of their sequence return.
// Block:  two warpgroups of consumers, each with 64 of the block's queries as rows of S, dP and dQ; then a warpgroup
//         of which one thread loads tiles.
// Shared: Q, dO; two stages of K, one of V; barriers. dQ is staged in Q.
//
// Assumes: what flash_backward_sm90.cu does; rows of dq start on 16-byte boundaries.
// Not here: mask, bias, dropout (flash_backward.cu).
#include "hopper/consumers.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/query_gradient.cuh"
#include "tile/epilogue.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 256
#define CF_HEAD_DIM_V 256
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 64
#define CF_THREADS 384
#define CF_SHARED_BYTES 230400
#endif
constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V;
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
static_assert(CF_THREADS == 384 && kBlockM == 64 * kConsumers);
constexpr bool kAny = Mask::CF_MASK == Mask::any;

using Element = CF_ELEMENT;
using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, 64, kHeadDim>;      // of a warpgroup
using DOTile = SwizzledTile<Element, 64, kHeadDimV>;    // of a warpgroup
using KTile = SwizzledTile<Element, kBlockN, kHeadDim>;
using VTile = SwizzledTile<Element, kBlockN, kHeadDimV>;
using Gradient = QueryGradient<Product, kAny, kBlockN>;

// What a block works on.
struct QueryWork {
    Sequence sequence;
    NarrowBand band;
    int32_t batch, head, kv_head;
    int32_t first_query;
    Range blocks;    // blocks of keys of which a query of the block sees one
};
struct SharedStorage {
    QTile q[kConsumers];
    DOTile d_o[kConsumers];
    KTile k[kStages];
    VTile v;
    StageRing<kStages> k_ring;
    StageRing<1> v_ring;
    uint64_t queries_full;    // Q and dO have come
    QueryWork work;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// The blocks of keys in the order in which both roles go through them, from the last to the first.
struct Step {
    const Range& blocks;
    int32_t block;
    StageRing<kStages>::Cursor k_at;
    StageRing<1>::Cursor v_at;

    CF_DEVICE explicit Step(const QueryWork& work) : blocks(work.blocks), block(work.blocks.end - 1) {}
    CF_DEVICE bool exists() const { return block >= blocks.first; }
    CF_DEVICE void advance() { block--, k_at.advance(), v_at.advance(); }
};

CF_DEVICE void load_tiles(const HopperBackwardParams& p, SharedStorage& s, const QueryWork& work) {
    const int32_t batch = p.call.shape.packed ? 0 : work.batch;    // why: packed tensors have one batch
    const int32_t first_q = static_cast<int32_t>(work.sequence.first_q) + work.first_query;
    const int32_t first_k = static_cast<int32_t>(work.sequence.first_k);
    mbar_arrive_expect_tx(s.queries_full, kConsumers * (QTile::kBytes + DOTile::kBytes));
    CF_UNROLL
    for (int i = 0; i < kConsumers; i++) {
        load_tile(s.q[i], p.q_map, s.queries_full, first_q + 64 * i, work.head, batch);
        load_tile(s.d_o[i], p.do_map, s.queries_full, first_q + 64 * i, work.head, batch);
    }
#pragma unroll 1
    for (Step step(work); step.exists(); step.advance()) {
        const int stage = step.k_at.stage, row = first_k + step.block * kBlockN;
        s.k_ring.acquire(step.k_at, KTile::kBytes);
        load_tile(s.k[stage], p.k_map, s.k_ring.full[stage], row, work.kv_head, batch);
        s.v_ring.acquire(step.v_at, VTile::kBytes);
        load_tile(s.v, p.v_map, s.v_ring.full[0], row, work.kv_head, batch);
    }
}

CF_DEVICE void consume(const HopperBackwardParams& p, SharedStorage& s, const QueryWork& work,
                       int warpgroup) {
    float rDQ[kHeadDim / 2] = {};
    const int32_t first_query = work.first_query + 64 * warpgroup;

    if (work.blocks.first < work.blocks.end) {
        const ByRows<QTile> q(s.q[warpgroup]);
        const ByRows<DOTile> d_o(s.d_o[warpgroup]);
        const ByRows<KTile> k(s.k[0]);
        const ByRows<VTile> v(s.v);
        const ByColumns<KTile> k_columns(s.k[0]);
        const Gradient gradient(p.call, work.sequence, work.band, work.head, first_query);
        uint32_t rDS16[kBlockN / 16][4];    // an operand until the dQ of the next step

        // sync: Q and dO have come.
        mbar_wait(s.queries_full, 0);
        Step step(work);
        const int32_t keys = work.sequence.seqlen_k - step.block * kBlockN;
        if (keys < kBlockN) {
            s.k_ring.wait(step.k_at);
            s.v_ring.wait(step.v_at);
            clear_after(keys, s.k[0], s.v);
        }

        // [A2.8]
#pragma unroll 1
        for (; step.exists(); step.advance()) {
            // [A2.10]
            float rS[kBlockN / 2], rDP[kBlockN / 2];
            const int stage = step.k_at.stage;
            s.k_ring.wait(step.k_at);
            wgmma_fence_operand(rS);
            wgmma_fence();
            multiply(rS, q, k.of_tile(stage), false);
            wgmma_commit();
            // [A2.13]
            s.v_ring.wait(step.v_at);
            wgmma_fence_operand(rDP);
            wgmma_fence();
            multiply(rDP, d_o, v, false);
            wgmma_commit();
            // sync: S is in registers, and so is the dQ of the step before, whose K is in use no more.
            wgmma_wait<1>();
            wgmma_fence_operand(rS);
            wgmma_fence_operand(rDQ);
            if (step.block + 1 < work.blocks.end) s.k_ring.release({stage ^ 1, 0});
            // [A2.11]
            gradient.recompute_p(rS, TileScore<Product>(p.call.score, work.sequence, work.head), step.block);
            // why: or ptxas waits for dP before it makes P.
            pin_schedule(static_cast<uint32_t>(step.block));
            // sync: dP is in registers, V in use no more.
            wgmma_wait<0>();
            wgmma_fence_operand(rDP);
            s.v_ring.release(step.v_at);
            // [A2.14]
            gradient.compute_ds(rDP, rS);
            to_fragments<Element>(rDS16, rDP);
            // [A2.15]
            wgmma_fence_operand(rDQ);
            wgmma_fence();
            multiply(rDQ, rDS16, k_columns.of_tile(stage), true);
            wgmma_commit();
        }
        // sync: dQ is in registers.
        wgmma_wait<0>();
        wgmma_fence_operand(rDQ);
    }

    const int32_t in_tile = static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16, query = first_query + in_tile;
    const float scale = static_cast<float>(p.call.score.scale);
    const float factor[1][2] = {{scale, scale}};
    const bool floats = p.call.float_gradients;
    const auto gDQ =
        rows_of_result<Element>(p.call.dq, work.batch, work.head, work.sequence.first_q + query,
                                work.sequence.seqlen_q - query, p.call.shape.head_dim, 0, floats);
    store_warp_rows<Product>(as_tile(rDQ), factor, gDQ,
                             smem_addr(s.q[warpgroup].data) + in_tile * kHeadDim * int(sizeof(Element)),
                             floats);
}

CF_DEVICE void dq(const HopperBackwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const Shape& shape = p.call.shape;
    const TileCoord mine = lpt_query_tile(blockIdx.x, cdiv(shape.seqlen_q, kBlockM), shape, shape.heads_q,
                                          kL2SectionBytes / uint32_t(sizeof(Element)));
    const Sequence sequence = sequence_of(shape, mine.batch);
    const int32_t first_query = mine.tile * kBlockM;
    if (first_query >= sequence.seqlen_q) return;
    const Band band(p.call.score, sequence);
    const Range keys = band.keys_of(first_query, first_query + kBlockM);
    const QueryWork work{sequence,
                         NarrowBand(band),
                         mine.batch,
                         mine.head,
                         mine.head / (shape.heads_q / shape.heads_k),
                         first_query,
                         {keys.first / kBlockN, cdiv(keys.end, kBlockN)}};

    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        tma_prefetch(p.q_map), tma_prefetch(p.do_map), tma_prefetch(p.k_map), tma_prefetch(p.v_map);
        s.work = work;
        s.k_ring.init(kConsumers);
        s.v_ring.init(kConsumers);
        mbar_init(s.queries_full, 1);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup < kConsumers) {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, s, s.work, warpgroup);
    } else {
        setmaxnreg_dec<kHelperRegisters>();
        if (work.blocks.first < work.blocks.end && threadIdx.x == 128 * kConsumers) load_tiles(p, s, s.work);
    }
}

CF_KERNEL(HopperBackwardParams, CF_THREADS, 1, dq)
