// Attention forward of 8-bit floats (e4m3) on Hopper: flash_forward_sm90 with products at twice the rate. O has 16 bits.
// Design note: docs/kernels/float8.md.
//
// Sources: A2 = FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 2 and section 3.3: V transposed in
// the kernel, weights brought to where e4m3 is finest; without its overlap within a warpgroup. Second level of
// sums: SageAttention2 (Zhang et al., arXiv:2411.10958).
//   [A2.p]  the producer loads K_j and V_j, the last block of keys first
//   [T]     transposers make V_j^T, in the order of keys that weights in registers have
//   [A2.4]  S = Q K_j^T; wait
//   [A2.6]  S becomes P: score, mask, row_max rises, P = 2^8 e^(S - row_max), row_sum; P rounded to e4m3
//   [A2.14] T = P V_j, a sum over this block of keys alone; wait
//   [S2]    O = e^(old_max - row_max) O + T, in float
//   [A2.21] O = O / row_sum, LSE = row_max + log(row_sum); 0 and -inf in a row without keys
// why [S2]: the tensor cores sum products of 8 bits with 14 bits or so, too few for a whole row of keys. It
// costs nothing: one multiply-add per element of O, where the rescaling alone is a multiplication.
//
// Scales: a value is the stored number times q_scale, k_scale or v_scale of its batch and key head; the first two
// join the scale of scores, the third the normaliser of O.
//
// Grid:   as flash_forward_sm90, of whose tiles heads of a group may have one.
// Block:  kConsumers warpgroups of 64 queries each, then one of which a thread is the producer and three warps
//         are transposers.
// Shared: kQStages of Q, kConsumers tiles of 64 x kHeadDim each, and in its place O, kPartV columns at a time;
//         kStages tiles of K, kBlockN x kHeadDim, of V, kBlockN x kHeadDimV, and of V^T, kHeadDimV x kBlockN;
//         barriers.
//
// Assumes: as flash_forward_sm90; scales of q and k above 0 unless kMask is any.
#include "hopper/epilogue.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/producer.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/warp_scheduler_barrier.cuh"
#include "hopper/transposed_values.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT E4M3
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 192
#define CF_THREADS 384
#define CF_STAGES 2
#define CF_Q_STAGES 2
#define CF_PART_V 128
#define CF_TURNS 1
#define CF_SHARED_BYTES 214016
#endif
using Element = CF_ELEMENT;
constexpr Mask kMask = Mask::CF_MASK;
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = CF_STAGES;
constexpr int kPartV = CF_PART_V;    // columns of O that are summed, and leave, at a time
constexpr int kConsumers = kBlockM / 64;
static_assert(kThreads == 128 * (kConsumers + 1) && kConsumers >= 2 && kConsumers <= 3);
// Registers of a thread, by setmaxnreg; transposers have those of the producer.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32,
              kConsumerRegisters = kConsumers == 2 ? 232 : 160;
static_assert(fit_registers(kConsumers, kConsumerRegisters, kProducerRegisters));
static_assert(kHeadDimV % kPartV == 0 && sizeof(Element) == 1);

using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, 64, kHeadDim>;
using KTile = SwizzledTile<Element, kBlockN, kHeadDim>;
using VTile = SwizzledTile<Element, kBlockN, kHeadDimV>;
using TransposedTile = SwizzledTile<Element, kHeadDimV, kBlockN>;
using OTile = SwizzledTile<__nv_bfloat16, 16, kPartV>;    // of a warp, of either 16-bit type
using Ring = StageRing<kStages>;
constexpr int kQStages = CF_Q_STAGES;    // 2: Q of the next tile comes while this one is worked on
using QRing = StageRing<kQStages>;

struct Kernel;
struct SharedStorage {
    union {
        QTile q;
        OTile o[4];
    } queries[kQStages][kConsumers];
    KTile k[kStages];
    VTile v[kStages];
    TransposedTile transposed[kStages];
    QRing q_ring;
    WorkTile<Kernel> work[2][kQStages];    // by phase and stage of Q, whose Q is here or coming, or next
    Ring k_ring, v_ring, transposed_ring;

    CF_DEVICE QTile& q_tile(int stage, int warpgroup) { return queries[stage][warpgroup].q; }
    CF_DEVICE OTile& o(int stage, int warpgroup, int warp) { return queries[stage][warpgroup].o[warp]; }
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

constexpr int kTransposers = 3;    // warps
// Matrices of V, 32 keys by 16 features, that a transposer has under way. why all keys where V^T is what products wait
// for: one alone waits for its load, its bytes and its store, one after the other. An H200 (2026-11-27) had 803 TFLOP/s
// with one, 869 with 2 and 932 with 3 of any keys, which take 37 instructions each; 4 of the same features take 15. why
// not elsewhere: 2 were 3 % slower at head dim 128.
constexpr int kAtOnce = kHeadDimV > 128 ? kBlockN / 32 : 1;

// Types and constants that the headers of hopper/ need.
struct Kernel {
    using Params = HopperFp8ForwardParams;
    using Storage = SharedStorage;
    using QTile = ::QTile;
    using KTile = ::KTile;
    using VTile = ::VTile;
    using OTile = ::OTile;
    using QRing = ::QRing;
    using KRing = Ring;
    using VRing = Ring;
    using Product = ::Product;
    using Softmax = OnlineSoftmax<Product, 1, 8>;    // why 8: the largest e4m3 is 448
    static constexpr Mask kMask = ::kMask;
    static constexpr bool kSchedulerBarrier = CF_TURNS;    // warpgroups take turns in starting products
    static constexpr bool kSchedulerThread = false;        // why: its warp transposes
    static constexpr int kHeadDimV = ::kHeadDimV;
    static constexpr int kBlockM = ::kBlockM, kBlockN = ::kBlockN, kConsumers = ::kConsumers;
};

// What stored numbers of a tile are multiplied by.
CF_DEVICE float scale_of(const Scales& scales, const WorkTile<Kernel>& work) {
    return scales.data ? scales.data[work.batch * scales.batch + work.kv_head * scales.head] : 1.0f;
}

// [T] by warp number `warp` of the transposers.
CF_DEVICE void transpose(const Kernel::Params& p, SharedStorage& s, int warp) {
    const Shape& shape = p.call.shape;
    const int lane = threadIdx.x % 32;
    Ring::Cursor at;    // of V and of V^T
#pragma unroll 1
    for (QRing::Cursor q;; q.advance()) {
        // sync: the description of a tile has arrived, with its Q.
        s.q_ring.wait(q);
        const WorkTile<Kernel>& work = s.work[q.phase][q.stage];
        int32_t left = work.blocks;
        if (left == kNoTile) break;
        // why: where the rows of V end before the tile other rows follow in memory, and 0 times NaN is NaN.
        const bool ragged = shape.packed || shape.seqused_k;
        int32_t rows = ragged ? work.sequence.seqlen_k - work.first_key - (left - 1) * kBlockN : kBlockN;
        // sync: every lane has read all of it.
        __syncwarp();
        if (lane == 0) mbar_arrive(s.q_ring.empty[q.stage]);
#pragma unroll 1
        for (; left > 0; left--) {
            s.v_ring.wait(at);
            // sync: every consumer has released what the pass before put here.
            mbar_wait(s.transposed_ring.empty[at.stage], at.phase ^ 1);
            if (rows < kBlockN) {
                clear_rows(s.v[at.stage], rows, 32 * warp + lane, 32 * kTransposers);
                // sync: all rows are cleared before any warp reads them.
                bar_sync(kVCleared, 32 * kTransposers);
                rows = kBlockN;
            }
            transpose_values<kAtOnce>(s.transposed[at.stage], s.v[at.stage], warp, kTransposers);
            // sync: V^T of every lane is visible to products, and what was cleared is before the next copy.
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                mbar_arrive(s.transposed_ring.full[at.stage]);
                mbar_arrive(s.v_ring.empty[at.stage]);
            }
            at.advance();
        }
    }
}

// The position of a consumer in the rings, kept from tile to tile.
struct Cursors {
    QRing::Cursor q;
    Ring::Cursor k, v;
};

template <int kColumn_> struct Column {
    static constexpr int kColumn = kColumn_;
};
// [S2] for the columns from kFirst on.
template <int kFirst, int n>
CF_DEVICE void add_part(float (&rO)[kHeadDimV / 2], const float (&rT)[n], float2 rescale) {
    CF_UNROLL
    for (int i = 0; i < n; i++) {
        float& o = rO[kFirst / 2 + i];
        o = fmaf(o, i / 2 % 2 ? rescale.y : rescale.x, rT[i]);
    }
}

// The queries of one warpgroup.
CF_DEVICE void attend(const Kernel::Params& p, SharedStorage& s, const WorkTile<Kernel>& work, int warpgroup,
                      Cursors& at) {
    constexpr bool kAny = kMask == Mask::any;
    const float stored = scale_of(p.q_scale, work) * scale_of(p.k_scale, work);
    const float unit = kAny ? 1.0f : static_cast<float>(p.call.score.scale) * stored;
    MaskedSoftmax<Kernel> softmax(p.call.score, work, work.first_row + 64 * warpgroup, unit * kLog2e);
    if constexpr (kAny) softmax.score.head.scale *= stored;
    const ByRows<QTile> q(s.q_tile(at.q.stage, warpgroup));
    const ByRows<KTile> k(s.k[0]);
    float rO[kHeadDimV / 2] = {};

    if (work.blocks > 0) warp_scheduler_barrier_sync<Kernel>(warpgroup);
#pragma unroll 1
    for (int32_t block = work.blocks - 1; block >= 0; block--) {
        uint32_t rP[kBlockN / 32][4];
        // [A2.4]
        float rS[kBlockN / 2];
        s.k_ring.wait(at.k);
        wgmma_fence_operand(rS);
        wgmma_fence();
        multiply(rS, q, k.of_tile(at.k.stage), false);
        wgmma_commit();
        warp_scheduler_barrier_arrive<Kernel>(warpgroup);
        // sync: S is in registers, K_j in use no more.
        wgmma_wait<0>();
        wgmma_fence_operand(rS);
        s.k_ring.release(at.k);
        at.k.advance();
        // [A2.6]
        const float2 rescale = softmax.mask_and_softmax(rS, block).factor;
        to_e4m3_fragments(rP, rS);
        // [A2.14]
        s.transposed_ring.wait(at.v);
        warp_scheduler_barrier_sync<Kernel>(warpgroup);
        const auto part = [&](auto first) {
            float rT[kPartV / 2];
            wgmma_fence_operand(rT);
            wgmma_fence();
            multiply(rT, rP, ByRows<TransposedTile>(s.transposed[0], first.kColumn).of_tile(at.v.stage),
                     false);
            wgmma_commit();
            // sync: T is in registers.
            wgmma_wait<0>();
            wgmma_fence_operand(rT);
            add_part<first.kColumn>(rO, rT, rescale);
        };
        part(Column<0>());
        if constexpr (kPartV < kHeadDimV) part(Column<kPartV>());
        s.transposed_ring.release(at.v);
        at.v.advance();
    }
    if (work.blocks > 0) warp_scheduler_barrier_arrive<Kernel>(warpgroup);

    const float value = scale_of(p.v_scale, work);
    const int stage = at.q.stage;
    if (p.o_type == kBiasF16)
        epilogue<Kernel, __half>(p, s, work, warpgroup, stage, softmax.online, unit, value, rO);
    else epilogue<Kernel, __nv_bfloat16>(p, s, work, warpgroup, stage, softmax.online, unit, value, rO);
}

CF_DEVICE void consume(const Kernel::Params& p, SharedStorage& s, int warpgroup) {
    Cursors at;
    if (warpgroup == kConsumers - 1) warp_scheduler_barrier_arrive<Kernel>(warpgroup);
#pragma unroll 1
    for (;; at.q.advance()) {
        // sync: Q has come, and with it what its tile is.
        s.q_ring.wait(at.q);
        const WorkTile<Kernel>& work = s.work[at.q.phase][at.q.stage];
        if (work.blocks == kNoTile) break;
        attend(p, s, work, warpgroup, at);
    }
    if (warpgroup == 0)
        warp_scheduler_barrier_sync<Kernel>(warpgroup);    // why: the last arrival has no other taker
}

CF_DEVICE void flash_forward(const Kernel::Params& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        Producer<Kernel>::prefetch(p);
        s.q_ring.init(4 * kConsumers + kTransposers);
        s.k_ring.init(kConsumers);
        s.v_ring.init(kTransposers);
        s.transposed_ring.init(kConsumers, kTransposers);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32 - 4 * kConsumers;
        if (warp > 0) transpose(p, s, warp - 1);
        else if (elect_one()) Producer<Kernel>(p, s).run();
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, s, warpgroup);
    }
}

CF_KERNEL(Kernel::Params, kThreads, 1, flash_forward)
