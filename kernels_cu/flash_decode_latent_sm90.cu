// Flash decoding over latents (MLA) on Hopper, attention of few queries over a cache: TMA, wgmma, two warpgroups that share the columns
// of O. A latent is the key of a token, and its first columns the value: one tile serves both products.
// Design note: docs/kernels/decode_wide.md.
//
// Sources and tags as in flash_decode_wide.cu:
//   [D1]    the rows of a block: queries of all heads, heads of one query next to each other; kBlockM of them
//   [D2]    the keys of a block: one of `splits` parts of those that the rows see
//   [D3]    the producer loads kBlockN keys at a time, the last ones first
//   [A1.8]      S = score(Q K^T), -inf where masked
//   [A1.9]      row_max rises; P = e^(S - row_max), row_sum; P goes to shared memory
//   [A1.10]     O = O + P V
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   as flash_decode, with tiles of kBlockM rows.
// Block:  a warpgroup that does all of the above for the first half of the columns of O; one that does [A1.10] and [A1.12]
//         alone for the other half, with P and factors from shared memory; one of which a thread is the producer.
// Shared: Q; kStages tiles of keys; P; factors; the keys that each row sees; barriers.
//
// Assumes: head dims are kHeadDim and at most kHeadDimV; scale > 0; rows of q, o and the cache start on 16-byte
//          boundaries, last axes contiguous; a page has kBlockN keys, or there are none.
// Not here: softcap, ALiBi, masks, spans, bias, dropout, 8 bits; new latents (flash_append), splits brought together
//           (flash_combine).
#include "cache/rows.cuh"
#include "hopper/named_barriers.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/warpgroup.cuh"
#include "tile/online_softmax.cuh"
#include "tile/score_tile.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 576
#define CF_HEAD_DIM_V 512
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_STAGES 2
#define CF_THREADS 384
#define CF_SHARED_BYTES 230400
#endif
using Element = CF_ELEMENT;
constexpr int kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V, kHalf = kHeadDimV / 2;
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = CF_STAGES;
static_assert(kBlockM == 64 && kBlockN == 64 && kThreads == 384);
constexpr int kConsumers = kThreads - 128;                          // threads of the first two warpgroups
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;    // of a thread, by setmaxnreg
static_assert(fit_registers(2, kConsumerRegisters, kProducerRegisters));

using Product = Math<Element, 1, false>;
// why 8: as in flash_forward_sm90.
using Softmax = OnlineSoftmax<Product, 1, 0, 8>;
using QTile = SwizzledTile<Element, kBlockM, kHeadDim>;
using KeyTile = SwizzledTile<Element, kBlockN, kHeadDim>;
// A half of the columns of values, in place in a tile of keys.
using HalfTile = SwizzledTile<Element, kBlockN, kHalf>;
using WeightTile = SwizzledTile<Element, kBlockM, kBlockN>;
using Ring = StageRing<kStages>;

struct SharedStorage {
    QTile q;
    KeyTile keys[kStages];
    WeightTile p;
    Ring ring;
    Range seen[kBlockM];      // keys of a row
    float factor[kBlockM];    // that rows of O are waiting for
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// What a block has to do.
struct Work {
    RowBlock block;
    Sequence sequence;
    KeySteps steps;

    CF_DEVICE int32_t key(int32_t step) const { return (steps.first + step) * kBlockN; }
};

// [D3]
CF_DEVICE void produce(const HopperDecodeParams& p, SharedStorage& s, const Work& work) {
    const Cache& cache = p.call.cache;
    Ring::Cursor at;
#pragma unroll 1
    for (int32_t step = work.steps.count - 1; step >= 0; step--, at.advance()) {
        const int32_t key = work.key(step), slot = slot_of(cache, work.block.batch, key);
        s.ring.acquire(at, KeyTile::kBytes);
        // why also from slot -1: a page outside the cache reads as zeros, and is masked.
        load_tile(s.keys[at.stage], p.k_map, s.ring.full[at.stage], row_in_slot(cache, key),
                  work.block.kv_head, slot);
    }
}

// By the consumers: rows that do not exist are zeros, and see no key.
CF_DEVICE void load_q(const DecodeParams& p, SharedStorage& s, const Work& work, const Band& band) {
    load_queries<Element, kConsumers, 4>(s.q, p, work.block);
    if (threadIdx.x < kBlockM) {
        const int32_t row = threadIdx.x;
        s.seen[row] = row < work.block.rows ? band.keys_of(work.block.row(row).query) : Range{0, 0};
    }
    // sync: Q is visible to products, and the limits to all.
    fence_proxy_async();
    bar_sync(kQLoaded, kConsumers);
}

// A half of the columns of O.
struct HalfOfO {
    SharedStorage& s;
    ByColumns<KeyTile> values;
    int warpgroup;
    float o[kHalf / 2] = {};

    CF_DEVICE HalfOfO(SharedStorage& s, int warpgroup)
        : s(s), values(s.keys[0], warpgroup * kHalf), warpgroup(warpgroup) {
        values.hold();
    }
    // [A1.10], and frees the keys. rows: of the tile that are keys of the sequence.
    CF_DEVICE void add(const uint32_t (&weights)[kBlockN / 16][4], Ring::Cursor at, int32_t rows) {
        // why: other numbers lie in the cache behind the last key, and 0 times NaN is NaN.
        if (rows < kBlockN) {
            clear_rows(reinterpret_cast<HalfTile*>(s.keys[at.stage].data)[warpgroup], rows, threadIdx.x % 128,
                       128);
            fence_proxy_async();
            // sync: the warpgroup has cleared them before its products read them.
            bar_sync(kVCleared + warpgroup, 128);
        }
        wgmma_fence_operand(o);
        wgmma_fence();
        multiply(o, weights, values.of_tile(at.stage), true);
        wgmma_commit();
        // sync: O is in registers, the keys in use no more.
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        s.ring.release(at);
    }
    // O, or a part's.
    CF_DEVICE void store(const DecodeParams& p, const RowBlock& block, float2 factor) const {
        const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t row = first_row + 8 * half;
            if (row >= block.rows) continue;
            const Row at = block.row(row);
            const float normaliser = half ? factor.y : factor.x;
            float* part =
                p.partial_o ? p.partial_o + block.part_row(p.shape, at) * p.shape.head_dim_v : nullptr;
            Element* whole = head_rows<Element>(p.o, block.batch, at.head, at.query);
            CF_UNROLL
            for (int n = 0; n < kHalf / 8; n++) {
                const int column = warpgroup * kHalf + 8 * n + lane % 4 * 2;
                if (column >= p.shape.head_dim_v) continue;
                const float x = o[4 * n + 2 * half] * normaliser, y = o[4 * n + 2 * half + 1] * normaliser;
                if (part) st_global(reinterpret_cast<float2*>(part + column), float2{x, y});
                else st_global(reinterpret_cast<uint32_t*>(whole + column), pack<Element>(x, y));
            }
        }
    }
};

CF_DEVICE void attend_first_half(const DecodeParams& p, SharedStorage& s, const Work& work,
                                 const Band& band) {
    const int lane = threadIdx.x % 32, t = lane % 4,
              row = threadIdx.x / 32 * 16 + lane / 4;    // the thread's first
    const int32_t whole_first = band.first_key(work.block.last_query()),
                  whole_end = band.end_key(work.block.first_query());
    const float scale = static_cast<float>(p.score.scale);
    const float unit_log2 = warp_uniform(static_cast<float>(p.score.scale * 1.4426950408889634));
    // why not infinity: as in hopper/online_softmax.cuh.
    const float threshold = warp_uniform(fminf(Softmax::kRescaleThreshold * rcp(unit_log2), 3e38f));
    const ByRows<QTile> q(s.q);
    ByRows<KeyTile> k(s.keys[0]);
    k.hold();
    HalfOfO half_of_o(s, 0);
    Softmax softmax;
    Ring::Cursor at;
#pragma unroll 1
    for (int32_t step = work.steps.count - 1; step >= 0; step--, at.advance()) {
        const int32_t key = work.key(step);
        // why before the products: an entry of the table arrives while they run.
        const bool nowhere = slot_of(p.cache, work.block.batch, key) < 0;
        // [A1.8]
        float rS[kBlockN / 2];
        s.ring.wait(at);
        wgmma_fence_operand(rS);
        wgmma_fence();
        multiply(rS, q.opaque_copy(), k.of_tile(at.stage), false);
        wgmma_commit();
        // sync: S is in registers.
        wgmma_wait<0>();
        wgmma_fence_operand(rS);
        if (nowhere || key < whole_first || key + kBlockN > whole_end) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const Range seen = s.seen[row + 8 * half];
                mask_row(as_tile(rS), 0, half, seen.first - key - 2 * t,
                         nowhere ? 0 : seen.end - key - 2 * t);
            }
        }
        // [A1.9]
        const Rescale rescale = softmax.softmax_rows(as_tile(rS), 0, unit_log2, threshold);
        uint32_t weights[kBlockN / 16][4];
        to_fragments<Element>(weights, rS);
        // sync: the other warpgroup has read the P before.
        bar_sync(kPEmpty, kConsumers);
        store_fragments(s.p, 0, 0, weights);
        if (t == 0) s.factor[row] = rescale.factor.x, s.factor[row + 8] = rescale.factor.y;
        // sync: P and its factors are visible to the other warpgroup.
        bar_arrive(kPFull, kConsumers);
        Softmax::rescale_o(as_tile(half_of_o.o), 0, rescale);
        half_of_o.add(weights, at, work.sequence.seqlen_k - key);
    }
    // [A1.12] [A1.13]
    float2 factor;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t mine = row + 8 * half;
        const Row of = work.block.row(smaller(mine, work.block.rows - 1));
        // why: with splits the sink is one part's, and flash_combine adds it.
        const float sink = p.score.sinks && !p.partial_o
                               ? static_cast<const float*>(p.score.sinks)[of.head * p.score.sinks_head]
                               : -kInfinity;
        const FinalRow<float> end = softmax.finalize(0, half, scale, sink);
        (half ? factor.y : factor.x) = end.normaliser;
        if (t != 0 || mine >= work.block.rows) continue;
        if (p.partial_o) st_global(p.partial_lse + work.block.part_row(p.shape, of), end.lse);
        else if (p.lse.data) st_global(head_rows<float>(p.lse, work.block.batch, of.head, of.query), end.lse);
    }
    // sync: the other warpgroup has read the factors before.
    bar_sync(kPEmpty, kConsumers);
    if (t == 0) s.factor[row] = factor.x, s.factor[row + 8] = factor.y;
    // sync: the factors are visible to the other warpgroup.
    bar_arrive(kPFull, kConsumers);
    half_of_o.store(p, work.block, factor);
}

CF_DEVICE void attend_second_half(const DecodeParams& p, SharedStorage& s, const Work& work) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    const auto factors = [&] {
        return float2{s.factor[warp_row + lane / 4], s.factor[warp_row + 8 + lane / 4]};
    };
    HalfOfO half_of_o(s, 1);
    Ring::Cursor at;
    bar_arrive(kPEmpty, kConsumers);
#pragma unroll 1
    for (int32_t step = work.steps.count - 1; step >= 0; step--, at.advance()) {
        // sync: P and its factors are visible.
        bar_sync(kPFull, kConsumers);
        uint32_t weights[kBlockN / 16][4];
        CF_UNROLL
        for (int k = 0; k < kBlockN / 16; k++)
            ldmatrix_x4(weights[k],
                        smem_addr(s.p.data) + WeightTile::offset(warp_row + lane % 16, 2 * k + lane / 16));
        const float2 factor = factors();
        // sync: the first warpgroup may write the next ones.
        bar_arrive(kPEmpty, kConsumers);
        Softmax::rescale_o(as_tile(half_of_o.o), 0, factor);
        s.ring.wait(at);
        half_of_o.add(weights, at, work.sequence.seqlen_k - work.key(step));
    }
    // sync: the factors of the end are visible.
    bar_sync(kPFull, kConsumers);
    half_of_o.store(p, work.block, factors());
}

CF_DEVICE void flash_decode_latent(const HopperDecodeParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const DecodeParams& call = p.call;
    // [D1] [D2]
    const RowBlock block = RowBlock::of(blockIdx.x, call.shape, call.splits, kBlockM);
    const Sequence sequence = sequence_in_cache(call.cache, call.shape, block.batch);
    const Band band(call.score, sequence);
    // why: a part of fewer rings costs merging and gains nothing.
    const Work work{block, sequence, KeySteps::of<kBlockN>(block, band, call.splits, 2 * kStages)};
    if (call.partial_o && work.steps.count == 0) {
        store_empty_part(call, block);
        return;
    }
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) {
        tma_prefetch(p.k_map);
        s.ring.init(2);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup == 2) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x / 32 == 8 && elect_one()) produce(p, s, work);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        load_q(call, s, work, band);
        if (warpgroup == 0) attend_first_half(call, s, work, band);
        else attend_second_half(call, s, work);
    }
}

CF_KERNEL(HopperDecodeParams, kThreads, 1, flash_decode_latent)
