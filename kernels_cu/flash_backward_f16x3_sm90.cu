// Attention backward of float32 on Hopper: flash_backward_sm90 with three products of halves for each product of floats.
// Design note: docs/kernels/float32.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, with the transposed products of FlashAttention-3
// (Shah et al., arXiv:2407.08608), Algorithm 3; products of split operands as in flash_forward_f16x3_sm90.
//   [A2.6]  a block owns the keys K_j, V_j of one head; dK = 0, dV = 0                (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them
//   [A2.10] S^T = K_j Q_i^T
//   [A2.11] P^T = e^(score(S^T) - LSE), 0 where a pair is outside the band
//   [A2.12] T = P^T dO_i, dV = dV + T, in float
//   [A2.13] dP^T = V_j dO_i^T
//   [A2.14] dS^T = P^T * (dP^T - delta)
//   [A2.15] dQ_i = dQ_i + dS K_j, in FP32 in global memory
//   [A2.16] T = dS^T Q_i, dK = dK + T, in float
//
// Scales: halves of a tile stand for 2^n times its floats, see hopper/halves.cuh. So do those of P, n of a warp's 16
// keys and the tile's queries, and those of dS, n of a warpgroup's 64 keys: dQ sums over them. T is a sum of one tile of
// queries for two reasons: the next one has another n, and what tensor cores cut off would add up.
//
// Grid:   x = ceil(seqlen_k / kBlockN) * heads_k * batch, in the order of lpt_key_tile. Packed: seqlen_k is the longest;
//         blocks past the end of their sequence return.
// Block:  two warpgroups of consumers, each with 64 of the block's keys as rows of S^T, dP^T, dK and dV, and with the
//         dQ of these keys; neither waits for the other. Then a warpgroup of helpers: a thread that loads tiles, a warp
//         for LSE, a warp for delta, a thread that adds dQ.
// Shared: K, V; two stages of Q and dO; of each warpgroup dS^T and a buffer for dQ, all but dQ as halves; LSE
//         and delta; units; barriers.
//
// Assumes: pass of_gradients of flash_split_f16 has run, as has delta, and dq_convert of flash_backward.cu follows; rows
//         of dk and dv start on 8-byte boundaries; seqlens below 2^30; scale > 0; q, k, v and dO finite. Sums of dQ are 0
//         at launch.
// Not here: softcap, ALiBi, spans, mask, bias, dropout, dQ in an order (flash_backward.cu); head dims above 64.
#include "hopper/backward.cuh"
#include "attention/softmax.cuh"
#include "hopper/halves.cuh"

// ---- Config
#if !defined(CF_BLOCK_M)
#define CF_HEAD_DIM 64
#define CF_HEAD_DIM_V 64
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 128
#define CF_THREADS 384
#define CF_SHARED_BYTES 198656
#endif
constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V;    // the largest of q and k, and of v
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
static_assert(CF_THREADS == 384 && kBlockM == 64 && kBlockN == 128);
static_assert(kHeadDim == 64 && kHeadDimV == 64,
              "a tile of keys is two tiles of 64 rows, one after the other");

struct Kernel {
    using Element = __half;
    static constexpr bool kAny = false;
    static constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V;
    static constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
    static constexpr int kSwizzleOfK = 128, kDOStages = kStages, kPairTiles = 1;
    static constexpr bool kSumsDQ = true, kSpans = false, kSubtracted = false;
};
using Block = HopperBackward<Kernel>;
using Sums = Block::Sums;
using Step = Block::Step;
using QHalves = Halves<kBlockM, kHeadDim>;
using DOHalves = Halves<kBlockM, kHeadDimV>;
using KHalves = Halves<kBlockN, kHeadDim>;    // as they lie in the workspace
using VHalves = Halves<kBlockN, kHeadDimV>;
using OwnTile = SwizzledTile<__half, 64, 64>;    // a half of a warpgroup's keys
using DSHalves = Halves<64, kBlockM>;

struct SharedStorage {
    OwnTile k[2][kConsumers], v[2][kConsumers];    // first halves of all keys, then second ones
    QHalves q[kStages];
    DOHalves d_o[kStages];
    DSHalves ds[kConsumers];                                     // transposed: rows are keys
    float dq[kConsumers][kBlockM * kHeadDim];                    // layout: Sums
    float4 k_unit, v_unit, q_unit[kStages], do_unit[kStages];    // 1 / s, four times
    Block::Terms terms;
    StageRing<kStages> q_ring, do_ring;
    uint64_t statistics[kStages];                          // LSE and delta have come
    uint64_t keys_full;                                    // K and V have come
    uint64_t dq_full[kConsumers], dq_empty[kConsumers];    // dQ is complete; has left. Phase: the stage
    alignas(16) uint32_t highest[kConsumers][4];           // of each warp: bits of the largest dS
    WorkTile work;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// d = the three products of halves, small ones first. a, b: of both halves.
template <int n, class A0, class A1, class B> CF_DEVICE void multiply_halves(float (&d)[n], const A0& a0,
                                                                             const A1& a1, const B& b0,
                                                                             const B& b1) {
    wgmma_fence_operand(d);
    wgmma_fence();
    multiply(d, a1, b0, false);
    multiply(d, a0, b1, true);
    multiply(d, a0, b0, true);
    wgmma_commit();
}
// d += t, in float, and t is counted in `unit`.
template <int n> CF_DEVICE void add_in_float(float (&d)[n], const float (&t)[n], float unit) {
    CF_UNROLL
    for (int i = 0; i < n; i++) d[i] = fmaf(t[i], unit, d[i]);
}
// The bits of the size of the largest finite one.
template <int n> CF_DEVICE uint32_t largest_size(const float (&x)[n]) {
    uint32_t highest = 0;
    CF_UNROLL
    for (int i = 0; i < n; i++) highest = larger_size(highest, x[i]);
    return max_over_lanes<32>(highest);
}
// An accumulator as both halves of an operand A.
template <int kSteps, int n>
CF_DEVICE void to_halves(uint32_t (&a)[2][kSteps][4], const float (&x)[n], float factor) {
    static_assert(8 * kSteps == n);
    CF_UNROLL
    for (int k = 0; k < kSteps; k++) {
        CF_UNROLL
        for (int i = 0; i < 4; i++)
            split_pair(x[8 * k + 2 * i] * factor, x[8 * k + 2 * i + 1] * factor, a[0][k][i], a[1][k][i]);
    }
}

CF_DEVICE void store_dq(SharedStorage& s, int warpgroup, const float (&rDQ)[kHeadDim / 2], float unit) {
    const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    const uint32_t to = smem_addr(s.dq[warpgroup]) + (Sums::place(warp_row, 0, 0) + threadIdx.x % 32) * 4;
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; i++) st_shared(to + Sums::place(0, i / 4, i % 4) * 4, rDQ[i] * unit);
}

// The rows of a warpgroup to a gradient of k or v.
CF_DEVICE void store_rows(const WorkTile& work, int warpgroup, const Tensor& to, int32_t columns,
                          const float (&x)[kHeadDim / 2], float factor) {
    const int lane = threadIdx.x % 32;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t row = work.first_key + 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16 +
                            8 * half + lane / 4;
        if (row >= work.sequence.rows_k) continue;
        float* at = head_rows<float>(to, work.batch, work.kv_head, work.sequence.first_k + row);
        CF_UNROLL
        for (int n = 0; n < kHeadDim / 8; n++) {
            const int column = 8 * n + lane % 4 * 2;
            const float2 pair{x[4 * n + 2 * half] * factor, x[4 * n + 2 * half + 1] * factor};
            if (column + 1 < columns) st_global(reinterpret_cast<float2*>(at + column), pair);
            else if (column < columns) st_global(at + column, pair.x);
        }
    }
}

CF_DEVICE void consume(const F16x3BackwardParams& p, SharedStorage& s, const WorkTile& work, int warpgroup) {
    float rDK[kHeadDim / 2] = {}, rDV[kHeadDimV / 2] = {};
    if (work.tiles.first < work.tiles.end) {
        const ByRows<OwnTile> k(s.k[0][warpgroup]), v(s.v[0][warpgroup]);
        const ByColumns<OwnTile> k_columns(s.k[0][warpgroup]);
        const ByRows<QHalves::Part> q(s.q[0].part[0]);
        const ByRows<DOHalves::Part> d_o(s.d_o[0].part[0]);
        const ByColumns<QHalves::Part> q_columns(s.q[0].part[0]);
        const ByColumns<DOHalves::Part> do_columns(s.d_o[0].part[0]);
        const ByColumns<DSHalves::Part> ds(s.ds[warpgroup].part[0]);
        Block::Gradient gradient(p.call.score, work.band, work.whole, work.first_key, warpgroup);
        const float scale_log2 = gradient.unit_log2;

        // sync: K and V have come.
        mbar_wait(s.keys_full, 0);
        // [A2.8]
#pragma unroll 1
        for (Step step(p.call, work); step.exists(); step.advance()) {
            const int stage = step.at.stage, first = 2 * stage, second = first + 1;
            // [A2.10]
            float rS[kBlockM / 2], rDP[kBlockM / 2];
            s.q_ring.wait(step.at);
            multiply_halves(rS, k, k.of_tile(kConsumers), q.of_tile(first), q.of_tile(second));
            // [A2.13]
            s.do_ring.wait(step.at);
            multiply_halves(rDP, v, v.of_tile(kConsumers), d_o.of_tile(first), d_o.of_tile(second));
            const float q_unit = s.q_unit[stage].x, do_unit = s.do_unit[stage].x;
            // sync: LSE and delta have come.
            mbar_wait(s.statistics[stage], step.at.phase);
            // sync: S is in registers.
            wgmma_wait<1>();
            wgmma_fence_operand(rS);
            // [A2.11] why a bound: -inf outside the band, times 0, would be NaN.
            gradient.unit_log2 = fmaxf(scale_log2 * unit_of_product(s.k_unit.x, q_unit), 1.1754944e-38f);
            gradient.recompute_p(rS, s.terms.address(true, stage), step.tile);
            uint32_t rHalves[2][kBlockM / 16][4];
            const HalvesScale of_p(largest_size(rS));
            to_halves(rHalves, rS, of_p.factor);
            // [A2.12]
            float rT[kHeadDimV / 2];
            multiply_halves(rT, rHalves[0], rHalves[1], do_columns.of_tile(first),
                            do_columns.of_tile(second));
            // sync: dP is in registers.
            wgmma_wait<1>();
            wgmma_fence_operand(rDP);
            // [A2.14]
            gradient.compute_ds(rDP, rS, s.terms.address(false, stage), unit_of_sum(s.v_unit.x, do_unit));
            const uint32_t mine = largest_size(rDP);
            if (threadIdx.x % 32 == 0)
                st_shared(smem_addr(&s.highest[warpgroup][threadIdx.x / 32 % 4]), mine);
            // sync: the largest dS of every warp is visible. And all warps are done with dQ of the step before, whose dS
            // is overwritten below.
            bar_sync(kOwnDS + warpgroup, 128);
            const uint4 all = ld_shared<uint4>(smem_addr(s.highest[warpgroup]));
            const HalvesScale of_ds(larger(larger(all.x, all.y), larger(all.z, all.w)));
            uint32_t rDS[2][kBlockM / 16][4];
            to_halves(rDS, rDP, of_ds.factor);
            CF_UNROLL
            for (int i = 0; i < 2; i++) store_fragments(s.ds[warpgroup].part[i], 0, 0, rDS[i]);
            fence_proxy_async();
            // sync: all of dS is in shared memory before products read it, and all warps have read LSE and delta, units
            // and which dS is the largest.
            bar_sync(kOwnDS + warpgroup, 128);
            // sync: T is in registers, P and dO in use no more.
            wgmma_wait<0>();
            wgmma_fence_operand(rT);
            s.do_ring.release(step.at);
            add_in_float(rDV, rT, unit_of_sum(of_p.unit, do_unit));
            // [A2.15]
            float rDQ[kHeadDim / 2];
            multiply_halves(rDQ, ds, ds.of_tile(1), k_columns, k_columns.of_tile(kConsumers));
            // [A2.16]
            multiply_halves(rT, rDS[0], rDS[1], q_columns.of_tile(first), q_columns.of_tile(second));
            // sync: dQ is in registers.
            wgmma_wait<1>();
            wgmma_fence_operand(rDQ);
            // sync: the dQ of the step before has left shared memory. In the first step none has to, and the wait for
            // the other parity of a fresh barrier passes.
            mbar_wait(s.dq_empty[warpgroup], stage ^ 1);
            store_dq(s, warpgroup, rDQ, unit_of_sum(of_ds.unit, s.k_unit.x));
            fence_proxy_async();
            // sync: all lanes have stored before one arrives for the helper.
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbar_arrive(s.dq_full[warpgroup]);
            // sync: T is in registers, Q in use no more.
            wgmma_wait<0>();
            wgmma_fence_operand(rT);
            s.q_ring.release(step.at);
            add_in_float(rDK, rT, unit_of_sum(of_ds.unit, q_unit));
        }
    }
    store_rows(work, warpgroup, p.call.dk, p.call.shape.head_dim, rDK,
               static_cast<float>(p.call.score.scale));
    store_rows(work, warpgroup, p.call.dv, p.call.shape.head_dim_v, rDV, 1.0f);
}

// ---- helpers

template <class Record>
CF_DEVICE void load_record(void* tile, float4& unit, const void* records, int64_t number, uint64_t& full) {
    const uint8_t* from = static_cast<const uint8_t*>(records) + number * Record::kRecord;
    bulk_load(tile, from, Record::kBytes, full);
    bulk_load(&unit, from + Record::kBytes, 16, full);
}

CF_DEVICE void load_tiles(const F16x3BackwardParams& p, SharedStorage& s, const WorkTile& work) {
    const Shape& shape = p.call.shape;
    const int64_t of_k = record_of_k(shape, work.sequence, work.kv_head, work.first_key / kBlockN, kBlockN);
    mbar_arrive_expect_tx(s.keys_full, KHalves::kBytes + VHalves::kBytes + 32);
    load_record<KHalves>(s.k, s.k_unit, p.k_halves, of_k, s.keys_full);
    load_record<VHalves>(s.v, s.v_unit, p.v_halves, of_k, s.keys_full);
#pragma unroll 1
    for (Step step(p.call, work); step.exists(); step.advance()) {
        const int stage = step.at.stage;
        const int64_t of_q = Sums::number(shape, work.sequence, step.tile, step.head);
        s.q_ring.acquire(step.at, QHalves::kBytes + 16);
        load_record<QHalves>(s.q + stage, s.q_unit[stage], p.q_halves, of_q, s.q_ring.full[stage]);
        s.do_ring.acquire(step.at, DOHalves::kBytes + 16);
        load_record<DOHalves>(s.d_o + stage, s.do_unit[stage], p.do_halves, of_q, s.do_ring.full[stage]);
    }
}

CF_DEVICE void add_dq(const F16x3BackwardParams& p, SharedStorage& s, const WorkTile& work) {
#pragma unroll 1
    for (Step step(p.call, work); step.exists(); step.advance()) {
        float* sums = Sums::tile(p.call.dq_accumulator, p.call.shape, work.sequence, step.tile, step.head);
#pragma unroll 1
        for (int i = 0; i < kConsumers; i++) {
            // sync: every warp of the warpgroup has stored its share.
            mbar_wait(s.dq_full[i], step.at.stage);
            bulk_reduce_add(sums, s.dq[i], sizeof s.dq[i]);
            tma_store_commit();
            // sync: dQ has been read, its place is free; in the end: no copy reads shared memory any more.
            tma_store_wait_read<0>();
            mbar_arrive(s.dq_empty[i]);
        }
    }
}

CF_DEVICE void dqkv(const F16x3BackwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const WorkTile work = Block::work_of(p.call, blockIdx.x, sizeof(float));
    if (work.first_key >= work.sequence.rows_k) return;
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        s.work = work;
        s.q_ring.init(kConsumers);
        s.do_ring.init(kConsumers);
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            mbar_init(s.statistics[i], 2);
            mbar_init(s.dq_full[i], 4);
            mbar_init(s.dq_empty[i], 1);
        }
        mbar_init(s.keys_full, 1);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup < kConsumers) {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, s, s.work, warpgroup);
    } else {
        setmaxnreg_dec<kHelperRegisters>();
        if (work.tiles.first == work.tiles.end) return;
        const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
        if (warp == 0 && elect_one()) load_tiles(p, s, s.work);
        if (warp == 1) Block::load_term(p, p.call.lse, true, s, s.work);
        if (warp == 2) Block::load_term(p, p.call.delta, false, s, s.work);
        if (warp == 3 && elect_one()) add_dq(p, s, s.work);
    }
}

CF_KERNEL(F16x3BackwardParams, CF_THREADS, 1, dqkv)
