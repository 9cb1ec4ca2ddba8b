// Flash decoding (split-K): attention of few queries over the long keys of a cache, on mma.sync tensor cores, sm_75 to
// sm_120. It is bound by memory bandwidth.
// Design note: docs/kernels/decode.md.
//
// Sources: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023): keys split over
// blocks, parts merged by their LSE; A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1.
//   [D1]    the rows of a block: kRows queries of all heads that share a key head, heads of one query next to each other
//   [D2]    the keys of a block: one of `splits` parts of the keys that the rows see
//   [D3]    a warp takes every kWarps-th step of 16 keys, into a ring of its own (cache/key_stream.cuh)
//   [A1.8]      S = score(Q K^T), -inf where masked: by the band, and the last keys, drafts, by spans
//   [A1.9]      online softmax: row_max rises; P = e^(S - row_max); rescale row_sum and O
//   [A1.10]     O = O + P V
//   [D4]    merge O of the warps by their row_max and row_sum
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   x = ((batch * heads_k + kv_head) * splits + split) * tiles + tile, tiles = ceil(rows / kRows); tiles
//         that read the same keys run next to each other. It depends on the capacity of the cache, not on
//         the lengths in it.
// Block:  kWarps warps.
// Shared: Q, kRows x kHeadDim; for each warp kStages tiles of K and of V as stored, 16 x kHeadDim each; of 8-bit caches
//         both tiles widened; of 4-bit ones the scales and zeros of kStages steps. In the end O of each warp, in float, in
//         the place of the rings. Then values saved for the epilogue. See SharedStorage.
//
// Assumes: rows of q, o and the cache start on 16-byte boundaries, last axes contiguous; row strides below
//          2^31 bytes; pages hold a power of two of at least 16 keys.
// Not here: masks, bias, dropout; new keys and rotation (flash_append), merging of splits (flash_combine).
#include "cache/e2m1.cuh"
#include "cache/elements.cuh"
#include "cache/integers.cuh"
#include "cache/key_stream.cuh"
#include "cache/rows.cuh"
#include "cache/stored.cuh"
#include "tile/score_tile.cuh"
#include "tile/online_softmax.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_TURING 0
#define CF_HEAD_DIM 128
#define CF_THREADS 128
#define CF_STAGES 3
#define CF_MIN_BLOCKS 2
#define CF_SHARED_BYTES 102400
#endif
#if !defined(CF_PASS)
#define CF_PASS same
#endif
using Element = CF_ELEMENT;
constexpr Stored kStored = Stored::CF_PASS;    // what the cache holds
constexpr bool kTuring = CF_TURING;            // no cp.async, no m16n8k16
constexpr bool kCodes = of_codes(kStored), kIntegers = kStored == Stored::int4;
constexpr bool kWidened = kStored == Stored::int8 || kStored == Stored::e4m3;
constexpr int kHeadDim = CF_HEAD_DIM;    // the largest head dim, of q and k and of v
constexpr int kRows = 16, kThreads = CF_THREADS, kWarps = kThreads / 32, kStages = CF_STAGES;
static_assert(kTuring ? kStages == 1 : kStages >= 2, "one step is read while others come");
static_assert(!kCodes || kStages != 2, "scales of a step are stored a step after its copies are sent for");

using Operand = Select<kIntegers, __half, Element>::Type;    // what is multiplied
using Product = Math<Operand, CF_PRODUCTS, kTuring>;
using QTile = Tile<Operand, kRows, kHeadDim>;
using KeyTile = Tile<Operand, kStepKeys, kHeadDim>;
using StoredTile =
    Tile<Select<kWidened || kCodes, uint8_t, Element>::Type, kStepKeys, kCodes ? kHeadDim / 2 : kHeadDim>;
using Loader = WarpLoader<StoredTile, kTuring>;
// why: 32 bytes, or 64 of float products, of which a quad stores 64 at once, put rows into different banks; 16,
// where a quad stores every other 16 bytes.
constexpr int kPartPitch = kHeadDim + (Product::kFloat ? 16 : kCodes ? 4 : 8);
constexpr bool kQInRegisters = KeyTile::kPitch / 8 + kHeadDim / 2 < 128;    // registers of Q and of O

// Whether a thread reads the positions and limits of its rows from shared memory in every step, to save registers.
constexpr bool kScarce = Product::kFloat || (kIntegers && kHeadDim == 256);
constexpr bool kDrafts = !Product::kFloat || kHeadDim <= 128;    // why: the others have no registers left

constexpr int kSegments = kHeadDim / kSegment;
using Coded = Select<kIntegers, IntegerTiles<Product, StoredTile>, E2m1Tiles<Product, StoredTile>>::Type;
using Tiles = Select<kCodes, Coded, ElementTiles<Product, KeyTile>>::Type;
using KeyUnits = Tiles::KeyUnits;
using ValueUnits = Tiles::ValueUnits;
struct WarpStorage : Operands<kStored, StoredTile, KeyTile>,
                     UnitRing<kCodes, kStages, KeyUnits::kBytes, ValueUnits::kBytes, Tiles::kKeptBytes> {
    StoredTile k[kStages], v[kStages];
};
static_assert(!kCodes || sizeof(WarpStorage) == WarpStorage::kRingBytes + kStages * 2 * StoredTile::kBytes);
// Types and constants that KeyStream needs.
struct Kernel {
    using Loader = ::Loader;
    using KeyUnits = ::KeyUnits;
    using ValueUnits = ::ValueUnits;
    static constexpr int kStages = ::kStages, kWarps = ::kWarps, kTileBytes = StoredTile::kBytes;
    static constexpr int kUnitBytes = WarpStorage::kUnitBytes, kOfKeys = WarpStorage::kOfKeys;
    static constexpr bool kTuring = ::kTuring, kCodes = ::kCodes;
};
// What the main loop seldom needs, or only the epilogue. why: in registers it would make the loop over wide rows
// of floats spill. Products of 16 bits have the scores of their rows in registers nevertheless, see row_score:
// without, ptxas computes addresses again in every step, 60 instructions.
struct Saved {
    RowScore scores[kRows];
    RowBlock block;
    float q_scales[kRows];    // of integers: what products with a row of Q are multiplied by
};
// layout: `parts` begins where the rings do and may be longer.
struct SharedStorage {
    QTile q;
    union {
        WarpStorage warps[kWarps];
        alignas(128) float parts[kWarps][kRows][kPartPitch];
    };
    alignas(128) float row_max[kWarps][kRows];
    float row_sum[kWarps][kRows];
    alignas(128) Saved saved;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Calls act(score, which of the two rows, column of the step relative to the thread's first).
template <class Act>
CF_DEVICE void each(float (&s)[1][kStepKeys / 8][4], Act act) {
    CF_UNROLL
    for (int n = 0; n < kStepKeys / 8; n++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) act(s[0][n][e], e / 2, 8 * n + e % 2);
    }
}

// Q of the block's rows, zeros where there are none. Of integers each row is raised to the range of halves, and its
// factor saved; scale: of all scores.
CF_DEVICE void load_q(const DecodeParams& p, SharedStorage& s, const RowBlock& block, float scale) {
    static_assert(!kIntegers || kRows * QTile::kChunks % kThreads == 0,
                  "scale_row_to_halves wants whole warps");
    load_queries<Element, kThreads>(s.q, p, block, [&](const Element* from, int row, int chunk) {
        uint4 value{};
        if (from) {
            if constexpr (kCodes) value = read_for_codes(from, chunk, p.shape.head_dim);
            else value = read_chunk(from, chunk, p.shape.head_dim);
        }
        if constexpr (kIntegers) {
            const float unit = scale_row_to_halves<Element, QTile::kChunks>(value, chunk);
            if (chunk == 0) s.saved.q_scales[row] = unit * scale;
        }
        return value;
    });
}

// O of a warp, in float, with the maxima and sums of its rows.
CF_DEVICE void store_warp(SharedStorage& s, int warp, int g, int t, const OnlineSoftmax<Product, 1>& softmax,
                          const float (&rO)[kHeadDim / 8][4]) {
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int row = g + 8 * half;
        const float sum = sum_over_lanes<4>(softmax.row_sum[0][half]);
        if (t == 0) s.row_max[warp][row] = softmax.row_max[0][half], s.row_sum[warp][row] = sum;
        const uint32_t to = smem_addr(s.parts[warp][row]);
        if constexpr (kCodes) store_for_codes(to, rO, half);
        CF_UNROLL
        for (int n = 0; n < (kCodes ? 0 : kHeadDim / 8); n++) {
            if constexpr (Product::kFloat) {
                if (n % 4 == 0) {
                    CF_UNROLL
                    for (int i = 0; i < 2; i++) {
                        const int e = 2 * half + i;
                        st_shared(to + 4 * output_column<Product>(n, e),
                                  float4{rO[n][e], rO[n + 1][e], rO[n + 2][e], rO[n + 3][e]});
                    }
                }
            } else {
                st_shared(to + 4 * output_column<Product>(n, 0),
                          float2{rO[n][2 * half], rO[n][2 * half + 1]});
            }
        }
    }
}

// [D4] [A1.12] [A1.13] A thread merges four columns of a row over the warps. parted: O and LSE are those of one split, for
// flash_combine.
CF_DEVICE void merge_warps(const DecodeParams& p, const SharedStorage& s, bool parted) {
    const RowBlock saved = s.saved.block;
    const float v_scale = kUnit<kStored, Element> * v_scale_of<float>(p.cache, saved.batch, saved.kv_head);
    for (int32_t i = threadIdx.x; i < kRows * kHeadDim / 4; i += kThreads) {
        const int32_t row = i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
        if (row >= saved.rows || column >= p.shape.head_dim_v) continue;
        const Row at = saved.row(row);
        // why: with splits the sink is one part's, and flash_combine adds it.
        const float sink = p.score.sinks && !parted
                               ? static_cast<const float*>(p.score.sinks)[at.head * p.score.sinks_head]
                               : -kInfinity;
        float highest = -kInfinity;
        CF_UNROLL
        for (int w = 0; w < kWarps; w++) highest = fmaxf(highest, s.row_max[w][row]);
        const float reference = highest == -kInfinity ? 0.0f : highest;
        float total = 0;
        float4 sum{};
        CF_UNROLL
        for (int w = 0; w < kWarps; w++) {
            const float weight = ex2((s.row_max[w][row] - reference) * kLog2e);
            const float4 x = ld_shared<float4>(smem_addr(&s.parts[w][row][column]));
            total = fmaf(weight, s.row_sum[w][row], total);
            sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
            sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
        }
        const FinalRow<float> end = finalize_row(highest, total, sink);
        const float factor = end.normaliser * v_scale;
        const float4 o{sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
        if (parted) {
            const int64_t index = saved.part_row(p.shape, at);
            st_global(reinterpret_cast<float4*>(p.partial_o + index * p.shape.head_dim_v + column), o);
            if (column == 0) st_global(p.partial_lse + index, end.lse);
            continue;
        }
        Element* gO = head_rows<Element>(p.o, saved.batch, at.head, at.query) + column;
        if constexpr (Product::kFloat) st_global(reinterpret_cast<float4*>(gO), o);
        else st_global(reinterpret_cast<uint2*>(gO), uint2{pack<Element>(o.x, o.y), pack<Element>(o.z, o.w)});
        if (column == 0 && p.lse.data)
            st_global(head_rows<float>(p.lse, saved.batch, at.head, at.query), end.lse);
    }
}

CF_DEVICE void flash_decode(const DecodeParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

    // [D1]
    const RowBlock block = RowBlock::of(blockIdx.x, p.shape, p.splits, kRows);
    const int32_t batch = block.batch, kv_head = block.kv_head, split = block.split;

    // [D2]
    const Sequence sequence = sequence_in_cache(p.cache, p.shape, batch);
    const Band band(p.score, sequence);
    const int32_t first_query = block.first_query(), last_query = block.last_query();
    const Range keys = band.keys_of(first_query, last_query + 1);
    const int32_t steps = cdiv(keys.end, kStepKeys) - keys.first / kStepKeys;
    // why: every warp gets two rings full at least; below that more splits only cost more merging.
    const int32_t least = 2 * kStages * kWarps;
    const int32_t per_split = larger(round_up(cdiv(steps, p.splits), kWarps), least);
    const int32_t first_step = keys.first / kStepKeys + smaller(split, cdiv(steps, per_split)) * per_split;
    const int32_t end_step = smaller(first_step + per_split, keys.first / kStepKeys + steps);

    const bool parted = p.partial_o != nullptr;
    if (parted && first_step >= end_step) {
        store_empty_part(p, block);
        return;
    }

    const float scale = static_cast<float>(p.score.scale) * kUnit<kStored, Element> *
                        k_scale_of<float>(p.cache, batch, kv_head);
    load_q(p, s, block, scale);
    if (threadIdx.x < kRows) s.saved.scores[threadIdx.x] = block.score(threadIdx.x, p.score, sequence, band);
    if (threadIdx.x == 0) s.saved.block = block;

    // [D3]
    Loader k_loader(p.cache.k, kv_head, p.shape.head_dim >> kCodes);
    Loader v_loader(p.cache.v, kv_head, p.shape.head_dim_v >> kCodes);
    if constexpr (kIntegers && addresses_in_registers(kSegments))
        k_loader.shared_offset = v_loader.shared_offset = opaque(k_loader.shared_offset);
    KeyUnits k_unit(p.cache.k_units, kv_head, p.shape.head_dim);
    ValueUnits v_unit(p.cache.v_units, kv_head, p.shape.head_dim_v);
    const WarpStorage& own = s.warps[warp];
    const uint32_t k_ring = kIntegers && addresses_in_registers(kSegments) ? opaque(smem_addr(own.k[0].data))
                                                                           : smem_addr(own.k[0].data);
    const uint32_t v_ring = kCodes ? k_ring + kStages * StoredTile::kBytes : smem_addr(own.v[0].data);
    const uint32_t unit_ring = kCodes ? k_ring - own.kRingBytes : 0;
    const int32_t count = larger(0, cdiv(end_step - first_step - warp, kWarps));
    const int32_t warp_key = (first_step + warp) * kStepKeys;    // first key of the warp's step 0
    KeyStream<Kernel> stream{p,         sequence,
                             batch,     kv_head,
                             k_loader,  v_loader,
                             k_unit,    v_unit,
                             k_ring,    v_ring,
                             unit_ring, count,
                             warp_key,  count > 0 ? slot_of(p.cache, batch, warp_key) : -1};
    CF_UNROLL
    for (int i = 0; i < kStages - 1; i++) stream.load(i);

    // sync: Q and the saved values are in shared memory, written by all threads.
    __syncthreads();
    const SharedRows<Product, QTile> shared_q(smem_addr(s.q.data), 0);
    RegisterRows<1, kQInRegisters ? kHeadDim / Product::kDepth : 1> register_q;
    if constexpr (kQInRegisters) register_q.fill(shared_q);

    // Of the two rows of this thread.
    const RowScore mine[2] = {s.saved.scores[g], s.saved.scores[g + 8]};
    const auto row_score = [&](int half) -> const RowScore& {
        return kScarce ? s.saved.scores[g + 8 * half] : mine[half];
    };
    const int32_t whole_first = band.first_key(last_query), whole_end = band.end_key(first_query);
    const float scales[2] = {kIntegers ? s.saved.q_scales[g] : scale,
                             kIntegers ? s.saved.q_scales[g + 8] : scale};
    const auto row_scale = [&](int half) {
        return kScarce && kIntegers ? s.saved.q_scales[g + 8 * half] : scales[half];
    };
    const float softcap = static_cast<float>(p.score.softcap), inverse_cap = 1.0f / softcap;

    Tiles tiles(shared_q, k_ring - Tiles::kKeptBytes);
    float rO[1][kHeadDim / 8][4] = {};
    OnlineSoftmax<Product, 1> softmax;
#pragma unroll 1
    for (int32_t step = 0; step < count; step++) {
        const int32_t stage = step % kStages, key = stream.key(step);
        if constexpr (kTuring) {
            // sync: the lanes are done with the step before.
            __syncwarp();
            stream.load(step);
            // sync: what the lanes stored of this step is visible to the warp.
            __syncwarp();
        } else {
            cp_async_wait<kStages - 2>();
            // sync: every lane's copies of this step are visible to the warp, and all are done with the step
            // before, whose stage is filled next.
            __syncwarp();
        }
        if constexpr (!kTuring) stream.load(step + kStages - 1);
        if (stream.is_absent(kTuring ? 0 : kStages - 1)) continue;

        // [A1.8]
        const uint32_t at_stage = stage * StoredTile::kBytes, at_units = unit_ring + stage * own.kUnitBytes;
        const uint2 operands = own.from(k_ring + at_stage, v_ring + at_stage);
        float rS[1][kStepKeys / 8][4] = {};
        if constexpr (kQInRegisters) tiles.multiply_by_rows(rS, register_q, operands.x, at_units);
        else tiles.multiply_by_rows(rS, shared_q, operands.x, at_units);
        each(rS, [&](float& x, int half, int) { x *= row_scale(half); });
        if (softcap != 0) {
            // why opaque: 1 / softcap would wait in a register through the loop.
            const float cap = kTuring ? __uint_as_float(opaque(__float_as_uint(softcap))) : softcap;
            const float inverse = kScarce && kIntegers ? 1.0f / cap : inverse_cap;
            each(rS, [&](float& x, int, int) { x = softcap * bounded_tanh<Product::kFloat>(x * inverse); });
        }
        const int32_t first = key + 2 * t;    // the key of column 0 of this thread
        if (p.score.alibi_slopes)
            each(rS, [&](float& x, int half, int column) {
                const RowScore& row = row_score(half);
                const float distance = static_cast<float>(row.position - first - column);
                x = fmaf(-row.slope, fabsf(distance), x);
            });
        if (key < whole_first || key + kStepKeys > whole_end)
            each(rS, [&](float& x, int half, int column) {
                const RowScore& row = row_score(half);
                const bool seen = first + column >= row.first_key && first + column < row.end_key;
                x = seen ? x : -kInfinity;
            });
        if (kDrafts && p.score.spans.data && key + kStepKeys > sequence.seqlen_k - sequence.seqlen_q)
            mask_drafts(rS, p.score, sequence, s.saved.block, 0, first);
        // [A1.9]
        softmax_rescale_o(tiles, softmax, rS, rO, v_unit, step);
        // [A1.10]
        tiles.multiply_by_columns(rO, rS, operands.y, at_units + own.kOfKeys);
    }

    // [D4]
    tiles.finalize(rO, v_unit, count);
    // sync: all warps are done with their rings, over which O is laid; no copy is under way, for each step was
    // waited for.
    __syncthreads();
    store_warp(s, warp, g, t, softmax, rO[0]);
    // sync: O, row_max and row_sum of every warp are visible to all.
    __syncthreads();

    // [A1.12] [A1.13]
    merge_warps(p, s, parted);
}

CF_KERNEL(DecodeParams, kThreads, CF_MIN_BLOCKS, flash_decode)
