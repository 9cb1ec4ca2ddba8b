// Flash decoding for head dims above 256, attention of few queries over the long keys of a cache, on mma.sync tensor cores, sm_80 to
// sm_120. Values are an array like keys, or the first columns of the keys: multi-head latent attention (MLA), every
// latent read once.
// Design note: docs/kernels/decode_wide.md.
//
// Sources: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1: one latent of a token for all heads, its
// projections absorbed into q and o; splits and tags as in flash_decode.cu.
//   [D1]    the rows of a block: queries of all heads that share a key head, heads of one query next to each other;
//           kBlockM of them
//   [D2]    the keys of a block: one of `splits` parts of those that the rows see
//   [D3]    steps of kBlockN keys in one ring of the block, whose tiles are those of K and of V in turn; of latents one
//           tile serves both products
//   [A1.8]      S = score(Q K^T), -inf where masked: by the band, and the last keys, drafts, by spans. A warp takes 16
//               rows, kWarpKeys keys and one of kDepthWarps parts of the features; the parts are added in shared memory
//   [A1.9]      row_max rises over all warps; P = e^(S - row_max) goes to shared memory, row_sum and O follow
//   [A1.10]     O = O + P V. A warp takes all rows and every kWarps-th block of 16 columns
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   as flash_decode, with tiles of kBlockM rows.
// Block:  8 warps.
// Shared: of 8-bit caches a tile of K and one of V widened, of latents one for both; Q tile, kBlockM x kHeadDim;
//         kStages tiles of the cache, kBlockN x kHeadDim; P; parts of S; row statistics.
//
// Assumes: head dims are at most kHeadDim and kHeadDimV, of latents kHeadDim and at most kHeadDimV, whose v is their
//          k; rows of q, o and the cache start on 16-byte boundaries, last axes contiguous. Pages of any size: every
//          row of a step looks up its own.
// Not here: masks, bias, dropout; spans over latents; new keys and rotation (flash_append), splits brought together
//           (flash_combine).
#include "backward/gradient_sums.cuh"
#include "backward/operand.cuh"
#include "cache/rows.cuh"
#include "cache/stored.cuh"
#include "tile/score_tile.cuh"
#include "tile/shared_softmax.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_LATENT 1
#define CF_HEAD_DIM 576
#define CF_HEAD_DIM_V 512
#define CF_BLOCK_M 16
#define CF_BLOCK_N 32
#define CF_KEY_WARPS 4
#define CF_STAGES 2
#define CF_THREADS 256
#define CF_SHARED_BYTES 96128
#endif
#if !defined(CF_PASS)
#define CF_PASS same
#endif
using Element = CF_ELEMENT;
constexpr bool kLatent = CF_LATENT;            // values are the first columns of keys
constexpr Stored kStored = Stored::CF_PASS;    // what the cache holds
constexpr bool kWidened = kStored != Stored::same;
constexpr int kThreads = CF_THREADS, kWarps = kThreads / 32, kStages = CF_STAGES;
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kHeadDim = CF_HEAD_DIM, kHeadDimV = CF_HEAD_DIM_V;
constexpr int kRowWarps = kBlockM / 16, kKeyWarps = CF_KEY_WARPS,
              kDepthWarps = kWarps / kRowWarps / kKeyWarps;
constexpr int kWarpKeys = kBlockN / kKeyWarps, kN = kWarpKeys / 8, kM = kBlockM / 16;
constexpr int kNO = kHeadDimV / 8 / kWarps, kDepthSteps = kHeadDim / 16 / kDepthWarps;
constexpr int kTiles = kLatent ? 1 : 2;    // of the ring, in a step
static_assert(kRowWarps * kKeyWarps * kDepthWarps == kWarps && kN >= 1);
static_assert(kDepthSteps * kDepthWarps * 16 == kHeadDim && kStages > kTiles);
static_assert(kLatent || kHeadDim == kHeadDimV);

using Product = Math<Element, 1, false>;
using QTile = Tile<Element, kBlockM, kHeadDim>;
using KeyTile = Tile<Element, kBlockN, kHeadDim>;
using StoredTile = Tile<Select<kWidened, uint8_t, Element>::Type, kBlockN, kHeadDim>;
using WeightTile = Tile<Element, kBlockM, kBlockN>;
using Softmax = SharedSoftmax<Product, kKeyWarps, kBlockM>;
// The first columns of a tile of keys; or all, where values have tiles of their own.
struct ValueTile {
    using Element = ::Element;
    enum : int {    // why not static members: as in tile.cuh
        kRows = kBlockN,
        kColumns = kHeadDimV,
        kChunkElements = 8,
        kChunks = kColumns / 8,
        kPitch = KeyTile::kPitch,
        kSwizzledChunks = KeyTile::kSwizzledChunks
    };
    CF_DEVICE static constexpr int swizzle(int row) { return KeyTile::swizzle(row); }
    CF_DEVICE static constexpr int offset(int row, int chunk) { return KeyTile::offset(row, chunk); }
};
// The tiles of a step, widened.
template <bool> struct Widened {
    KeyTile wide[kTiles];
    CF_DEVICE uint32_t at(int which) const { return smem_addr(wide[which].data); }
};
template <> struct Widened<false> {
    CF_DEVICE uint32_t at(int) const { return 0; }
};
// What the main loop seldom needs, or only the epilogue.
struct Saved {
    RowScore scores[kBlockM];
    RowBlock block;
};
struct SharedStorage : Widened<kWidened> {
    QTile q;
    StoredTile ring[kStages];
    WeightTile p;
    float4 parts[larger(kDepthWarps - 1, 1)][kDepthWarps > 1 ? kRowWarps * kKeyWarps : 1][kN][32];
    Softmax::Storage softmax;             // at the end its factors are 1 / row_sum
    uint8_t nowhere[kStages][kBlockN];    // rows of a tile whose page does not lie in the cache
    alignas(128) Saved saved;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// What a warp takes of S: 16 rows, kWarpKeys keys, one part of the features; and a thread of that.
struct Place {
    int row_warp, key_warp, depth_warp, lane;

    CF_DEVICE Place()
        : row_warp(threadIdx.x / 32 % kRowWarps), key_warp(threadIdx.x / 32 / kRowWarps % kKeyWarps),
          depth_warp(threadIdx.x / 32 / (kRowWarps * kKeyWarps)), lane(threadIdx.x % 32) {}
    CF_DEVICE int row(int half) const { return 16 * row_warp + 8 * half + lane / 4; }
    CF_DEVICE int first_column() const { return kWarpKeys * key_warp + 2 * (lane % 4); }
};

// [D3] The tiles of all steps, which come into the ring one after the other. Threads copy chunks of one row.
// layout: kRowThreads neighbouring threads copy neighbouring chunks of a row, each every kRowThreads-th. The last
// turn over a row of 36 chunks, a latent of 8 bits, is of four threads.
constexpr bool kEven = StoredTile::kChunks % 8 == 0;
constexpr int kRowThreads = (StoredTile::kChunks % 16 == 0 || !kEven) && kBlockN <= kThreads / 16 ? 16 : 8;
constexpr int kRowCopies = (StoredTile::kChunks + kRowThreads - 1) / kRowThreads;
static_assert(kBlockN <= kThreads / kRowThreads && kRowThreads % StoredTile::kSwizzledChunks == 0);
struct CopiedTiles {
    const DecodeParams& p;
    SharedStorage& s;
    const RowBlock& block;
    const KeySteps& steps;
    const int32_t seqlen_k;
    const int32_t copied_row = threadIdx.x / kRowThreads, copied_chunk = threadIdx.x % kRowThreads;
    const bool copies = kBlockN == kThreads / kRowThreads || copied_row < kBlockN;
    const uint32_t ring = smem_addr(s.ring[0].data);
    const uint32_t copied_to = ring + StoredTile::offset(copied_row, copied_chunk);
    int32_t slot = slot_at(0);    // of this thread's row of the tile to be sent for next

    // Sends for a tile; a group of copies is one tile, empty ones included.
    CF_DEVICE void start(int32_t tile) {
        const int32_t step = tile / kTiles, stage = tile % kStages;
        const bool values = tile % kTiles;
        if (step < steps.count) {
            if (copies) copy(step, stage, values);
            // why a step early: an entry of the table arrives while the products run.
            if (kLatent || values) slot = slot_at(step + 1);
        }
        cp_async_commit();
    }
    // Where products find a tile that has come. why no barrier before it is widened: a thread does that to what it
    // has copied itself.
    CF_DEVICE uint32_t take(int32_t tile) const {
        const uint32_t stored = ring + tile % kStages * StoredTile::kBytes;
        if constexpr (kWidened) {
            const uint32_t to = s.at(tile % kTiles);
            CF_UNROLL
            for (int i = 0; i < kRowCopies; i++) {
                const int chunk = copied_chunk + i * kRowThreads;
                if (copies && (kEven || chunk < StoredTile::kChunks))
                    widen_chunk<kStored, StoredTile, KeyTile>(to, stored, copied_row, chunk);
            }
            return to;
        } else return stored;
    }

  private:
    CF_DEVICE int32_t key_of(int32_t step) const { return (steps.first + step) * kBlockN + copied_row; }
    CF_DEVICE int32_t slot_at(int32_t step) const {
        const int32_t key = key_of(step);
        return copies && key < seqlen_k ? slot_of<true>(p.cache, block.batch, key) : -1;
    }
    CF_DEVICE void copy(int32_t step, int32_t stage, bool values) {
        using Number = StoredTile::Element;
        const Tensor& cache = values ? p.cache.v : p.cache.k;
        const int32_t columns = values ? p.shape.head_dim_v : p.shape.head_dim;
        const int bytes = slot < 0 ? 0 : kLatent ? 16 : columns * int(sizeof(Number)) - 16 * copied_chunk;
        const Number* from = head_rows<const Number>(cache, larger(slot, 0), block.kv_head,
                                                     row_in_slot<true>(p.cache, key_of(step))) +
                             16 / sizeof(Number) * copied_chunk;
        if (bytes <= 0) from = static_cast<const Number*>(cache.data);
        const uint32_t to = copied_to + stage * StoredTile::kBytes;
        CF_UNROLL
        for (int i = 0; i < kRowCopies; i++) {
            if (!kEven && copied_chunk + i * kRowThreads >= StoredTile::kChunks) break;
            const int part = kLatent ? bytes : larger(0, smaller(16, bytes - i * kRowThreads * 16));
            const int further = part == 0 ? 0 : i * kRowThreads * 16 / int(sizeof(Number));
            cp_async16_part(to + i * kRowThreads * 16, from + further, part);
        }
        if (copied_chunk == 0) s.nowhere[stage][copied_row] = slot < 0;
    }
};

// S of a warp over its part of the features.
CF_DEVICE void multiply_by_keys(float (&s)[1][kN][4], uint32_t q, uint32_t keys, int depth_warp) {
    if constexpr (kDepthWarps == 1) {
        multiply<Product, kDepthSteps>(s, RowsAsA<QTile>(q, 0), RowsAsB<KeyTile>(keys, 0));
    } else {
        // why two sums: of one n8 each product waits for the one before.
        float odd[1][kN][4] = {};
        CF_UNROLL
        for (int i = 0; i < kDepthSteps; i++) {
            RowsAsA<QTile> a(q, 0);
            RowsAsB<KeyTile> b(keys, 0);
            // why not once: the first step is no multiple of 4, and its place an exclusive or of low bits.
            a.reader.begin_at(depth_warp * kDepthSteps + i), b.reader.begin_at(depth_warp * kDepthSteps + i);
            multiply<Product, 1>(i % 2 ? odd : s, a, b);
        }
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int e = 0; e < 4; e++) s[0][n][e] += odd[0][n][e];
        }
    }
}

// Warps that take the same part of S over other features add theirs to that of the first one.
CF_DEVICE void add_parts(float (&rS)[1][kN][4], SharedStorage& s, const Place& at) {
    const int place = at.row_warp + kRowWarps * at.key_warp;
    if (at.depth_warp > 0) {
        CF_UNROLL
        for (int n = 0; n < kN; n++)
            st_shared(smem_addr(&s.parts[at.depth_warp - 1][place][n][at.lane]),
                      float4{rS[0][n][0], rS[0][n][1], rS[0][n][2], rS[0][n][3]});
    }
    // sync: the other parts of the sums are visible.
    __syncthreads();
    if (at.depth_warp == 0) {
        CF_UNROLL
        for (int i = 0; i < kDepthWarps - 1; i++) {
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                const float4 x = ld_shared<float4>(smem_addr(&s.parts[i][place][n][at.lane]));
                rS[0][n][0] += x.x, rS[0][n][1] += x.y, rS[0][n][2] += x.z, rS[0][n][3] += x.w;
            }
        }
    }
}

// Products become scores, -inf where a row does not see a key. key: the first of the step; cut: whether the band hides
// any of its keys from a row.
struct ScoreRule {
    const DecodeParams& p;
    const SharedStorage& s;
    const Sequence& sequence;
    const float scale, softcap;

    CF_DEVICE void finish(float (&rS)[1][kN][4], const Place& at, int stage, int32_t key, bool cut) const {
        const int32_t first = at.first_column();
        const bool drafts =
            !kLatent && p.score.spans.data && key + kBlockN > sequence.seqlen_k - sequence.seqlen_q;
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const RowScore& row = s.saved.scores[at.row(half)];
            CF_UNROLL
            for (int i = 0; i < 2 * kN; i++) {
                float& x = rS[0][i / 2][2 * half + i % 2];
                const int32_t column = first + i / 2 * 8 + i % 2;
                x *= scale;
                if (softcap != 0) x = softcap * bounded_tanh<false>(x / softcap);
                if (p.score.alibi_slopes)
                    x = fmaf(-row.slope, fabsf(static_cast<float>(row.position - key - column)), x);
                if (p.cache.table && s.nowhere[stage][column]) x = -kInfinity;
            }
            if (cut) mask_row(rS, 0, half, row.first_key - key - first, row.end_key - key - first);
        }
        if (drafts) mask_drafts(rS, p.score, sequence, s.saved.block, 16 * at.row_warp, key + first);
    }
};

// O of the rows of a block times their factors: of its part of the keys as floats, or whole.
CF_DEVICE void store_o(const float (&rO)[kM][kNO][4], const DecodeParams& p, const SharedStorage& s,
                       const RowBlock& block, bool parted) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int i = 0; i < 2 * kM; i++) {
        const int m = i / 2, half = i % 2, row = 16 * m + 8 * half + g;
        if (row >= block.rows) continue;
        const float factor = s.softmax.factor[row];
        const Row at = block.row(row);
        CF_UNROLL
        for (int n = 0; n < kNO; n++) {
            const int column = grouped_column<kWarps>(n, warp) + 2 * t;
            if (column >= p.shape.head_dim_v) continue;
            const float x = rO[m][n][2 * half] * factor, y = rO[m][n][2 * half + 1] * factor;
            if (parted)
                st_global(reinterpret_cast<float2*>(
                              p.partial_o + block.part_row(p.shape, at) * p.shape.head_dim_v + column),
                          float2{x, y});
            else
                st_global(reinterpret_cast<uint32_t*>(
                              head_rows<Element>(p.o, block.batch, at.head, at.query) + column),
                          pack<Element>(x, y));
        }
    }
}

CF_DEVICE void flash_decode_wide(const DecodeParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const Place place;

    // [D1]
    const RowBlock block = RowBlock::of(blockIdx.x, p.shape, p.splits, kBlockM);

    // [D2]
    const Sequence sequence = sequence_in_cache(p.cache, p.shape, block.batch);
    const Band band(p.score, sequence);
    const int32_t first_query = block.first_query(), last_query = block.last_query();
    // why: a part of fewer rings costs merging and gains nothing.
    const KeySteps steps = KeySteps::of<kBlockN>(block, band, p.splits, 2 * kStages);
    const bool parted = p.partial_o != nullptr;
    if (parted && steps.count == 0) {
        store_empty_part(p, block);
        return;
    }
    load_queries<Element, kThreads>(s.q, p, block);
    if (threadIdx.x < kBlockM)
        s.saved.scores[threadIdx.x] = block.score(threadIdx.x, p.score, sequence, band);
    if (threadIdx.x == 0) s.saved.block = block;

    // [D3]
    CopiedTiles tiles{p, s, block, steps, sequence.seqlen_k};
    CF_UNROLL
    for (int i = 0; i < kStages - 1; i++) tiles.start(i);

    float scale = static_cast<float>(p.score.scale);
    if constexpr (kWidened)
        scale *= kUnit<kStored, Element> * k_scale_of<float>(p.cache, block.batch, block.kv_head);
    const ScoreRule score{p, s, sequence, scale, static_cast<float>(p.score.softcap)};
    const int32_t whole_first = band.first_key(last_query), whole_end = band.end_key(first_query);
    const AccumulatorWriter<WeightTile> p_writer(smem_addr(s.p.data), 16 * place.row_warp,
                                                 kN * place.key_warp);
    const auto put_p = [&](float left, float right, int n, int half) {
        p_writer.store(left, right, 0, n, half, 0);
    };
    float rO[kM][kNO][4] = {};
    Softmax softmax{s.softmax, place.key_warp, 16 * place.row_warp};
#pragma unroll 1
    for (int32_t step = 0; step < steps.count; step++) {
        const int32_t tile = step * kTiles, key = (steps.first + step) * kBlockN;
        cp_async_wait<kStages - 2>();
        if constexpr (kLatent && kWidened) {
            // sync: all are done with values of the step before, over which these keys are widened.
            __syncthreads();
        }
        const uint32_t sK = tiles.take(tile);
        // sync: keys of this step are visible to all, in the first step Q and the saved values too; all are done
        // with the tile before, whose stage is filled next.
        __syncthreads();
        tiles.start(tile + kStages - 1);

        // [A1.8]
        float rS[1][kN][4] = {};
        multiply_by_keys(rS, smem_addr(s.q.data) + 16 * place.row_warp * QTile::kPitch,
                         sK + kWarpKeys * place.key_warp * KeyTile::kPitch, place.depth_warp);
        if constexpr (kDepthWarps > 1) add_parts(rS, s, place);
        if (place.depth_warp == 0) {
            score.finish(rS, place, tile % kStages, key, key < whole_first || key + kBlockN > whole_end);
            softmax.share_max(rS);
        }
        // sync: maxima of the warps that share rows are visible.
        __syncthreads();
        // [A1.9]
        if (place.depth_warp == 0) softmax.make_weights(rS, kLog2e, put_p);
        uint32_t sV = sK;
        if constexpr (!kLatent) {
            cp_async_wait<kStages - 2>();
            sV = tiles.take(tile + 1);
        }
        // sync: P and the factors on O are visible, and values of this step; all are done with its keys.
        __syncthreads();
        if constexpr (!kLatent) tiles.start(tile + kStages);
        // [A1.10]
        softmax.rescale(rO);
        CF_UNROLL
        for (int i = 0; i < kBlockN / 16; i++) {
            RowsAsA<WeightTile> weights(smem_addr(s.p.data), 0);
            weights.reader.begin_at(i);
            multiply<Product, 1>(
                rO, weights,
                ColumnsAsB<ValueTile, kWarps>(sV + i * 16 * ValueTile::kPitch, threadIdx.x / 32));
        }
    }

    // Nobody reads maxima any more: P of the last step, which came after them, has been waited for.
    if (place.depth_warp == 0) softmax.share_sums();
    // sync: row_sum of every warp, and the saved values if there was no step, are visible.
    __syncthreads();

    // [A1.12] [A1.13]
    const RowBlock saved = s.saved.block;
    float v_scale = 1;
    if constexpr (kWidened)
        v_scale = kUnit<kStored, Element> * v_scale_of<float>(p.cache, saved.batch, saved.kv_head);
    if (place.depth_warp == 0 && place.key_warp == 0 && place.lane % 4 == 0) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = place.row(half);
            const Row at = saved.row(smaller(row, saved.rows - 1));
            // why: with splits the sink is one part's, and flash_combine adds it.
            const float sink = p.score.sinks && !parted
                                   ? static_cast<const float*>(p.score.sinks)[at.head * p.score.sinks_head]
                                   : -kInfinity;
            const FinalRow<float> done = softmax.finalize(half, 1.0f, sink);
            s.softmax.factor[row] = done.normaliser * v_scale;
            if (row >= saved.rows) continue;
            if (parted) st_global(p.partial_lse + saved.part_row(p.shape, at), done.lse);
            else if (p.lse.data) st_global(head_rows<float>(p.lse, saved.batch, at.head, at.query), done.lse);
        }
    }
    // sync: factors of all rows are visible.
    __syncthreads();
    store_o(rO, p, s, saved, parted);
}

CF_KERNEL(DecodeParams, kThreads, kBlockM == 16 ? 2 : 1, flash_decode_wide)
