// Attention forward of float32 on Hopper: flash_forward_sm90 with three products of halves for each product of floats.
// Design note: docs/kernels/float32.md.
//
// Source: A2 = FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 2. Products of split operands: Markidis et
// al., arXiv:1803.04014; Ootomo and Yokota, arXiv:2203.03341, whose scaling and second level of sums these are.
//   [A2.p]  the producer loads K_j and V_j, the last block of keys first
//   [A2.4]  S = Q1 K0^T + Q0 K1^T + Q0 K0^T of the last block; wait
//   [A2.6]  S becomes P: mask, row_max rises, P = e^(S - row_max), row_sum; P0, P1 are the halves of 2^15 P
//   [A2.11] T = P1 V0 + P0 V1 + P0 V0 starts, a sum over this block of keys alone
//   [A2.9]  S of the next block starts
//   [S2]    wait for T; O = e^(old_max - row_max) O + T, in float
//   [A2.12] wait for S
//   [A2.21] O = O / row_sum, LSE = row_max + log(row_sum); 0 and -inf in a row without keys
// why small products first: what a tensor core adds to a sum it cuts off at the last bit of the larger of the two.
// why [S2]: those errors have one sign, and over a whole row of keys they would add up to many.
//
// Scales: halves of a tile stand for 2^n times its floats, see hopper/halves.cuh; these powers of two join the softmax's
// multiply-add, which stays as exact, and the one that adds T.
//
// Grid:   as flash_forward_sm90, of whose tiles heads of a group may have one.
// Block:  2 warpgroups of 64 rows each, then one warpgroup of which one thread is the producer, and one of another warp
//         the scheduler, a tile ahead.
// Shared: of Q 2 tiles of 64 x kHeadDim floats, as halves; of K and V kStages tiles of kBlockN keys each; their units;
//         barriers.
//
// Assumes: flash_split_f16 has run; rows of o start on 8-byte boundaries; seqlens below 2^30; scale > 0.
// Not here: softcap, ALiBi, spans, mask, bias, dropout (flash_forward).
#include "hopper/halves.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/warp_scheduler_barrier.cuh"
#include "hopper/warpgroup.cuh"
#include "tile/online_softmax.cuh"
#include "tile/score_tile.cuh"

// ---- Config
#if !defined(CF_BLOCK_M)
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_BLOCK_M 128
#define CF_BLOCK_N 80
#define CF_THREADS 384
#define CF_STAGES 2
#define CF_SHARED_BYTES 230400
#endif
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = CF_STAGES;
constexpr int kConsumers = kBlockM / 64;
static_assert(kThreads == 128 * (kConsumers + 1) && kConsumers == 2);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;    // of a thread, by setmaxnreg
static_assert(fit_registers(kConsumers, kConsumerRegisters, kProducerRegisters));

using QHalves = Halves<64, kHeadDim>;
using KHalves = Halves<kBlockN, kHeadDim>;
using VHalves = Halves<kBlockN, kHeadDimV>;
using Ring = StageRing<kStages>;
using OneStage = StageRing<1>;
constexpr float kWeight = 32768.0f;    // of a row's maximum: 2^15

struct Kernel;
struct SharedStorage {
    QHalves q[kConsumers];
    KHalves k[kStages];
    VHalves v[kStages];
    float4 q_unit[kConsumers], k_unit[kStages], v_unit[kStages];    // 1 / s, four times
    OneStage q_ring;
    // Of the tile that consumers write, the one whose Q is here or coming, and the next one.
    WorkTile<Kernel> work[2][2];
    OneStage work_ring;
    Ring k_ring, v_ring;
    uint32_t
        saved[4 * kConsumers];    // tiles that a warp has done. why: no register holds it through the loop
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Types and constants that the headers of hopper/ need.
struct Kernel {
    struct KTile {
        using Element = float;
    };
    using Storage = SharedStorage;
    using QRing = StageRing<2>;    // of published tiles. why two stages: Q is free before O is written
    using WorkRing = OneStage;
    using Product = Math<float, 3, false>;
    using Softmax = OnlineSoftmax<Product, 1>;
    static constexpr Mask kMask = Mask::CF_MASK;
    static constexpr bool kSchedulerBarrier = true, kSchedulerThread = true;
    static constexpr int kBlockM = ::kBlockM, kBlockN = ::kBlockN, kConsumers = ::kConsumers;
};
static_assert(Kernel::kMask == Mask::band);

// Sends for what consumers will need, a thread alone.
struct HalvesProducer {
    static constexpr int32_t kAhead = 3;    // as of Producer
    const F16x3ForwardParams& p;
    SharedStorage& s;
    uint32_t tiles = 0, blocks = 0;    // sent

    template <class T>
    CF_DEVICE static void load(T& tile, float4& unit, const void* records, int64_t record, uint64_t& full) {
        const uint8_t* from = static_cast<const uint8_t*>(records) + record * T::kRecord;
        bulk_load(tile.part[0].data, from, T::kBytes, full);
        bulk_load(&unit, from + T::kBytes, 16, full);
    }
    CF_DEVICE int64_t record(const WorkTile<Kernel>& work, int32_t block) const {
        return record_of_k(p.call.shape, work.sequence, work.kv_head, work.first_key / kBlockN + block,
                           kBlockN);
    }
    CF_DEVICE void load_q(const WorkTile<Kernel>& work) {
        s.q_ring.acquire(OneStage::at(tiles), kConsumers * (QHalves::kBytes + 16));
        const int64_t first = record_of_q(p.call.shape, work.rows, work.sequence, work.group,
                                          work.first_row / kBlockM, kBlockM);
        CF_UNROLL
        for (int i = 0; i < kConsumers; i++)
            load(s.q[i], s.q_unit[i], p.q_halves, first + i, s.q_ring.full[0]);
        tiles++;
    }
    CF_DEVICE void load_k(const WorkTile<Kernel>& work, int32_t block) {
        const auto at = Ring::at(blocks);
        s.k_ring.acquire(at, KHalves::kBytes + 16);
        load(s.k[at.stage], s.k_unit[at.stage], p.k_halves, record(work, block), s.k_ring.full[at.stage]);
    }
    CF_DEVICE void load_v(const WorkTile<Kernel>& work, int32_t block) {
        const auto at = Ring::at(blocks);
        s.v_ring.acquire(at, VHalves::kBytes + 16);
        load(s.v[at.stage], s.v_unit[at.stage], p.v_halves, record(work, block), s.v_ring.full[at.stage]);
        blocks++;
    }
    // [A2.p]
    CF_DEVICE void run() {
#pragma unroll 1
        for (;;) {
            // sync: the scheduler has written what the next tile is.
            mbar_wait(s.work_ring.full[0], OneStage::at(tiles).phase);
            const WorkTile<Kernel>& work = TileScheduler<Kernel>::slot(s, tiles);
            if (work.blocks == kNoTile) break;
            if (work.blocks > 0) load_k(work, work.blocks - 1);
            load_q(work);
            if (work.blocks <= kAhead) mbar_arrive(s.work_ring.empty[0]);
#pragma unroll 1
            for (int32_t block = work.blocks - 1; block >= 0; block--) {
                if (block == kAhead) mbar_arrive(s.work_ring.empty[0]);
                load_v(work, block);
                if (block > 0) load_k(work, block - 1);
            }
        }
        s.q_ring.acquire(OneStage::at(tiles), 0);
    }
};

// The tile that a warp of consumers is at, and its number.
CF_DEVICE uint32_t tiles_done(SharedStorage& s) {
    return ld_shared<uint32_t>(smem_addr(&s.saved[threadIdx.x / 32]));
}
CF_DEVICE const WorkTile<Kernel>& work_here(SharedStorage& s) {
    return TileScheduler<Kernel>::slot(s, tiles_done(s));
}

// d = the three products of halves, small ones first.
template <int n, class A, class B> CF_DEVICE void multiply_halves(float (&d)[n], const A& a0, const A& a1,
                                                                  const B& b0, const B& b1) {
    multiply(d, a1, b0, false);
    multiply(d, a0, b1, true);
    multiply(d, a0, b0, true);
}

// The calling thread's. why: where it is computed again no register holds it through the loop.
CF_DEVICE int warpgroup_here() { return static_cast<int>(opaque(threadIdx.x) / 128); }

// The rows of one warpgroup.
struct WarpgroupRows {
    SharedStorage& s;
    uint32_t& done;    // blocks of keys. why a count: cursors of both rings would be four registers
    const Score& rule;
    const float unit_log2;                       // from a score to log2
    int32_t whole_first, whole_end;              // blocks of keys in which every pair counts
    float q_unit = 0, k_unit = 0, v_unit = 0;    // of what is being multiplied
    Kernel::Softmax softmax;
    // First halves of the first tile; each tile is two in a row.
    ByRows<QHalves::Part> q;
    ByRows<KHalves::Part> k;
    ByColumns<VHalves::Part> v;

    CF_DEVICE WarpgroupRows(SharedStorage& s, uint32_t& done, const Score& rule, const WorkTile<Kernel>& work,
                            int warpgroup, float unit_log2)
        : s(s), done(done), rule(rule), unit_log2(unit_log2), q(s.q[warpgroup].part[0]), k(s.k[0].part[0]),
          v(s.v[0].part[0]) {
        k.hold(), v.hold();
        const Band band(rule, work.sequence);
        const int32_t first = work.first_row + 64 * warpgroup;
        const int32_t last = smaller(work.rows.query(first + 63), work.sequence.seqlen_q - 1);
        whole_first = cdiv(band.first_key(last) - work.first_key, kBlockN);
        whole_end = (band.end_key(work.rows.query(first)) - work.first_key) / kBlockN;
        q_unit = warp_uniform(s.q_unit[warpgroup].x);
    }
    // S = Q K^T, of the number-th K, when it has come.
    CF_DEVICE void start_s(float (&rS)[kBlockN / 2], uint32_t number) {
        const auto here = Ring::at(number);
        s.k_ring.wait(here);
        k_unit = unit_of_product(q_unit, s.k_unit[here.stage].x);
        // why a copy: or ptxas keeps the descriptors of all steps of Q, for which there are no registers.
        const ByRows<QHalves::Part> here_q = q.opaque_copy();
        wgmma_fence_operand(rS);
        wgmma_fence();
        multiply_halves(rS, here_q, here_q.of_tile(1), k.of_tile(2 * here.stage),
                        k.of_tile(2 * here.stage + 1));
        wgmma_commit();
    }
    CF_DEVICE void end_s(float (&rS)[kBlockN / 2], uint32_t number) {
        wgmma_fence_operand(rS);
        s.k_ring.release(Ring::at(number));
    }
    // T = P V
    CF_DEVICE void start_t(float (&rT)[kHeadDimV / 2], const uint32_t (&rP)[2][kBlockN / 16][4]) {
        const auto here = Ring::at(done);
        s.v_ring.wait(here);
        v_unit = s.v_unit[here.stage].x * (1.0f / kWeight);
        wgmma_fence_operand(rT);
        wgmma_fence();
        multiply_halves(rT, rP[0], rP[1], v.of_tile(2 * here.stage), v.of_tile(2 * here.stage + 1));
        wgmma_commit();
    }
    // [S2]
    CF_DEVICE void end_t(float (&rO)[kHeadDimV / 2], float (&rT)[kHeadDimV / 2], float2 rescale) {
        wgmma_fence_operand(rT);
        s.v_ring.release(Ring::at(done));
        done++;
        Kernel::Softmax::rescale_o(as_tile(rO), 0, rescale);
        CF_UNROLL
        for (int i = 0; i < kHeadDimV / 2; i++) rO[i] = fmaf(rT[i], v_unit, rO[i]);
    }
    // -inf outside the band. why all of it is computed here: no register holds it while blocks are full.
    CF_DEVICE void mask(float (&rS)[kBlockN / 2], int32_t block) const {
        const WorkTile<Kernel>& work = work_here(s);
        const NarrowBand band(Band(rule, work.sequence));
        const int thread = static_cast<int>(threadIdx.x);
        const int32_t key = work.first_key + block * kBlockN + thread % 4 * 2;
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t row = work.first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
            const int32_t query = work.rows.query(row);
            mask_row(as_tile(rS), 0, half, band.first_key(query) - key, band.end_key(query) - key);
        }
    }
    // [A2.6] Returns the factors that the thread's two rows of O are waiting for.
    CF_DEVICE float2 mask_and_softmax(uint32_t (&rP)[2][kBlockN / 16][4], float (&rS)[kBlockN / 2],
                                      int32_t block) {
        auto& x = as_tile(rS);
        if (block < whole_first || block >= whole_end) mask(rS, block);
        float rescale[2];
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            float highest = -kInfinity;
            CF_UNROLL
            for (int n = 0; n < kBlockN / 8; n++)
                highest = fmaxf(highest, fmaxf(x[0][n][2 * half], x[0][n][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            const auto to =
                softmax.update_max(0, half, fmaxf(softmax.row_max[0][half], highest * k_unit), unit_log2);
            float sum = 0;
            CF_UNROLL
            for (int n = 0; n < kBlockN / 8; n++) {
                CF_UNROLL
                for (int i = 0; i < 2; i++) {
                    float& y = x[0][n][2 * half + i];
                    // why not one multiply-add: see OnlineSoftmax::weight. k_unit is a power of two, and rounds nothing.
                    y = ex2(fmaf(y, k_unit, -to.reference) * unit_log2);
                    sum += y;
                }
            }
            softmax.row_sum[0][half] = fmaf(softmax.row_sum[0][half], to.rescale, sum);
            rescale[half] = to.rescale;
        }
        CF_UNROLL
        for (int k = 0; k < kBlockN / 16; k++) {
            CF_UNROLL
            for (int i = 0; i < 4; i++)
                split_pair(rS[8 * k + 2 * i] * kWeight, rS[8 * k + 2 * i + 1] * kWeight, rP[0][k][i],
                           rP[1][k][i]);
        }
        return {rescale[0], rescale[1]};
    }
};

// [A2.21] for the rows of a warpgroup.
CF_DEVICE void finish(const ForwardParams& call, const WorkTile<Kernel>& tile, int warpgroup,
                      const Kernel::Softmax& softmax, float unit, float (&rO)[kHeadDimV / 2]) {
    const WorkTile<Kernel> work = tile;    // why: there are registers again, and it is read once
    const Score& rule = call.score;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    auto& o = as_tile(rO);
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t row = work.first_row + 64 * warpgroup + 16 * warp + 8 * half + lane / 4,
                      head = work.head(row);
        const int64_t query = work.sequence.first_q + work.rows.query(row);
        const float sink =
            rule.sinks ? static_cast<const float*>(rule.sinks)[head * rule.sinks_head] : -kInfinity;
        const FinalRow<float> end = softmax.finalize(0, half, unit, sink);
        if (!work.exists(row)) continue;
        if (call.lse.data && lane % 4 == 0)
            st_global(head_rows<float>(call.lse, work.batch, head, query), end.lse);
        float* to = head_rows<float>(call.o, work.batch, head, query);
        const int32_t columns = call.shape.head_dim_v;
        CF_UNROLL
        for (int n = 0; n < kHeadDimV / 8; n++) {
            const int column = 8 * n + lane % 4 * 2;
            const float2 pair{o[0][n][2 * half] * end.normaliser, o[0][n][2 * half + 1] * end.normaliser};
            if (column + 1 < columns) st_global(reinterpret_cast<float2*>(to + column), pair);
            else if (column < columns) st_global(to + column, pair.x);
        }
    }
}

CF_DEVICE void attend(const F16x3ForwardParams& p, SharedStorage& s, const WorkTile<Kernel>& work,
                      int warpgroup, uint32_t& done) {
    const double scale = p.call.score.scale;
    float rO[kHeadDimV / 2] = {};
    WarpgroupRows rows(s, done, p.call.score, work, warpgroup,
                       warp_uniform(static_cast<float>(scale * 1.4426950408889634)));
    const auto release_q = [&] {
        // sync: every lane has looked at the barrier and the unit of Q.
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbar_arrive(s.q_ring.empty[0]);
    };
    if (work.blocks > 0) {
        float rS[kBlockN / 2], rT[kHeadDimV / 2];
        uint32_t rP[2][kBlockN / 16][4];
        // [A2.4]
        rows.start_s(rS, done);
        // sync: S is in registers, K in use no more.
        wgmma_wait<0>();
        rows.end_s(rS, done);
#pragma unroll 1
        for (int32_t block = work.blocks - 1; block > 0; block--) {
            const float2 rescale = rows.mask_and_softmax(rP, rS, block);
            warp_scheduler_barrier_sync<Kernel>(warpgroup_here());
            // [A2.11]
            rows.start_t(rT, rP);
            // [A2.9]
            rows.start_s(rS, done + 1);
            warp_scheduler_barrier_arrive<Kernel>(warpgroup_here());
            // sync: T is in registers, V and P in use no more.
            wgmma_wait<1>();
            rows.end_t(rO, rT, rescale);
            // [A2.12]
            // sync: the same of S and K.
            wgmma_wait<0>();
            rows.end_s(rS, done);
        }
        release_q();
        const float2 rescale = rows.mask_and_softmax(rP, rS, 0);
        warp_scheduler_barrier_sync<Kernel>(warpgroup_here());
        rows.start_t(rT, rP);
        warp_scheduler_barrier_arrive<Kernel>(warpgroup_here());
        wgmma_wait<0>();
        rows.end_t(rO, rT, rescale);
    } else {
        release_q();
    }
    finish(p.call, work_here(s), warpgroup_here(), rows.softmax, static_cast<float>(scale), rO);
}

CF_DEVICE void consume(const F16x3ForwardParams& p, SharedStorage& s, int warpgroup) {
    if (warpgroup == kConsumers - 1) warp_scheduler_barrier_arrive<Kernel>(warpgroup);
    uint32_t done = 0;
#pragma unroll 1
    for (uint32_t tile = 0;; tile = tiles_done(s) + 1) {
        // sync: every lane has read what was saved, before it is written again, and reads what will be.
        __syncwarp();
        if (threadIdx.x % 32 == 0) st_shared(smem_addr(&s.saved[threadIdx.x / 32]), tile);
        __syncwarp();
        // sync: Q has come, and with it what its tile is.
        s.q_ring.wait(OneStage::at(tile));
        const WorkTile<Kernel>& work = TileScheduler<Kernel>::slot(s, tile);
        if (work.blocks == kNoTile) break;
        attend(p, s, work, warpgroup_index(), done);
    }
    if (warpgroup_here() == 0)
        warp_scheduler_barrier_sync<Kernel>(0);    // why: the last arrival has no other taker
}

CF_DEVICE void flash_forward(const F16x3ForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        s.q_ring.init(4 * kConsumers);
        s.work_ring.init(1);
        s.k_ring.init(kConsumers);
        s.v_ring.init(kConsumers);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32 - 4 * kConsumers;
        if (warp == 0 && elect_one()) HalvesProducer{p, s}.run();
        else if (warp == 1 && elect_one()) TileScheduler<Kernel>(p.call, s).run();
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, s, warpgroup);
    }
}

CF_KERNEL(F16x3ForwardParams, kThreads, 1, flash_forward)
