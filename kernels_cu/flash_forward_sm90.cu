// Attention forward on Hopper, of 16-bit inputs: FlashAttention-3, with TMA, wgmma and warp specialisation.
// Design note: docs/kernels/forward_sm90.md.
//
// Source: A2 = FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 2, consumer side with its overlap
// of products and softmax. Erratum: its line 21 prints an inverse on the last rescaling that must not be
// there.
//   [A2.p]  the producer loads K_j and V_j, the last block of keys first
//   [skip]  free the last blocks, of which other rows of the tile see keys and none of this warpgroup does
//   [A2.4]  S = Q K^T of the last block that is left; wait
//   [A2.6]  online softmax, S becomes P: score, mask, row_max rises, P = e^(S - row_max), row_sum
//   [A2.9]  S = Q K_j^T starts
//   [A2.11] O += P V of the block before starts
//   [A2.12] wait for S only
//   [A2.13] P of block j, while the tensor cores still add to O
//   [A2.14] wait for O; rescale O = e^(old_max - row_max) O; release the stages of K_j and of the V before
//   [A2.19] O += P V of the first block
//   [A2.21] epilogue: O = O / row_sum, LSE = row_max + log(row_sum); 0 and -inf in a row without keys
//
// Grid:   x, persistent: any number of blocks for ceil(rows / kBlockM) * groups * batch tiles, in the order of
//         lpt_query_tile. A block takes the tile of its number, then the next of the counter p.call.next_tile, or without
//         it every gridDim.x-th. A group is a head of q and its rows are queries; or (p.call.head_bits) all heads of q
//         that share one of k, and rows are (query, head): PackGqa. Packed: tiles are numbered sequence by sequence.
// Block:  kConsumers warpgroups of 64 rows each; then a warpgroup of which one thread is the producer, and one of another
//         warp the tile scheduler, a tile ahead.
// Shared: kQStages of Q, kConsumers tiles of 64 x kHeadDim each, through which O leaves; kStages tiles of K, kBlockN x
//         kHeadDim, and of V, kBlockN x kHeadDimV; their barriers.
// Read:   attend below, then hopper/producer.cuh, hopper/online_softmax.cuh, hopper/epilogue.cuh, hopper/tile_scheduler.cuh.
//
// Assumes: what tensor maps require: base and strides of q, k, v multiples of 16 bytes, last axes contiguous;
//         rows of o start on 16-byte boundaries; seqlens below 2^30; scale > 0 unless kMask is any.
//         Kind spans: flash_reach has run, and a tile is of one head.
// Not here: mask, bias, dropout (flash_forward); splitting keys over blocks (flash_decode).
#include "hopper/epilogue.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/producer.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/warp_scheduler_barrier.cuh"
#include "hopper/warpgroup.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 128
#define CF_THREADS 384
#define CF_STAGES 2
#define CF_Q_STAGES 1
#define CF_TURNS 1
#define CF_SHARED_BYTES 164864
#endif
using Element = CF_ELEMENT;
constexpr Mask kMask = Mask::CF_MASK;
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = CF_STAGES;
constexpr int kQStages = CF_Q_STAGES;    // 2: Q of the next tile comes while this one is worked on
constexpr int kConsumers = kBlockM / 64;
static_assert(kThreads == 128 * (kConsumers + 1) && kConsumers >= 2 && kConsumers <= 3);
// Registers of a thread, by setmaxnreg.
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32,
              kConsumerRegisters = kConsumers == 2 ? 240 : 160;
static_assert(fit_registers(kConsumers, kConsumerRegisters, kProducerRegisters));
static_assert(kHeadDimV <= kHeadDim, "O leaves through the tile of Q");

using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, 64, kHeadDim>;
using KTile = SwizzledTile<Element, kBlockN, kHeadDim>;
using VTile = SwizzledTile<Element, kBlockN, kHeadDimV>;
using OTile = SwizzledTile<Element, 16, kHeadDimV>;    // of a warp
using Ring = StageRing<kStages>;
using QRing = StageRing<kQStages>;
using WorkRing = StageRing<1>;

struct Kernel;
struct SharedStorage {
    QTile q[kQStages][kConsumers];
    KTile k[kStages];
    VTile v[kStages];
    QRing q_ring;
    WorkTile<Kernel> work[2][kQStages];    // by phase and stage of Q, whose Q is here or coming, or next
    WorkRing work_ring;
    Ring k_ring, v_ring;
    SparseBlock sparse_blocks[2][kStages];    // of kind spans: by phase and stage of K

    CF_DEVICE QTile& q_tile(int stage, int warpgroup) { return q[stage][warpgroup]; }
    CF_DEVICE OTile& o(int stage, int warpgroup, int warp) {
        return reinterpret_cast<OTile*>(q[stage][warpgroup].data)[warp];
    }
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Types and constants that the headers of hopper/ need.
struct Kernel {
    using Params = HopperForwardParams;
    using Storage = SharedStorage;
    using QTile = ::QTile;
    using KTile = ::KTile;
    using VTile = ::VTile;
    using OTile = ::OTile;
    using QRing = ::QRing;
    using KRing = Ring;
    using VRing = Ring;
    using WorkRing = ::WorkRing;
    using Product = ::Product;
    // why 8: weights up to 256 are as exact in 16 bits.
    using Softmax = OnlineSoftmax<Product, 1, 0, 8>;
    static constexpr Mask kMask = ::kMask;
    static constexpr bool kSchedulerBarrier = CF_TURNS;    // warpgroups take turns in starting products
    static constexpr bool kSchedulerThread = true;
    static constexpr int kHeadDimV = ::kHeadDimV;
    static constexpr int kBlockM = ::kBlockM, kBlockN = ::kBlockN, kConsumers = ::kConsumers;
};

// A consumer's place in the rings, from tile to tile.
struct Cursors {
    QRing::Cursor q;
    Ring::Cursor k, v;
};

// The products of one warpgroup. Between start and end neither accumulators nor rP are touched.
struct Products {
    SharedStorage& s;
    Cursors& at;
    const ByRows<QTile> q;
    ByRows<KTile> k;
    ByColumns<VTile> v;

    CF_DEVICE Products(SharedStorage& s, Cursors& at, int warpgroup)
        : s(s), at(at), q(s.q_tile(at.q.stage, warpgroup)), k(s.k[0]), v(s.v[0]) {
        k.hold(), v.hold();
    }
    // S = Q K^T, of a K that has come.
    CF_DEVICE void start_s(float (&rS)[kBlockN / 2]) {
        wgmma_fence_operand(rS);
        wgmma_fence();
        // why: or ptxas makes the descriptors of all steps before the wait for K, for which wide heads have no registers.
        if constexpr (kHeadDim > 128) multiply(rS, q.opaque_copy(), k.of_tile(at.k.stage), false);
        else multiply(rS, q, k.of_tile(at.k.stage), false);
        wgmma_commit();
    }
    // Returns what the producer says of the block, of kind spans.
    CF_DEVICE SparseBlock end_s(float (&rS)[kBlockN / 2]) {
        wgmma_fence_operand(rS);
        SparseBlock block;
        if constexpr (kMask == Mask::spans) block = s.sparse_blocks[at.k.phase][at.k.stage];
        s.k_ring.release(at.k);
        at.k.advance();
        return block;
    }
    // O += P V
    CF_DEVICE void start_o(float (&rO)[kHeadDimV / 2], const uint32_t (&rP)[kBlockN / 16][4]) {
        s.v_ring.wait(at.v);
        wgmma_fence_operand(rO);
        wgmma_fence();
        multiply(rO, rP, v.of_tile(at.v.stage), true);
        wgmma_commit();
    }
    CF_DEVICE void end_o(float (&rO)[kHeadDimV / 2]) {
        wgmma_fence_operand(rO);
        s.v_ring.release(at.v);
        at.v.advance();
    }
    // [skip] of K of a block, which takes its turn at the warp scheduler barrier as any other.
    CF_DEVICE void skip_k(int warpgroup) {
        s.k_ring.wait(at.k);
        // sync: every warp of the warpgroup knows that K came, before a thread gives it back.
        if constexpr (Kernel::kSchedulerBarrier) warp_scheduler_barrier_sync<Kernel>(warpgroup);
        else bar_sync(kSkipped + warpgroup, 128);
        s.k_ring.release(at.k);
        at.k.advance();
        warp_scheduler_barrier_arrive<Kernel>(warpgroup);
    }
    // [skip] of V, after the next block's skip_k. why not at once: V is loaded after that K, and the other warpgroups would
    // wait for their turn.
    CF_DEVICE void skip_v(int warpgroup) {
        s.v_ring.wait(at.v);
        // sync: the same of V.
        bar_sync(kSkipped + warpgroup, 128);
        s.v_ring.release(at.v);
        at.v.advance();
    }
};

// Zeros in the rows of V past the last key, where in memory other rows follow. why: 0 times NaN is NaN.
CF_DEVICE void clear_v_tail(const HopperForwardParams& p, SharedStorage& s, const WorkTile<Kernel>& work,
                            const Cursors& at, int32_t block) {
    const int32_t rows = work.sequence.seqlen_k - work.first_key - block * kBlockN;
    if (rows >= kBlockN || !(p.call.shape.packed || p.call.shape.seqused_k)) return;
    s.v_ring.wait(at.v);
    clear_rows(s.v[at.v.stage], rows, threadIdx.x, 128 * kConsumers);
    fence_proxy_async();
    // sync: all consumers have cleared their share before products of any read it.
    bar_sync(kVCleared, 128 * kConsumers);
}

// The rows of one warpgroup.
CF_DEVICE void attend(const HopperForwardParams& p, SharedStorage& s, const WorkTile<Kernel>& work,
                      int warpgroup, Cursors& at) {
    const double scale = p.call.score.scale;
    const int32_t first_row = work.first_row + 64 * warpgroup;
    MaskedSoftmax<Kernel> softmax(
        p.call.score, work, first_row,
        kMask == Mask::any ? kLog2e : warp_uniform(static_cast<float>(scale * 1.4426950408889634)));
    float rO[kHeadDimV / 2] = {};
    if (work.blocks > 0) {
        Products products(s, at, warpgroup);
        uint32_t rP[kBlockN / 16][4];
        float rS[kBlockN / 2];
        // [skip]
        const int32_t seen = softmax.visible_blocks(work, first_row);
#pragma unroll 1
        for (int32_t block = work.blocks - 1; block >= seen; block--) {
            clear_v_tail(p, s, work, at, block);
            products.skip_k(warpgroup);
            if (block < work.blocks - 1) products.skip_v(warpgroup);
        }
        // [A2.4]
        s.k_ring.wait(at.k);
        pin_schedule(
            __float_as_uint(softmax.rescale_threshold));    // why: or ptxas computes it between the products
        products.start_s(rS);
        // sync: S is in registers, K in use no more.
        wgmma_wait<0>();
        const SparseBlock last = products.end_s(rS);
        const int32_t last_block = kMask == Mask::spans ? last.number() : seen - 1;
        clear_v_tail(p, s, work, at, last_block);
        // [A2.6]
        if (last.partial()) softmax.mask_partial(rS, p.call.score, work, last);
        softmax.mask_and_softmax(rS, last_block);
        to_fragments<Element>(rP, rS);
        if (seen < work.blocks) products.skip_v(warpgroup);
#pragma unroll 1
        for (int32_t block = seen - 2; block >= 0; block--) {
            // [A2.9]
            float rS[kBlockN / 2];
            s.k_ring.wait(at.k);
            warp_scheduler_barrier_sync<Kernel>(warpgroup);
            products.start_s(rS);
            // [A2.11]
            products.start_o(rO, rP);
            warp_scheduler_barrier_arrive<Kernel>(warpgroup);
            // [A2.12]
            // sync: S is in registers, K_j in use no more.
            wgmma_wait<1>();
            const SparseBlock found = products.end_s(rS);
            // [A2.13]
            if (found.partial()) softmax.mask_partial(rS, p.call.score, work, found);
            const Rescale rescale =
                softmax.mask_and_softmax(rS, kMask == Mask::spans ? found.number() : block);
            // [A2.14]
            // sync: O is in registers, P and V in use no more.
            wgmma_wait<0>();
            products.end_o(rO);
            to_fragments<Element>(rP, rS);
            softmax.online.rescale_o(as_tile(rO), 0, rescale);
        }
        // [A2.19]
        products.start_o(rO, rP);
        wgmma_wait<0>();
        products.end_o(rO);
    }

    epilogue<Kernel, Element>(p, s, work, warpgroup, at.q.stage, softmax.online,
                              kMask == Mask::any ? 1.0f : static_cast<float>(scale), 1.0f, rO);
}

CF_DEVICE void consume(const HopperForwardParams& p, SharedStorage& s, int warpgroup) {
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

CF_DEVICE void flash_forward(const HopperForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        Producer<Kernel>::prefetch(p);
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
        if (warp == 0 && elect_one()) Producer<Kernel>(p, s).run();
        else if (warp == 1 && elect_one()) TileScheduler<Kernel>(p.call, s).run();
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, s, warpgroup);
    }
}

CF_KERNEL(HopperForwardParams, kThreads, 1, flash_forward)
