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
#include "epilogue.cuh"
#include "gradient_sums.cuh"
#include "pipeline.cuh"
#include "transposed_gradient.cuh"

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
// What a score can meet. band: the end of the keys, causal, window. any: also softcap, ALiBi, scale <= 0.
enum class Mask { band, any };
using Element = CF_ELEMENT;
constexpr Mask kMask = Mask::CF_MASK;
constexpr int kHeadDim = CF_HEAD_DIM;    // the largest head dim of q, k and v
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = 2;
constexpr int kConsumers = kBlockN / 64;
constexpr uint32_t kSectionBytes = 16
                                   << 20;    // of Q and dO that should stay in L2, beside as many sums of dQ
static_assert(kConsumers == 2 && kThreads == 384 && kBlockM % 64 == 0);

using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, kBlockM, kHeadDim>;    // of Q and dO
using KTile = SwizzledTile<Element, kBlockN, kHeadDim>;    // of K and V
using DSTile = SwizzledTile<Element, kBlockN, kBlockM>;    // of dS^T: rows are keys
using Sums = GradientSums<kBlockM, kHeadDim, 256>;         // as flash_backward.cu has them
using Ring = StageRing<kStages>;
using Gradient = TransposedGradient<Product, kMask == Mask::any, kBlockM>;

// What a block works on.
// why in shared memory: the little that loops need of it is read there again, and takes no registers.
struct Work {
    Sequence sequence;
    NarrowBand band;
    int32_t batch, kv_head, first_head, end_head;    // query heads that read K and V
    int32_t first_key;
    Range tiles, whole;    // tiles of queries that see a key of the block; in which every pair counts
};
// The pairs of a head and a tile of queries, in the order in which all roles go through them.
// why tiles from the last to the first: with turns a block comes to a tile right after the block before it,
// whatever the mask; the other way round blocks under a causal mask would begin where the one before is late.
struct Step {
    const Work& work;
    int32_t head, tile;
    typename Ring::Cursor at;

    CF_DEVICE explicit Step(const Work& of) : work(of), head(of.first_head), tile(of.tiles.end - 1) {}
    CF_DEVICE bool exists() const { return head < work.end_head; }
    CF_DEVICE void advance() {
        if (tile-- == work.tiles.first) tile = work.tiles.end - 1, head++;
        at.advance();
    }
};

struct SharedStorage {
    KTile k, v;
    QTile q[kStages], d_o[kStages];
    DSTile ds[kStages];
    float dq[kBlockM * kHeadDim];    // layout: Sums
    float lse_log2[kStages][kBlockM], delta[kStages][kBlockM];
    Ring q_ring, do_ring;
    uint64_t statistics[kStages];    // LSE and delta have come; they are free when dO is
    uint64_t keys_full;              // K and V have come
    uint64_t dq_full, dq_empty;      // dQ is complete; has left. Their phase is the stage of the step
    uint32_t number;                 // of the block, with counters
    Work work;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Named barriers of the consumers.
enum Barrier { kCleared = 1, kDSComplete, kKeysRead };
constexpr int kConsumerThreads = 128 * kConsumers;
// dP is under way while P is made of S, dV while dS is made of dP. why not always: the operands of what is under
// way are registers too, beside dK and dV, and with 128 queries, or with softcap and ALiBi on top of head dim
// 128, all of it does not fit.
constexpr bool kEarlyDP = kMask == Mask::band || kHeadDim < 128;
constexpr bool kEarlyDV = kEarlyDP && kBlockM == 64;

// ---- helpers

CF_DEVICE void load_tiles(const HopperBackwardParams& p, SharedStorage& s, const Work& work) {
    const int32_t batch = p.call.shape.packed ? 0 : work.batch;    // why: packed tensors have one batch
    const int32_t first_q = static_cast<int32_t>(work.sequence.first_q);
    const int32_t first_k = static_cast<int32_t>(work.sequence.first_k) + work.first_key;
    mbar_arrive_expect_tx(s.keys_full, 2 * KTile::kBytes);
    load_tile(s.k, p.k_map, s.keys_full, first_k, work.kv_head, batch);
    load_tile(s.v, p.v_map, s.keys_full, first_k, work.kv_head, batch);
#pragma unroll 1
    for (Step step(work); step.exists(); step.advance()) {
        const int stage = step.at.stage, row = first_q + step.tile * kBlockM;
        s.q_ring.acquire(step.at, QTile::kBytes);
        load_tile(s.q[stage], p.q_map, s.q_ring.full[stage], row, step.head, batch);
        s.do_ring.acquire(step.at, QTile::kBytes);
        load_tile(s.d_o[stage], p.do_map, s.do_ring.full[stage], row, step.head, batch);
    }
}

// LSE or delta, by a warp each. why: one warp with both has too few registers.
// why +inf: rows without keys have an LSE of -inf, rows past the end none; both get P = 0, with no test per
// element.
CF_DEVICE void load_statistic(const Rows& rows, bool is_lse, float (&to)[kStages][kBlockM], SharedStorage& s,
                              const Work& work) {
    const float missing = is_lse ? kInfinity : 0.0f, unit = is_lse ? kLog2e : 1.0f;
#pragma unroll 1
    for (Step step(work); step.exists(); step.advance()) {
        const int stage = step.at.stage;
        // sync: the consumers have read what the pass before put here.
        mbar_wait(s.do_ring.empty[stage], step.at.phase ^ 1);
    CF_UNROLL
        for (int i = 0; i < kBlockM / 32; i++) {
            const int32_t row = 32 * i + threadIdx.x % 32, query = step.tile * kBlockM + row;
            float x = missing;
            if (query < work.sequence.seqlen_q)
                x = unit * ld_global(head_rows<float>(rows, work.batch, step.head, work.sequence.first_q + query));
            st_shared(smem_addr(to[stage] + row), is_lse && x == -kInfinity ? kInfinity : x);
        }
        // sync: all lanes have stored before one tells the consumers.
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbar_arrive(s.statistics[stage]);
    }
}

// Blocks of earlier keys that a tile of queries sees. They add to its dQ before this one does.
CF_DEVICE uint32_t turn_of(const Work& work, int32_t tile) {
    return work.first_key / kBlockN - larger(work.band.first_key(tile * kBlockM), 0) / kBlockN;
}

CF_DEVICE void add_dq(const HopperBackwardParams& p, SharedStorage& s, const Work& work) {
#pragma unroll 1
    for (Step step(work); step.exists(); step.advance()) {
        const int64_t number = Sums::number(p.call.shape, work.sequence, step.tile, step.head);
        // sync: every consumer warp has stored its part of dQ.
        mbar_wait(s.dq_full, step.at.stage);
        if (p.call.dq_turns) {
            // sync: what blocks of earlier keys add is in memory, and comes before what is added here.
            wait_turn(p.call.dq_turns + number, turn_of(work, step.tile));
            fence_proxy_async_global();
        }
        bulk_reduce_add(Sums::tile(p.call.dq_accumulator, number), s.dq, sizeof s.dq);
        tma_store_commit();
        // sync: dQ has been read, its place is free; in the end: no copy reads shared memory any more.
        tma_store_wait_read<0>();
        mbar_arrive(s.dq_empty);
        if (p.call.dq_turns) {
            // sync: it has been added before the next block may add.
            tma_store_wait<0>();
            end_turn(p.call.dq_turns + number);
        }
    }
}

// ---- consumers

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

// Where a sequence ends before a pair of tiles, other rows follow in memory. why: their weights are 0, but 0
// times NaN is NaN.
template <class T>
CF_DEVICE void clear_after(int32_t rows, T& a, T& b) {
    clear_rows(a, rows, threadIdx.x, kConsumerThreads);
    clear_rows(b, rows, threadIdx.x, kConsumerThreads);
    fence_proxy_async();
    // sync: all consumers have cleared their share before products of any read it.
    bar_sync(kCleared, kConsumerThreads);
}

CF_DEVICE void consume(const HopperBackwardParams& p, SharedStorage& s, const Work& work, int warpgroup) {
    float rDK[kHeadDim / 2] = {}, rDV[kHeadDim / 2] = {};

    if (work.tiles.first < work.tiles.end) {
        const ByRows<KTile> k(s.k, 64 * warpgroup), v(s.v, 64 * warpgroup);
        const ByRows<QTile> q(s.q[0]), d_o(s.d_o[0]);
        const ByColumns<QTile> q_columns(s.q[0]), do_columns(s.d_o[0]);
        const DQHalf dq{warpgroup};
        const ByColumns<DSTile> ds(s.ds[0], dq.row());
        const ByColumns<KTile> k_columns(s.k, dq.column());
        const Gradient gradient(p.call.score, work.band, work.whole, work.first_key, warpgroup);

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
                           TileScore<Product>(p.call.score, work.sequence, step.head), step.tile);
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
            store_fragments(s.ds[stage], 64 * warpgroup, 0, rDS16);
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
        store_warp_rows<Product>(as_tile(rGradient), factor,
                                 {head_rows<Element>(to, work.batch, work.kv_head, row), to.row, rows, columns},
                                 smem_addr(tile.data) + staging);
    };
    store(p.call.dk, shape.head_dim, s.k, rDK, static_cast<float>(p.call.score.scale));
    store(p.call.dv, shape.head_dim_v, s.v, rDV, 1.0f);
}

CF_DEVICE void dqkv(const HopperBackwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const Shape& shape = p.call.shape;
    uint32_t block = blockIdx.x;
    if (p.call.next_block) {
        // why: a block waits for blocks with lower numbers only, and whoever has a number is running. In which
        // order blocks start is the hardware's business.
        if (threadIdx.x == 0) s.number = take_number(p.call.next_block);
        // sync: all threads see the number.
        __syncthreads();
        block = s.number;
    }
    const BlockWork mine = keys_in_sections(block, cdiv(shape.seqlen_k, kBlockN), shape,
                                            kSectionBytes / uint32_t(sizeof(Element)));
    const Sequence sequence = sequence_of(shape, mine.batch);
    const int32_t first_key = mine.tile * kBlockN, group = shape.heads_q / shape.heads_k;
    if (first_key >= sequence.rows_k) return;
    const Band band(p.call.score, sequence);
    const Range queries = band.queries_of(first_key, first_key + kBlockN);
    const Work work{sequence,
                    NarrowBand(band),
                    mine.batch,
                    mine.head,
                    mine.head * group,
                    (mine.head + 1) * group,
                    first_key,
                    {queries.first / kBlockM, cdiv(queries.end, kBlockM)},
                    Gradient::whole_tiles(band, first_key, kBlockN)};

    const int warpgroup = warpgroup_of_thread();
    if (threadIdx.x == 0) {
        s.work = work;
        s.q_ring.init(kConsumers);
        s.do_ring.init(kConsumers);
        CF_UNROLL
        for (int i = 0; i < kStages; i++) mbar_init(s.statistics[i], 2);
        mbar_init(s.keys_full, 1);
        mbar_init(s.dq_full, kConsumerThreads / 32);
        mbar_init(s.dq_empty, 1);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup < kConsumers) {
        setmaxnreg_inc<240>();
        consume(p, s, s.work, warpgroup);
    } else {
        setmaxnreg_dec<24>();
        if (work.tiles.first == work.tiles.end) return;
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        if (warp == 0 && lane == 0) load_tiles(p, s, s.work);
        if (warp == 1) load_statistic(p.call.lse, true, s.lse_log2, s, s.work);
        if (warp == 2) load_statistic(p.call.delta, false, s.delta, s, s.work);
        if (warp == 3 && lane == 0) add_dq(p, s, s.work);
    }
}

CF_KERNEL(HopperBackwardParams, kThreads, 1, dqkv)
