// Attention forward on Hopper for head dims above 256: TMA, wgmma, two warpgroups that share the columns of O.
// Design note: docs/kernels/wide.md.
//
// Source: A2, Algorithm 2, as flash_forward_sm90 has it; tags and signs are explained there.
//   [A2.p]  the producer loads K_j and V_j in chunks, the last block of keys first
//   [A2.4]  S = Q K^T of the last block; wait
//   [A2.6]  S becomes P: mask, row_max rises, P = e^(S - row_max), row_sum
//   [A2.9]  S = Q K_j^T starts
//   [A2.11] O += P V of the block before starts
//   [A2.12] wait for S only
//   [A2.13] P of block j, while the tensor cores still add to O, of both warpgroups
//   [A2.14] wait for O; O = e^(old_max - row_max) O
//   [A2.19] O += P V of the first block
//   [A2.21] O = O / row_sum, LSE = row_max + log(row_sum); 0 and -inf in a row without keys
//
// Grid:   as flash_forward_sm90.
// Block:  a warpgroup that does all of the above for the first half of the columns of O; one that does [A2.11] and
//         [A2.14] alone for the other half, with P and rescale factors from shared memory; one of which a thread is the
//         producer, and one of another warp the tile scheduler, a tile ahead.
// Shared: Q (O is staged in it), 64 x kHeadDim; kSlots chunks of 64 keys x 64 columns, in one ring: K of the last
//         block, then K of the next and V of this one, and so on; P; factors; barriers.
//
// Assumes: as flash_forward_sm90 of kind band.
// Not here: mask, bias, ALiBi, softcap, dropout, spans, one order of additions (simple_forward).
#include "hopper/named_barriers.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/producer.cuh"
#include "hopper/store_floats.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/warpgroup.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 512
#define CF_HEAD_DIM_V 512
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_THREADS 384
#define CF_SLOTS 19
#define CF_SHARED_BYTES 230400
#endif
using Element = CF_ELEMENT;
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kSlots = CF_SLOTS;
constexpr int kKChunks = kHeadDim / 64, kVChunks = kHeadDimV / 64, kHalf = kVChunks / 2;
static_assert(kHeadDim % 64 == 0 && kHeadDimV % 128 == 0,
              "chunks are whole, and each warpgroup has as many of V");
static_assert(kBlockM == 64 && kBlockN == 64 && kThreads == 384);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;    // of a thread, by setmaxnreg
static_assert(fit_registers(2, kConsumerRegisters, kProducerRegisters));
static_assert(kSlots >= kKChunks + kVChunks, "K of a block and V of the one before are read together");

using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, 64, kHeadDim>;
using Chunk = SwizzledTile<Element, 64, 64>;
using OTile = SwizzledTile<Element, 16, kHeadDimV / 2>;    // of a warp
using Ring = StageRing<kSlots>;
static_assert(8 * OTile::kBytes <= QTile::kBytes, "O leaves through the tile of Q");

struct Kernel;
struct SharedStorage {
    QTile q;
    Chunk slots[kSlots];
    Chunk p;
    StageRing<1> q_ring;
    WorkTile<Kernel> work[2][1];    // by phase of Q
    StageRing<1> work_ring;
    Ring ring;
    float factor[64];    // that rows of O are waiting for

    CF_DEVICE QTile& q_tile(int, int) { return q; }
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Types and constants that the headers of hopper/ need; of the producer all but its main loop.
struct Kernel {
    using Params = HopperForwardParams;
    using Storage = SharedStorage;
    using QTile = ::QTile;
    using KTile = Chunk;
    using VTile = Chunk;
    using QRing = StageRing<1>;
    using WorkRing = StageRing<1>;
    using Product = ::Product;
    // why 8: as in flash_forward_sm90.
    using Softmax = OnlineSoftmax<Product, 1, 0, 8>;
    static constexpr Mask kMask = Mask::CF_MASK;
    static constexpr bool kSchedulerBarrier = false, kSchedulerThread = true;
    static constexpr int kBlockM = ::kBlockM, kBlockN = ::kBlockN, kConsumers = 1;
};

// The cursor n steps further, n at most kSlots.
CF_DEVICE void skip(Ring::Cursor& at, int n) {
    at.stage += n;
    if (at.stage >= kSlots) at.stage -= kSlots, at.phase ^= 1;
}

// [A2.p]
CF_DEVICE void produce(const HopperForwardParams& p, SharedStorage& s) {
    Producer<Kernel> producer(p, s);
    Ring::Cursor at;
#pragma unroll 1
    for (;;) {
        const WorkTile<Kernel>& work = producer.get_next_work();
        if (work.blocks == kNoTile) break;
        const auto send = [&](const TensorMap& map, int32_t block, int chunks) {
            const int32_t row = producer.key_row(work, block);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++) {
                s.ring.acquire(at, Chunk::kBytes);
                tma_load(s.slots[at.stage].data, map, s.ring.full[at.stage], 64 * chunk, row, work.kv_head,
                         producer.batch(work));
                at.advance();
            }
        };
        // why K before Q: as in hopper/producer.cuh.
        if (work.blocks > 0) send(p.k_map, work.blocks - 1, kKChunks);
        producer.load_q(work);
        if (work.blocks <= producer.kAhead) producer.request_next_work();
#pragma unroll 1
        for (int32_t block = work.blocks - 1; block >= 0; block--) {
            if (block == producer.kAhead) producer.request_next_work();
            if (block > 0) send(p.k_map, block - 1, kKChunks);
            send(p.v_map, block, kVChunks);
        }
    }
    s.q_ring.acquire(StageRing<1>::at(producer.tiles), 0);
}

// The products of a warpgroup's half of O. Between start and end neither O nor rP is touched.
struct Values {
    SharedStorage& s;
    ByColumns<Chunk> first;

    CF_DEVICE explicit Values(SharedStorage& s) : s(s), first(s.slots[0]) { first.hold(); }
    // Waits for the chunks of the half from `at` on.
    CF_DEVICE void wait(Ring::Cursor at) const {
#pragma unroll 1
        for (int c = 0; c < kHalf; c++) s.ring.wait(at), at.advance();
    }
    // Of the last block. why: where the rows of V end before it other rows follow in memory, and 0 times NaN is NaN.
    CF_DEVICE void clear(const ForwardParams& call, const WorkTile<Kernel>& work, Ring::Cursor at,
                         int warpgroup) const {
        const int32_t rows = work.sequence.seqlen_k - work.first_key - (work.blocks - 1) * kBlockN;
        if (rows >= kBlockN || !(call.shape.packed || call.shape.seqused_k)) return;
        wait(at);
#pragma unroll 1
        for (int c = 0; c < kHalf; c++) {
            clear_rows(s.slots[at.stage], rows, threadIdx.x % 128, 128);
            at.advance();
        }
        fence_proxy_async();
        // sync: the warpgroup has cleared them before its products read them.
        bar_sync(kVCleared + warpgroup, 128);
    }
    CF_DEVICE void start(float (&rO)[kHalf][32], const uint32_t (&rP)[4][4], Ring::Cursor at) const {
        // why all at once: with a wait between products NVRTC 12.9 serialises them.
        wait(at);
        CF_UNROLL
        for (int c = 0; c < kHalf; c++) wgmma_fence_operand(rO[c]);
        wgmma_fence();
        CF_UNROLL
        for (int c = 0; c < kHalf; c++) {
            multiply(rO[c], rP, first.of_tile(at.stage), true);
            at.advance();
        }
        wgmma_commit();
    }
    CF_DEVICE void end(float (&rO)[kHalf][32], Ring::Cursor& at) const {
        CF_UNROLL
        for (int c = 0; c < kHalf; c++) wgmma_fence_operand(rO[c]), s.ring.release(at), at.advance();
    }
};

// The rows of O that have factors. any: whether one of the warp's is not 1.
CF_DEVICE void rescale_o(float (&rO)[kHalf][32], bool any, float2 factor) {
    if (!any) return;
    CF_UNROLL
    for (int c = 0; c < kHalf; c++) {
        Kernel::Softmax::rescale_row(as_tile(rO[c]), 0, 0, factor.x);
        Kernel::Softmax::rescale_row(as_tile(rO[c]), 0, 1, factor.y);
    }
}

// A warp's 16 rows of a half of O, through the memory of Q, which every warp of the block then frees.
CF_DEVICE void store(const HopperForwardParams& p, SharedStorage& s, const WorkTile<Kernel>& tile,
                     float (&rO)[kHalf][32], int warpgroup) {
    const WorkTile<Kernel> work = tile;    // why: there are registers again, and it is read once
    const int warp = threadIdx.x / 32 % 4, first_row = work.first_row + 16 * warp,
              first_column = warpgroup * (kHeadDimV / 2);
    const bool floats = p.call.float_o;
    auto& sO = reinterpret_cast<OTile*>(s.q.data)[4 * warpgroup + warp];
    CF_UNROLL
    for (int c = 0; c < kHalf; c++) {
        if (floats) {
            store_floats(p.call, work, first_row, first_column + 64 * c, rO[c]);
            continue;
        }
        uint32_t rounded[4][4];
        to_fragments<Element>(rounded, rO[c]);
        store_warp_fragments(sO, 0, 64 * c, rounded);
    }
    // sync: every lane's part of O is visible to the lanes of the warp and to the copy engine.
    fence_proxy_async();
    __syncwarp();
    const bool leader = elect_one();
    // why: as in hopper/epilogue.cuh.
    const bool packed = p.call.shape.packed;
    if (!floats && packed && warp_uniform(work.rows.query(first_row + 15) - work.sequence.seqlen_q) >= 0) {
        const auto place = [&](int i) -> Element* {
            const int32_t row = first_row + i;
            if (!work.exists(row)) return nullptr;
            return head_rows<Element>(p.call.o, work.batch, work.head(row),
                                      work.sequence.first_q + work.rows.query(row)) +
                   first_column;
        };
        copy_rows(place, sO, 16, p.call.shape.head_dim_v - first_column);
        // sync: every lane has read its part before the next Q comes.
        __syncwarp();
    } else if (!floats && leader) {
        CF_UNROLL
        for (int c = 0; c < kHalf; c++)
            tma_store(p.o_map, sO.data + c * (16 * 64), first_column + 64 * c, work.rows.head(first_row),
                      work.row_of_q(first_row), work.group, packed ? 0 : work.batch);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
    if (leader) mbar_arrive(s.q_ring.empty[0]);
}

// The position of the first warpgroup in the ring, kept from tile to tile.
struct Cursors {
    Ring::Cursor k, v;
};

CF_DEVICE void attend_first_half(const HopperForwardParams& p, SharedStorage& s, const WorkTile<Kernel>& work,
                                 const Values& values, ByRows<Chunk> k, Cursors& at) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_row = threadIdx.x / 32 % 4 * 16;
    const double scale = p.call.score.scale;
    MaskedSoftmax<Kernel> softmax(p.call.score, work, work.first_row,
                                  warp_uniform(static_cast<float>(scale * 1.4426950408889634)));
    float rO[kHalf][32] = {};
    if (work.blocks > 0) {
        const ByRows<QTile> q(s.q);
        uint32_t rP[4][4];
        const auto start_s = [&](float (&rS)[32]) {
            Ring::Cursor chunk = at.k;
#pragma unroll 1
            for (int c = 0; c < kKChunks; c++) s.ring.wait(chunk), chunk.advance();
            chunk = at.k;
            wgmma_fence_operand(rS);
            wgmma_fence();
            const auto of_q = q.opaque_copy();
            CF_UNROLL
            for (int c = 0; c < kKChunks; c++) {
                const auto of_k = k.of_tile(chunk.stage);
                CF_UNROLL
                for (int i = 0; i < 4; i++)
                    wgmma_m64k16<Element, false, false>(rS, of_q.step(4 * c + i), of_k.step(i), c + i > 0);
                chunk.advance();
            }
            wgmma_commit();
        };
        const auto end_s = [&](float (&rS)[32]) {
            wgmma_fence_operand(rS);
            CF_UNROLL
            for (int c = 0; c < kKChunks; c++) s.ring.release(at.k), at.k.advance();
        };
        const auto publish = [&](float2 factor) {
            // sync: the other warpgroup has read the P before.
            bar_sync(kPEmpty, 256);
            store_fragments(s.p, 0, 0, rP);
            if (t == 0) s.factor[warp_row + g] = factor.x, s.factor[warp_row + 8 + g] = factor.y;
            // sync: P and its factors are visible to the other warpgroup.
            bar_arrive(kPFull, 256);
        };
        {
            // [A2.4]
            float rS[32];
            start_s(rS);
            // sync: S is in registers, K in use no more.
            wgmma_wait<0>();
            end_s(rS);
            // [A2.6]
            const Rescale rescale = softmax.mask_and_softmax(rS, work.blocks - 1);
            to_fragments<Element>(rP, rS);
            publish(rescale.factor);
        }
        at.v = at.k;
        if (work.blocks > 1) skip(at.v, kKChunks);    // K of the next block lies before V of this one
        values.clear(p.call, work, at.v, 0);
#pragma unroll 1
        for (int32_t block = work.blocks - 2; block >= 0; block--) {
            float rS[32];
            // [A2.9]
            start_s(rS);
            // [A2.11]
            values.start(rO, rP, at.v);
            // [A2.12]
            // sync: S is in registers, K_j in use no more.
            wgmma_wait<1>();
            end_s(rS);
            skip(at.k, kVChunks);
            // [A2.13]
            const Rescale rescale = softmax.mask_and_softmax(rS, block);
            // [A2.14]
            pin_schedule(
                __float_as_uint(softmax.online.row_sum[0][1]));    // why: or ptxas waits before the softmax
            // sync: O is in registers, P and V in use no more.
            wgmma_wait<0>();
            values.end(rO, at.v);
            skip(at.v, kHalf + (block > 0 ? kKChunks : 0));
            to_fragments<Element>(rP, rS);
            publish(rescale.factor);
            rescale_o(rO, rescale.any, rescale.factor);
        }
        // [A2.19]
        values.start(rO, rP, at.v);
        wgmma_wait<0>();
        values.end(rO, at.v);
        skip(at.v, kHalf);
        at.k = at.v;
    }
    // [A2.21]
    // sync: the other warpgroup has read the factors before, and no warp of this one multiplies Q.
    bar_sync(kPEmpty, 256);
    const Score& rule = p.call.score;
    float2 factor;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t row = work.first_row + warp_row + 8 * half + g, head = work.head(row);
        const float sink =
            rule.sinks ? static_cast<const float*>(rule.sinks)[head * rule.sinks_head] : -kInfinity;
        const FinalRow<float> end = softmax.online.finalize(0, half, static_cast<float>(scale), sink);
        (half ? factor.y : factor.x) = end.normaliser;
        if (p.call.lse.data && t == 0 && work.exists(row))
            st_global(
                head_rows<float>(p.call.lse, work.batch, head, work.sequence.first_q + work.rows.query(row)),
                end.lse);
    }
    if (t == 0) s.factor[warp_row + g] = factor.x, s.factor[warp_row + 8 + g] = factor.y;
    // sync: the factors are visible to the other warpgroup, which may use the memory of Q.
    bar_arrive(kPFull, 256);
    rescale_o(rO, true, factor);
    store(p, s, work, rO, 0);
}

CF_DEVICE void attend_second_half(const HopperForwardParams& p, SharedStorage& s,
                                  const WorkTile<Kernel>& work, const Values& values, Ring::Cursor& at) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    float rO[kHalf][32] = {};
    uint32_t rP[4][4];
    const auto take = [&](bool weights) {
        // sync: P and its factors are visible.
        bar_sync(kPFull, 256);
        if (weights) {
            CF_UNROLL
            for (int k = 0; k < 4; k++)
                ldmatrix_x4(rP[k],
                            smem_addr(s.p.data) + Chunk::offset(warp_row + lane % 16, 2 * k + lane / 16));
        }
        const float2 factor{s.factor[warp_row + lane / 4], s.factor[warp_row + 8 + lane / 4]};
        // sync: the first warpgroup may write the next ones.
        bar_arrive(kPEmpty, 256);
        return factor;
    };
    if (work.blocks > 0) skip(at, kKChunks);
#pragma unroll 1
    for (int32_t block = work.blocks - 1; block >= 0; block--) {
        const float2 factor = take(true);
        rescale_o(rO, __any_sync(0xffffffffu, factor.x != 1.0f || factor.y != 1.0f), factor);
        skip(at, kHalf + (block > 0 ? kKChunks : 0));
        // why only now: before P comes the slots may be two passes behind, and a wait knows one.
        if (block == work.blocks - 1) values.clear(p.call, work, at, 1);
        values.start(rO, rP, at);
        // sync: O is in registers, V in use no more.
        wgmma_wait<0>();
        values.end(rO, at);
    }
    rescale_o(rO, true, take(false));
    store(p, s, work, rO, 1);
}

CF_DEVICE void consume(const HopperForwardParams& p, SharedStorage& s, int warpgroup) {
    const Values values(s);
    ByRows<Chunk> k(s.slots[0]);
    k.hold();
    Cursors at;
    if (warpgroup == 1) bar_arrive(kPEmpty, 256);
    StageRing<1>::Cursor q_at;
#pragma unroll 1
    for (;; q_at.advance()) {
        // sync: Q has come, and with it what its tile is.
        s.q_ring.wait(q_at);
        const WorkTile<Kernel>& work = s.work[q_at.phase][0];
        if (work.blocks == kNoTile) break;
        if (warpgroup == 0) attend_first_half(p, s, work, values, k, at);
        else attend_second_half(p, s, work, values, at.v);
    }
    if (warpgroup == 0) bar_sync(kPEmpty, 256);    // why: the last arrival has no other taker
}

CF_DEVICE void flash_forward_wide(const HopperForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        Producer<Kernel>::prefetch(p);
        s.q_ring.init(8);
        s.work_ring.init(1);
        s.ring.init(1);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup == 2) {
        setmaxnreg_dec<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32 - 8;
        if (warp == 0 && elect_one()) produce(p, s);
        else if (warp == 1 && elect_one()) TileScheduler<Kernel>(p.call, s).run();
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, s, warpgroup);
    }
}

CF_KERNEL(HopperForwardParams, kThreads, 1, flash_forward_wide)
