// Attention forward on mma.sync tensor cores, sm_75 to sm_120: FlashAttention-2 with K and V streamed through
// a ring of tiles.
// Design note: docs/kernels/forward.md.
//
// Source: A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1. Erratum: its line 10 prints an inverse
// on diag(e^(m_old - m_new)) that must not be there (Dao-AILab/flash-attention issue 991).
//   [A1.4]  a block owns the rows Q_i of one head, a warp 16 kM of them          (lines 3 and 4)
//   [A1.5]  O = 0, row_sum = 0, row_max = -inf; reproducible: for each chunk of keys
//   [A1.6]  for each block of keys that the band of the query tile reaches: those that need masks, then the
//           others, or all from the last to the first, or, where kMask is any, from the first to the last
//   [A1.8]  S = score(Q_i K_j^T), -inf where a pair is outside the band or masked
//   [A1.9]  row_max rises; P = e^(S - row_max); row_sum = e^(old_max - row_max) row_sum + rowsum(P);
//           O = e^(old_max - row_max) O
//   [A1.10] O = O + dropout(P) V_j
//   [D4]    O, row_sum and row_max of a chunk are merged with those of the chunks before it
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys              (lines 13 to 15)
//
// Grid:   x = ceil(seqlen_q / kBlockM) * heads_q * batch, in the order of lpt_query_tile: longest first,
//         heads in sections of L2 size. Packed: seqlen_q is the longest; blocks past the end of their
//         sequence return. Times chunks, where each is a block's: the outermost.
// Block:  kWarps warps, each with rows of its own from Q K^T to the end: no data passes between warps but K
//         and V.
// Shared: Q tile (O is staged in it), kBlockM x kHeadDim elements; then kSlots tiles of K or V, kBlockN x
//         kHeadDim elements; 128 bytes.
//
// Assumes: last axes of q, k, v, o contiguous; seqlens below 2^30; row strides below 2^31 bytes; scale > 0
//         unless kMask is any.
// Not here: merging the chunks of different blocks (flash_combine_chunks), queries of a group of heads in one tile
//         (flash_decode).
#include "tile/chunk.cuh"
#include "tile/epilogue.cuh"
#include "tile/ring.cuh"
#include "tile/score_tile.cuh"
#include "tile/online_softmax.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_TURING 0
#define CF_HEAD_DIM 64
#define CF_HEAD_DIM_V 64
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_THREADS 128
#define CF_SLOTS 2
#define CF_Q_IN_REGISTERS 1
#define CF_LOOPS 1
#define CF_CHUNKS 1
#define CF_MIN_BLOCKS 2
#define CF_SHARED_BYTES 24704
#endif
// Options that change scores. band: the end of the keys, causal, window. any: all of them, tested at run time.
// why no kind without a band: its loop would have the same instructions.
enum class Mask { band, any };
using Element = CF_ELEMENT;
constexpr Mask kMask = Mask::CF_MASK;
constexpr bool kTuring = CF_TURING;    // no cp.async, no m16n8k16
constexpr bool kQInRegisters = CF_Q_IN_REGISTERS;
// Whether keys may come in chunks, each a block's, and whether a block may have several.
constexpr bool kParts = kMask == Mask::any && CF_CHUNKS, kChunks = kParts && CF_CHUNKS == 1;
constexpr int kLoops = CF_LOOPS;            // 2: blocks of keys that need masks have one of their own
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kSlots = CF_SLOTS;
constexpr int kWarpRows = kBlockM / (kThreads / 32), kM = kWarpRows / 16, kN = kBlockN / 8;
constexpr uint32_t kL2SectionBytes = 16 << 20;    // of K and V that should stay in L2
static_assert(kWarpRows * (kThreads / 32) == kBlockM && kWarpRows % 16 == 0,
              "a warp owns whole 16-row blocks");
static_assert(kBlockN % 16 == 0 && kChunkKeys % kBlockN == 0, "keys come in blocks of 16, chunks in blocks");
static_assert(kHeadDimV <= kHeadDim, "O leaves through the tile of Q");

using Product = Math<Element, CF_PRODUCTS, kTuring>;
using QTile = Tile<Element, kBlockM, kHeadDim>;
using KTile = Tile<Element, kBlockN, kHeadDim>;
using VTile = Tile<Element, kBlockN, kHeadDimV>;
using Ring = KeyValueRing<KTile, VTile, kThreads, kSlots, kTuring>;
using QLoader = TileLoader<QTile, kThreads>;

// What the main loop seldom needs, or only the epilogue. why: in registers it would make the main loop spill.
struct Saved {
    int64_t first_q;                      // row of q of the tile's first query
    int32_t batch, head, queries;         // that exist in the tile
    int32_t chunk;                        // if each is a block's; else 0
    int32_t first_query, first_key;       // positions of the tile and of block 0 of keys
    int32_t blocks;                       // of keys
    int32_t whole_first, whole_blocks;    // the first of those in which every pair counts, how many there are
    NarrowBand band;
};
struct SharedStorage {
    QTile q;
    Ring::Storage kv;
    alignas(128) Saved saved;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// The first row of this warp in the tile.
CF_DEVICE int32_t warp_row() { return static_cast<int32_t>(threadIdx.x) / 32 * kWarpRows; }

// The block of keys of a step, which counts down to 0, where blocks that need masks come first: those before
// the first whole one, and, after a jump, those behind the last.
CF_DEVICE int32_t masked_first(int32_t step, int32_t whole_first, int32_t blocks) {
    const int32_t block = step + whole_first;
    return block < blocks ? block : block - blocks;
}

CF_DEVICE void flash_forward(const ForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();

    // [A1.4]
    const int32_t tiles = cdiv(p.shape.seqlen_q, kBlockM);
    uint32_t block_of_chunk = blockIdx.x;
    int32_t chunk = 0;
    const bool parted = kParts && p.chunks > 1;
    if (parted) {
        const uint32_t blocks_of_chunk = gridDim.x / p.chunks;
        chunk = block_of_chunk / blocks_of_chunk, block_of_chunk -= chunk * blocks_of_chunk;
    }
    const TileCoord work = lpt_query_tile(block_of_chunk, tiles, p.shape, p.shape.heads_q,
                                          kL2SectionBytes / uint32_t(sizeof(Element)));
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t head = work.head, kv_head = head / (p.shape.heads_q / p.shape.heads_k);
    const int32_t m_first = work.tile * kBlockM, m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const GlobalRows<Element> gQ{head_rows<Element>(p.q, work.batch, head, sequence.first_q + m_first),
                                 p.q.row, sequence.seqlen_q - m_first, p.shape.head_dim};

    // Blocks of keys [first, first + blocks) hold a key for a query of the tile. why: after this they count
    // from first, which then needs no register.
    const Band band(p.score, sequence);
    Range keys = band.keys_of(m_first, m_end);
    if constexpr (kMask == Mask::any)
        keys = HeadSpans(p.score, sequence, head).narrowed(keys, m_first, m_end, true);
    if (parted) {
        keys = {larger(keys.first, chunk * kChunkKeys), smaller(keys.end, (chunk + 1) * kChunkKeys)};
        if (keys.first >= keys.end) keys = {0, 0};
    }
    const int32_t first = keys.first / kBlockN, blocks = cdiv(keys.end, kBlockN) - first;
    const int32_t first_key = first * kBlockN, keys_left = sequence.seqlen_k - first_key;
    const int64_t first_k = sequence.first_k + first_key;
    const GlobalRows<Element> gK{head_rows<Element>(p.k, work.batch, kv_head, first_k), p.k.row, keys_left,
                                 p.shape.head_dim};
    const GlobalRows<Element> gV{head_rows<Element>(p.v, work.batch, kv_head, first_k), p.v.row, keys_left,
                                 p.shape.head_dim_v};
    int32_t whole_first = smaller(cdiv(band.first_key(m_end - 1), kBlockN) - first, blocks);
    int32_t whole_end = band.end_key(m_first) / kBlockN - first;
    // Spans may leave less than the band.
    if constexpr (kMask == Mask::any)
        whole_first = larger(whole_first, 0), whole_end = smaller(whole_end, blocks);
    if (threadIdx.x == 0)
        s.saved = {sequence.first_q + m_first,
                   work.batch,
                   head,
                   m_end - m_first,
                   chunk,
                   m_first,
                   first_key,
                   blocks,
                   whole_first,
                   larger(whole_end - whole_first, 0),
                   NarrowBand(band)};

    // [A1.5]
    float rO[kM][kHeadDimV / 8][4] = {};
    OnlineSoftmax<Product, kM> softmax;
    const TileScore<Product> score(p.score, sequence, head);
    const Dropout dropout(p.score, work.batch, head);
    // Of this warp, in memory.
    const auto chunk_rows = [&] {
        const Saved& at = s.saved;
        return ChunkRows(p, at.chunk * p.shape.batch + at.batch, at.head, at.first_q + warp_row(),
                         at.queries - warp_row());
    };
    const float unit_log2 =
        kMask == Mask::any ? kLog2e : static_cast<float>(p.score.scale * 1.4426950408889634);

    if (blocks > 0) {
        Ring ring(gK, gV, s.kv);
        const QLoader q_loader(gQ);
        const uint32_t sQ = smem_addr(s.q.data);
        if constexpr (kTuring) {
            uint4 waiting[QLoader::kCopies];
            q_loader.fetch(waiting, 0);
            q_loader.store(waiting, sQ);
        } else {
            q_loader.start(sQ, 0);
            cp_async_commit();
        }
        // why ascending: chunks are merged from left to right.
        const int32_t last = blocks - 1;
        const auto in_order = [=](int32_t n) { return kMask == Mask::any ? last - n : n; };
        ring.begin(last, [&](int32_t n) {
            return kLoops == 2 ? masked_first(n, whole_first, blocks) : in_order(n);
        });

        const SharedRows<Product, QTile> shared_q(sQ, warp_row());
        RegisterRows<kM, kQInRegisters ? kHeadDim / Product::kDepth : 1> register_q;
        if constexpr (kQInRegisters) {
            if constexpr (!kTuring) cp_async_wait<Ring::kAhead>();
            // sync: Q is in shared memory, copied by all threads (read from there, it is covered by the first
            // ring.next); `saved` is visible.
            __syncthreads();
            register_q.fill(shared_q);
        } else if constexpr (kLoops == 2 || kChunks) {
            // sync: `saved` is visible.
            __syncthreads();
        }

        const Saved& saved = s.saved;
        // The block of keys place(step), which is masked if needs_mask(of it).
        const auto attend = [&](int32_t step, auto place, auto needs_mask) {
            // [A1.8]
            float rS[kM][kN][4] = {};
            const uint32_t sK = ring.template next<Stream::key>(step, place);
            bool reached = true;
            if constexpr (kMask == Mask::any) {
                const int32_t query = saved.first_query, key = saved.first_key + place(step) * kBlockN;
                reached = score.reach(query, query + kBlockM, key, key + kBlockN);
            }
            if (reached) {
                if constexpr (kQInRegisters) multiply_by_rows<Product, KTile>(rS, register_q, sK);
                else multiply_by_rows<Product, KTile>(rS, SharedRows<Product, QTile>(sQ, warp_row()), sK);
            }
            const uint32_t sV = ring.template next<Stream::value>(step, place);
            if (!reached) return;

            const int32_t block = place(step);
            const Positions<false> at(saved.first_query + warp_row(), saved.first_key + block * kBlockN);
            if constexpr (kMask == Mask::any) {
                score.apply_softcap(rS);
                score.apply_score_mod(rS, at);
                score.apply_mask(rS, at);
            }
            if (needs_mask(block)) mask_band(rS, at, saved.band);
            // [A1.9]
            softmax.softmax_rescale_o(rS, rO, unit_log2);
            // [A1.10]
            if constexpr (kMask == Mask::any)
                if (dropout.active()) drop_weights(rS, at, dropout);
            multiply_by_columns<Product, VTile>(rO, rS, sV);
        };

        // [A1.6]
        int32_t step = blocks - 1;
        if constexpr (kLoops == 2) {
            const auto masked = [&](int32_t n) { return masked_first(n, saved.whole_first, saved.blocks); };
            const auto whole = [&](int32_t n) { return n + saved.whole_first; };
#pragma unroll 1
            for (; step >= saved.whole_blocks; step--) attend(step, masked, [](int32_t) { return true; });
#pragma unroll 1
            for (; step >= 0; step--) attend(step, whole, [](int32_t) { return false; });
        } else {
            // why: the branch is the same for the whole block of threads and stands between the products,
            // where a barrier splits the code anyway.
            const auto needs_mask = [&](int32_t block) {
                return uint32_t(block - saved.whole_first) >= uint32_t(saved.whole_blocks);
            };
            if constexpr (kChunks) {
                const bool chunked = p.chunk_o.data != nullptr;
                for (bool first_chunk = true;; first_chunk = false) {
                    const int32_t key = saved.first_key + in_order(step) * kBlockN;
                    const int32_t left = (kChunkKeys - key % kChunkKeys) / kBlockN;
                    const int32_t stop = chunked ? larger(step - left, -1) : -1;
                    for (; step > stop; step--) attend(step, in_order, needs_mask);
                    if (!chunked) break;
                    // [D4]
                    softmax.quad_reduce_sums();
                    if (!first_chunk) chunk_rows().merge_with(rO, softmax);
                    if (step < 0) break;
                    chunk_rows().store(rO, softmax);
                    softmax = OnlineSoftmax<Product, kM>();
                    each_element(rO, [](float& x) { x = 0; });
                }
            } else {
                for (; step >= 0; step--) attend(step, in_order, needs_mask);
            }
        }
    }

    // [A1.12] [A1.13]
    // sync: `saved` is visible, also to a block that had no keys and no other barrier; all are done with Q,
    // through which O leaves.
    __syncthreads();
    const Saved saved = s.saved;
    if (parted) {
        if constexpr (!kChunks) softmax.quad_reduce_sums();
        chunk_rows().store(rO, softmax);
        return;
    }
    const float unit = kMask == Mask::any ? 1.0f : static_cast<float>(p.score.scale);
    const float sink = p.score.sinks
                           ? static_cast<const float*>(p.score.sinks)[saved.head * p.score.sinks_head]
                           : -kInfinity;
    const float kept = p.score.dropout_threshold ? static_cast<float>(p.score.dropout_scale) : 1.0f;
    float* gLse = head_rows<float>(p.lse, saved.batch, saved.head, saved.first_q);
    float factor[kM][2];
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const auto row = softmax.finalize(m, half, unit, sink);
            const int32_t query = warp_row() + 16 * m + 8 * half + threadIdx.x % 32 / 4;
            factor[m][half] = row.normaliser * kept;
            if (p.lse.data && threadIdx.x % 4 == 0 && query < saved.queries)
                st_global(gLse + query * p.lse.row, row.lse);
        }
    }
    // why + 0: keys that other rows of the tile see add 0, which turns -0 into 0.
    if constexpr (kMask == Mask::any) each_element(rO, [](float& x) { x += 0.0f; });
    const bool floats = !Product::kFloat && p.float_o;
    const auto gO = rows_of_result<Element>(p.o, saved.batch, saved.head, saved.first_q + warp_row(),
                                            saved.queries - warp_row(), p.shape.head_dim_v, 0, floats);
    store_warp_rows<Product>(rO, factor, gO, smem_addr(s.q.data) + warp_row() * QTile::kPitch, floats);
}

CF_KERNEL(ForwardParams, kThreads, CF_MIN_BLOCKS, flash_forward)
