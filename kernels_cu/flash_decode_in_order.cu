// Flash decoding with the bits of flash_forward: attention of few queries over the long keys of a cache. A row has the same
// bits whether it is decoded alone or part of a prompt.
// Design note: docs/kernels/decode.md.
//
// Source: A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1, and what flash_forward says of it.
//   [D1]    the rows of a block: those of flash_decode
//   [D2]    the keys of a block: a chunk of those that the rows see, see tile/chunk.cuh
//   [A1.6]  in blocks of kBlockN, those of flash_forward, from the first to the last
//   [D3]    a warp has 16 keys of a block in S, and a part of the columns of O; between the two the warps exchange
//           their highest scores, and weights
//   [A1.8]      S = score(Q K^T), -inf where masked
//   [A1.9]      row_max rises; P = e^(S - row_max); row_sum and O follow
//   [A1.10]     O = O + P V, over the keys of a block as flash_forward does
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   that of flash_decode, with a split for each chunk of the capacity of the cache.
// Block:  kWarps warps.
// Shared: Q tile, kRows x kHeadDim elements; kStages tiles of K and of V, kBlockN x kHeadDim each; P in float, as lanes
//         hold it; the highest scores of each warp; what is saved. See SharedStorage.
//
// Assumes: what flash_decode does; keys as they are multiplied.
// Not here: masks, bias, dropout; new keys and rotation (flash_append), merging chunks (flash_combine_chunks).
#include "cache/rows.cuh"
#include "tile/chunk.cuh"
#include "tile/score_tile.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_TURING 0
#define CF_HEAD_DIM 128
#define CF_BLOCK_N 64
#define CF_THREADS 128
#define CF_STAGES 3
#define CF_MIN_BLOCKS 2
#define CF_SHARED_BYTES 107392
#endif
using Element = CF_ELEMENT;
constexpr bool kTuring = CF_TURING;      // no cp.async, no m16n8k16
constexpr int kHeadDim = CF_HEAD_DIM;    // the largest head dim, of q and k and of v
constexpr int kRows = 16, kBlockN = CF_BLOCK_N, kN = kBlockN / 8, kThreads = CF_THREADS, kStages = CF_STAGES;
constexpr int kWarps = kBlockN / kStepKeys, kColumns = kHeadDim / kWarps;    // kColumns: of a warp, of O
static_assert(kThreads == 32 * kWarps, "a warp has 16 keys of a block");
static_assert(kTuring ? kStages == 1 : kStages >= 2, "one block is read while others come");
static_assert(kChunkKeys % kBlockN == 0, "chunks come in blocks");

using Product = Math<Element, CF_PRODUCTS, kTuring>;
using QTile = Tile<Element, kRows, kHeadDim>;
using WarpTile = Tile<Element, kStepKeys, kHeadDim>;    // of 16 keys or values: those that a warp copies
using KeyTile = Tile<Element, kBlockN, kHeadDim>;
using Loader = WarpLoader<WarpTile, kTuring>;
// Where registers of Q, which are two after floats are split, and of O leave enough.
constexpr bool kQInRegisters = QTile::kPitch / 8 * Product::kParts + kColumns / 2 <= 128;

// What the main loop seldom needs, or only the epilogue.
struct Saved {
    RowScore scores[kRows];
    RowBlock block;
};
struct SharedStorage {
    QTile q;
    KeyTile k[kStages], v[kStages];
    alignas(128) float4 weights[kN][32];    // layout: four of an n8 column by lane, as mma.cuh has them
    float row_max[kRows][kWarps];
    alignas(128) Saved saved;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Copies of a warp: its 16 keys of each block, which lie in one page, and their values.
struct CopiedKeys {
    const DecodeParams& p;
    SharedStorage& s;
    const RowBlock& block;
    const int32_t seqlen_k, first, blocks;    // first: key of this warp in block 0
    const uint32_t own = threadIdx.x / 32 * WarpTile::kBytes;
    const uint32_t k_ring = smem_addr(s.k[0].data) + own, v_ring = smem_addr(s.v[0].data) + own;
    const Loader k{p.cache.k, block.kv_head, p.shape.head_dim},
        v{p.cache.v, block.kv_head, p.shape.head_dim_v};
    int32_t slot = slot_at(first);    // of the block to be sent for next
    uint32_t absent = 0;    // a bit for each, the last in bit 0: its keys of this warp are no slot's

    CF_DEVICE void start(int32_t i) {
        absent = absent << 1 | uint32_t(i < blocks && slot < 0);
        if (i < blocks) {
            const int32_t key = first + i * kBlockN, row = row_in_slot(p.cache, key);
            const uint32_t stage = i % kStages * KeyTile::kBytes;
            // why zeros for what is no slot's: others multiply its values by weights of 0.
            const int32_t left = slot < 0 ? 0 : seqlen_k - key, from = larger(slot, 0);
            k.copy(k_ring + stage, from, row, left);
            v.copy(v_ring + stage, from, row, left);
            slot = slot_at(key + kBlockN);
        }
        if constexpr (!kTuring) cp_async_commit();
    }
    // Of the block that is read.
    CF_DEVICE bool is_absent() const { return absent >> (kTuring ? 0 : kStages - 2) & 1; }

  private:
    CF_DEVICE int32_t slot_at(int32_t key) const {
        return key < seqlen_k ? slot_of(p.cache, block.batch, key) : -1;
    }
};

// Products of this warp's keys, from `key` on, become scores, -inf where a row does not see one. cut: the band hides some
// of them; absent: all are no slot's.
CF_DEVICE void finish_scores(float (&rS)[1][kStepKeys / 8][4], const TileScore<Product>& score,
                             const SharedStorage& s, bool alibi, int32_t key, bool cut, bool absent) {
    const int32_t first = key + threadIdx.x % 4 * 2;    // of column 0 of this thread
    score.apply_softcap(rS);
    const auto each_row = [&](auto act) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) act(half, s.saved.scores[threadIdx.x % 32 / 4 + 8 * half]);
    };
    if (alibi)
        each_row([&](int half, const RowScore& row) {
            score.add_alibi_row(rS, 0, half, row.slope, static_cast<float>(row.position - first));
        });
    if (cut || absent)
        each_row([&](int half, const RowScore& row) {
            mask_row(rS, 0, half, row.first_key - first, absent ? 0 : row.end_key - first);
        });
}

// The online softmax of rows of which every warp has its keys in S and its columns in O: maxima and weights go through
// shared memory, in two steps, each before a barrier of the block.
struct WarpsSoftmax : OnlineSoftmax<Product, 1> {
    SharedStorage& s;
    const int g = threadIdx.x % 32 / 4, lane = threadIdx.x % 32;
    const uint32_t own_max = opaque(smem_addr(&s.row_max[g][threadIdx.x / 32]));
    const uint32_t own_weights = opaque(smem_addr(&s.weights[kStepKeys / 8 * (threadIdx.x / 32)][lane]));
    float factor[2];    // that sums and O are waiting for

    CF_DEVICE explicit WarpsSoftmax(SharedStorage& storage) : s(storage) {}

    CF_DEVICE void share_max(const float (&rS)[1][kStepKeys / 8][4]) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const float highest = row_max_of(rS, 0, half);
            if (lane % 4 == 0) st_shared(own_max + 8 * half * int(sizeof(s.row_max[0])), highest);
        }
    }
    CF_DEVICE void share_weights(float (&rS)[1][kStepKeys / 8][4]) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            float highest = s.row_max[g + 8 * half][0];
            CF_UNROLL
            for (int w = 1; w < kWarps; w++) highest = fmaxf(highest, s.row_max[g + 8 * half][w]);
            const auto to = update_max(0, half, highest, kLog2e);
            scale_apply_exp2(rS, 0, half, kLog2e, to.reference);
            factor[half] = to.rescale;
        }
        CF_UNROLL
        for (int n = 0; n < kStepKeys / 8; n++)
            st_shared(own_weights + n * int(sizeof(s.weights[0])),
                      float4{rS[0][n][0], rS[0][n][1], rS[0][n][2], rS[0][n][3]});
    }
    // P of the whole block; sums and O follow.
    CF_DEVICE void load_weights(float (&rP)[1][kN][4], float (&rO)[1][kColumns / 8][4]) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            const float4 x = ld_shared<float4>(smem_addr(&s.weights[n][lane]));
            rP[0][n][0] = x.x, rP[0][n][1] = x.y, rP[0][n][2] = x.z, rP[0][n][3] = x.w;
        }
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            row_sum[0][half] = fmaf(row_sum[0][half], factor[half], sum_of(rP, 0, half));
            rescale_row(rO, 0, half, factor[half]);
        }
    }
};

// Calls act(column, values) for what a thread holds of one of its rows: neighbours, two or four of them.
template <class Act> CF_DEVICE void each_part(const float (&o)[1][kColumns / 8][4], int half, Act act) {
    CF_UNROLL
    for (int n = 0; n < kColumns / 8; n += Product::kFloat ? 4 : 1) {
        if constexpr (Product::kFloat) {
            CF_UNROLL
            for (int e = 2 * half; e < 2 * half + 2; e++)
                act(output_column<Product>(n, e),
                    float4{o[0][n][e], o[0][n + 1][e], o[0][n + 2][e], o[0][n + 3][e]});
        } else {
            act(output_column<Product>(n, 0), float2{o[0][n][2 * half], o[0][n][2 * half + 1]});
        }
    }
}
// Stores them times a factor.
CF_DEVICE void store_part(Element* to, float2 x, float by) {
    if constexpr (!Product::kFloat)
        st_global(reinterpret_cast<uint32_t*>(to), pack<Element>(x.x * by, x.y * by));
}
CF_DEVICE void store_part(Element* to, float4 x, float by) {
    st_global(reinterpret_cast<float4*>(to), float4{x.x * by, x.y * by, x.z * by, x.w * by});
}

// O and LSE; or, of a chunk, for flash_combine_chunks: O not normalised, and maxima and sums.
CF_DEVICE void store_o(const float (&rO)[1][kColumns / 8][4], const WarpsSoftmax& softmax,
                       const DecodeParams& p, const RowBlock& block, bool parted) {
    const int warp = threadIdx.x / 32;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int row = softmax.g + 8 * half;
        const Row at = block.row(smaller(row, block.rows - 1));
        const bool exists = row < block.rows, first_lane = exists && warp == 0 && threadIdx.x % 4 == 0;
        const auto each_column = [&](auto store) {
            each_part(rO, half, [&](int column, auto x) {
                column += warp * kColumns;
                if (exists && column < p.shape.head_dim_v) store(column, x);
            });
        };
        if (parted) {
            const int64_t index = block.part_row(p.shape, at);
            if (first_lane)
                st_global(reinterpret_cast<float2*>(p.partial_lse) + index,
                          float2{softmax.row_max[0][half], softmax.row_sum[0][half]});
            float* to = p.partial_o + index * p.shape.head_dim_v;
            each_column(
                [&](int column, auto x) { st_global(reinterpret_cast<decltype(x)*>(to + column), x); });
        } else {
            const float sink = p.score.sinks
                                   ? static_cast<const float*>(p.score.sinks)[at.head * p.score.sinks_head]
                                   : -kInfinity;
            const FinalRow<float> end = softmax.finalize(0, half, 1.0f, sink);
            Element* to = head_rows<Element>(p.o, block.batch, at.head, at.query);
            each_column([&](int column, auto x) { store_part(to + column, x, end.normaliser); });
            if (first_lane && p.lse.data)
                st_global(head_rows<float>(p.lse, block.batch, at.head, at.query), end.lse);
        }
    }
}

CF_DEVICE void flash_decode_in_order(const DecodeParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warp = threadIdx.x / 32;

    // [D1]
    const RowBlock block = RowBlock::of(blockIdx.x, p.shape, p.splits, kRows);

    // [D2]
    const Sequence sequence = sequence_in_cache(p.cache, p.shape, block.batch);
    const Band band(p.score, sequence);
    Range keys = band.keys_of(block.first_query(), block.last_query() + 1);
    keys = {larger(keys.first, block.split * kChunkKeys), smaller(keys.end, (block.split + 1) * kChunkKeys)};
    const bool parted = p.partial_o != nullptr;
    if (keys.first >= keys.end) {
        keys = {0, 0};
        if (parted) {
            const int32_t row = threadIdx.x;
            if (row < block.rows)
                st_global(reinterpret_cast<float2*>(p.partial_lse) + block.part_row(p.shape, block.row(row)),
                          float2{-kInfinity, 0});
            return;
        }
    }
    const int32_t first_key = keys.first / kBlockN * kBlockN, blocks = cdiv(keys.end - first_key, kBlockN);

    load_queries<Element, kThreads>(s.q, p, block);
    if (threadIdx.x < kRows) s.saved.scores[threadIdx.x] = block.score(threadIdx.x, p.score, sequence, band);
    if (threadIdx.x == 0) s.saved.block = block;

    CopiedKeys copies{p, s, block, sequence.seqlen_k, first_key + warp * kStepKeys, blocks};
    if constexpr (!kTuring) {
        CF_UNROLL
        for (int i = 0; i < kStages - 1; i++) copies.start(i);
    }

    // sync: Q and the saved values are in shared memory, written by all threads.
    __syncthreads();
    const SharedRows<Product, QTile> shared_q(smem_addr(s.q.data), 0);
    RegisterRows<1, kQInRegisters ? kHeadDim / Product::kDepth : 1> register_q;
    if constexpr (kQInRegisters) register_q.fill(shared_q);
    const TileScore<Product> score(p.score, sequence, block.kv_head * block.group);
    const int32_t whole_first = band.first_key(block.last_query()),
                  whole_end = band.end_key(block.first_query());

    float rO[1][kColumns / 8][4] = {};
    WarpsSoftmax softmax(s);
    // [A1.6]
#pragma unroll 1
    for (int32_t i = 0; i < blocks; i++) {
        const int32_t key = copies.first + i * kBlockN;
        const uint32_t stage = i % kStages * KeyTile::kBytes;
        if constexpr (kTuring) {
            // sync: all are done with the values of the block before.
            __syncthreads();
            copies.start(i);
        } else {
            cp_async_wait<kStages - 2>();
        }
        // sync: every lane's copies of these keys are visible to the warp.
        __syncwarp();

        // [A1.8]
        float rS[1][kStepKeys / 8][4] = {};
        const uint32_t sK = copies.k_ring + stage;
        if constexpr (kQInRegisters) multiply_by_rows<Product, WarpTile>(rS, register_q, sK);
        else multiply_by_rows<Product, WarpTile>(rS, shared_q, sK);
        finish_scores(rS, score, s, p.score.alibi_slopes, key,
                      key < whole_first || key + kStepKeys > whole_end, copies.is_absent());

        // [A1.9]
        softmax.share_max(rS);
        // sync: the highest scores of all warps are visible, and the values of this block, of which each thread has
        // waited for its own; all are done with the block before, whose stage is filled next, and its weights.
        __syncthreads();
        if constexpr (!kTuring) copies.start(i + kStages - 1);
        softmax.share_weights(rS);
        // sync: the weights of all warps are visible; all have read the highest scores.
        __syncthreads();
        float rP[1][kN][4];
        softmax.load_weights(rP, rO);
        // [A1.10]
        const uint32_t sV = smem_addr(s.v[0].data) + stage;
        if constexpr (Product::kFloat)
            multiply_by_columns<Product, KeyTile>(rO, rP, sV + warp * kColumns * sizeof(Element));
        else multiply_by_columns<Product, KeyTile>(rO, rP, sV, warp);
    }

    // [A1.12] [A1.13]
    const RowBlock saved = s.saved.block;
    if (parted) softmax.quad_reduce_sums();
    else each_element(rO, [](float& x) { x += 0.0f; });    // why: see flash_forward
    store_o(rO, softmax, p, saved, parted);
}

CF_KERNEL(DecodeParams, kThreads, CF_MIN_BLOCKS, flash_decode_in_order)
