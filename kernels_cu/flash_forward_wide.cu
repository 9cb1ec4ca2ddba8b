// Attention forward on mma.sync tensor cores for head dims above 256, sm_75 to sm_120: warps share rows.
// Design note: docs/kernels/wide.md.
//
// Source: A1, Algorithm 1, as flash_forward has it; tags and signs are explained there.
//   [A1.4]  a block owns the rows Q_i of one head
//   [A1.6]  for each block of keys that the band of the query tile reaches, from the last to the first
//   [A1.8]  S = score(Q_i K_j^T), -inf outside the band: a warp has 16 rows, and its share of the keys of the block
//   [A1.9]  row_max rises, P = e^(S - row_max); maxima, P and the factors on O go through shared memory
//   [A1.10] O = e^(old_max - row_max) O + P V_j: a warp has all rows, and every kWarps-th block of 16 columns
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   x = ceil(seqlen_q / kBlockM) * heads_q * batch, in the order of lpt_query_tile. Packed: seqlen_q is the
//         longest; blocks past the end of their sequence return.
// Block:  kRowWarps times kKeyWarps warps. One block per multiprocessor.
// Shared: what is not in registers of the Q tile; kSlots chunks, each of kKColumns columns of the K of a block or of
//         kVKeys rows of its V; P; row statistics; 128 bytes. O is staged in all but the last.
//
// Assumes: as flash_forward of kind band: last axes of q, k, v, o contiguous; seqlens below 2^30; row strides below
//         2^31 bytes; scale > 0.
// Not here: a mask that differs from query to query, bias, dropout, spans, one order of additions (simple_forward).
#include "backward/gradient_sums.cuh"
#include "backward/operand.cuh"
#include "tile/epilogue.cuh"
#include "tile/score_tile.cuh"
#include "tile/shared_softmax.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_TURING 0
#define CF_HEAD_DIM 512
#define CF_HEAD_DIM_V 512
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_THREADS 256
#define CF_SLOTS 2
#define CF_Q_STEPS 8
#define CF_K_COLUMNS 128
#define CF_SHARED_BYTES 91008
#endif
using Element = CF_ELEMENT;
constexpr bool kTuring = CF_TURING;         // no cp.async, no m16n8k16
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kSlots = CF_SLOTS;
constexpr int kQColumns =
    16 * CF_Q_STEPS;    // of Q in registers, the first ones; the rest is in shared memory
constexpr int kKColumns = CF_K_COLUMNS, kVKeys = 16;
constexpr int kWarps = kThreads / 32, kRowWarps = kBlockM / 16, kKeyWarps = kWarps / kRowWarps;
constexpr int kWarpKeys = kBlockN / kKeyWarps, kN = kWarpKeys / 8;
constexpr int kKChunks = kHeadDim / kKColumns, kVChunks = kBlockN / kVKeys, kSteps = kKColumns / 16;
constexpr int kM = kBlockM / 16, kNO = kHeadDimV / 8 / kWarps;
constexpr uint32_t kL2SectionBytes = 16 << 20;    // of K and V that should stay in L2
static_assert(kQColumns % kKColumns == 0 && kHeadDim % kKColumns == 0, "Q is in registers by whole chunks");
static_assert(kRowWarps * kKeyWarps == kWarps && kWarpKeys % 16 == 0 && kSlots >= 2);

static_assert(!kTuring || kSlots == 2, "one chunk is multiplied, the next waits in registers");

using Product = Math<Element, 1, kTuring>;
using QTile = Tile<Element, kBlockM, kHeadDim - kQColumns>;
using QPart =
    Tile<Element, kBlockM, kQColumns ? kQColumns : 64>;    // of registers; it comes through the ring
using KTile = Tile<Element, kBlockN, kKColumns>;
using VTile = Tile<Element, kVKeys, kHeadDimV>;
using PTile = Tile<Element, kBlockM, kBlockN>;
using OTile = Tile<Element, kBlockM, kHeadDimV>;
using Softmax = SharedSoftmax<Product, kKeyWarps, kBlockM>;
using RegisterQ = RegisterRows<1, kQColumns ? kQColumns / 16 : 1>;
constexpr int kSlotBytes = larger<int>(KTile::kBytes, VTile::kBytes);
static_assert(kQColumns == 0 || QPart::kBytes <= kSlots * kSlotBytes,
              "Q comes through the memory of the ring");

// What the main loop seldom needs, or only the epilogue. why: as in flash_forward.
struct Saved {
    int64_t first_q,
        offset;    // row of q of the tile's first query; from a query to the key of its own place
    int32_t batch, head, queries;         // that exist in the tile
    int32_t first_query, first_key;       // positions of the tile and of block 0 of keys
    int32_t whole_first, whole_blocks;    // the first block in which every pair counts, how many there are
    NarrowBand band;
};
struct SharedStorage {
    QTile q;
    alignas(128) unsigned char slots[kSlots][kSlotBytes];
    PTile p;
    Softmax::Storage softmax;
    alignas(128) Saved saved;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");
static_assert(OTile::kBytes <= QTile::kBytes + kSlots * kSlotBytes, "O is staged in Q and the ring");

// One operand's chunks: of columns (K) or of rows (V).
template <class T, bool kOfColumns>
struct Chunks {
    TileLoader<T, kThreads> loader;

    CF_DEVICE Chunks(const GlobalRows<Element>& from, int whole) : loader(with_tile_width(from, whole)) {
        loader.matrix.columns = from.columns;
    }
    CF_DEVICE void start(uint32_t to, int block, int chunk) const {
        of_chunk(chunk).start(to, first_row(block, chunk));
    }
    template <int kCopies> CF_DEVICE void fetch(uint4 (&waiting)[kCopies], int block, int chunk) const {
        of_chunk(chunk).fetch(waiting, first_row(block, chunk));
    }

  private:
    CF_DEVICE TileLoader<T, kThreads> of_chunk(int chunk) const {
        TileLoader<T, kThreads> at = loader;
        if constexpr (kOfColumns)
            at.matrix.data += chunk * T::kColumns, at.matrix.columns -= chunk * T::kColumns;
        return at;
    }
    CF_DEVICE static int first_row(int block, int chunk) {
        return block * kBlockN + (kOfColumns ? 0 : chunk * T::kRows);
    }
    // why: the loader takes the fast way where a matrix is as wide as its tile; here, where it is as wide as all chunks.
    CF_DEVICE static GlobalRows<Element> with_tile_width(GlobalRows<Element> from, int whole) {
        from.columns = from.columns == whole ? int(T::kColumns) : 0;
        return from;
    }
};

// The stream of chunks: those of K of a block, then those of V of the block, block after block, down to 0.
struct Ring {
    Chunks<KTile, true> k;
    Chunks<VTile, false> v;
    uint32_t base;
    uint32_t slot = 0;    // bytes to the next one
    uint4 waiting[kTuring ? kSlotBytes / 16 / kThreads : 1] = {};

    CF_DEVICE void begin(int block) {
        if constexpr (kTuring) {
            k.fetch(waiting, block, 0);
        } else {
            CF_UNROLL
            for (int i = 0; i < kSlots - 1; i++) start(block, i, i * kSlotBytes);
        }
    }
    CF_DEVICE void start(int block, int chunk, uint32_t to) const {
        if (block >= 0) {
            if (chunk < kKChunks) k.start(base + to, block, chunk);
            else v.start(base + to, block, chunk - kKChunks);
        }
        cp_async_commit();
    }
    // Chunk `chunk` of `block`, which has come; sends for the one kSlots - 1 later.
    CF_DEVICE uint32_t next(int block, int chunk) {
        const uint32_t now = slot;
        const uint32_t before = now == 0 ? (kSlots - 1) * kSlotBytes : now - kSlotBytes;
        slot = now == (kSlots - 1) * kSlotBytes ? 0 : now + kSlotBytes;
        if constexpr (!kTuring) {
            cp_async_wait<kSlots - 2>();
        } else {
            // All are done with what was in the slot since the barrier before.
            if (chunk < kKChunks) k.loader.store(waiting, base + now);
            else v.loader.store(waiting, base + now);
        }
        // sync: the chunk is visible, and so are P and the factors; all are done with the chunk before.
        __syncthreads();
        int later = chunk + kSlots - 1;
        if (later >= kKChunks + kVChunks) later -= kKChunks + kVChunks, block--;
        if constexpr (!kTuring) {
            start(block, later, before);
        } else if (block >= 0) {
            if (later < kKChunks) k.fetch(waiting, block, later);
            else v.fetch(waiting, block, later - kKChunks);
        }
        return base + now;
    }
};

// A part of Q, once. The caller commits and waits.
template <class T> CF_DEVICE void copy_once(uint32_t to, const GlobalRows<Element>& from) {
    const TileLoader<T, kThreads> loader(from);
    if constexpr (kTuring) {
        uint4 waiting[TileLoader<T, kThreads>::kCopies];
        loader.fetch(waiting, 0);
        loader.store(waiting, to);
    } else {
        loader.start_once(to, 0);
    }
}

// Q, whose first columns come through the memory of the ring into registers.
CF_DEVICE void load_q(RegisterQ& register_q, SharedStorage& s, const GlobalRows<Element>& gQ, int row_first) {
    GlobalRows<Element> rest = gQ;
    rest.data += kQColumns, rest.columns -= kQColumns;
    copy_once<QTile>(smem_addr(s.q.data), rest);
    if constexpr (kQColumns > 0) copy_once<QPart>(smem_addr(s.slots), gQ);
    if constexpr (!kTuring) {
        cp_async_commit();
        cp_async_wait<0>();
    }
    // sync: Q is visible, and so is `saved`.
    __syncthreads();
    if constexpr (kQColumns > 0) {
        register_q.fill(SharedRows<Product, QPart>(smem_addr(s.slots), row_first));
        // sync: the memory of the ring is free.
        __syncthreads();
    }
}

// Q in registers from one of its steps on.
struct RegisterQFrom {
    const RegisterQ& rows;
    int first;
    CF_DEVICE void load(uint32_t (&r)[4], int m, int step) const { rows.load(r, m, first + step); }
};

// S = Q K^T of the warp's rows and keys, over the chunks of K of a block.
CF_DEVICE void multiply_by_keys(float (&rS)[1][kN][4], Ring& ring, int block, const RegisterQ& register_q,
                                RowsAsA<QTile> shared_q, int key_first) {
    CF_UNROLL
    for (int chunk = 0; chunk < kQColumns / kKColumns; chunk++) {
        const uint32_t sK = ring.next(block, chunk);
        multiply<Product, kSteps>(rS, RegisterQFrom{register_q, chunk * kSteps},
                                  RowsAsB<KTile>(sK, key_first));
    }
#pragma unroll 1
    for (int chunk = kQColumns / kKColumns; chunk < kKChunks; chunk++) {
        const uint32_t sK = ring.next(block, chunk);
        multiply<Product, kSteps>(rS, shared_q, RowsAsB<KTile>(sK, key_first));
        shared_q.advance(kSteps);
    }
}

// Softcap and ALiBi, over the scale, by which the softmax multiplies. distance: of the thread's first query from its
// first key.
CF_DEVICE void cap_and_slope(float (&s)[1][kN][4], const Score& score, int64_t slope_at, float distance) {
    const float unit = 1 / static_cast<float>(score.scale), cap = static_cast<float>(score.softcap) * unit;
    const float slope =
        score.alibi_slopes ? static_cast<const float*>(score.alibi_slopes)[slope_at] * unit : 0;
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) {
            const int step = Positions<false>::row_step(0, e) - Positions<false>::column_step(n, e);
            float& x = s[0][n][e];
            if (cap != 0) x = cap * bounded_tanh<false>(x / cap);
            x = fmaf(-slope, fabsf(distance + static_cast<float>(step)), x);
        }
    }
}

// Products become scores, over the scale; -inf where a pair does not count. whole: the band hides none of them.
CF_DEVICE void finish_scores(float (&rS)[1][kN][4], const Score& score, const Saved& saved,
                             const Positions<false>& at, bool whole) {
    if (score.softcap != 0 || score.alibi_slopes)
        cap_and_slope(rS, score, saved.batch * score.alibi_batch + saved.head * score.alibi_head,
                      static_cast<float>(at.row + saved.offset - at.column));
    if (!whole) mask_band(rS, at, saved.band);
    if (score.mask.data) {
        const auto* attend = static_cast<const uint8_t*>(score.mask.data) + saved.batch * score.mask.batch +
                             saved.head * score.mask.head;
        mask_keys(rS, attend, score.mask.column, at.column, saved.band.seqlen_k - 1);
    }
}

// O = O + P V of all rows and the warp's columns, over the chunks of V of a block; with the first one P is visible, and
// the factors on O.
CF_DEVICE void multiply_by_values(float (&rO)[kM][kNO][4], Ring& ring, int block, uint32_t p,
                                  const Softmax& softmax) {
#pragma unroll 1
    for (int chunk = 0; chunk < kVChunks; chunk++) {
        const uint32_t sV = ring.next(block, kKChunks + chunk);
        if (chunk == 0) softmax.rescale(rO);
        RowsAsA<PTile> weights(p, 0);
        weights.reader.begin_at(chunk);
        multiply<Product, 1>(rO, weights, ColumnsAsB<VTile, kWarps>(sV, threadIdx.x / 32));
    }
}

// LSE of the thread's rows; the factors become 1 / row_sum.
CF_DEVICE void store_lse(const ForwardParams& p, const Saved& saved, const Softmax& softmax) {
    const float sink = p.score.sinks
                           ? static_cast<const float*>(p.score.sinks)[saved.head * p.score.sinks_head]
                           : -kInfinity;
    float* gLse = head_rows<float>(p.lse, saved.batch, saved.head, saved.first_q);
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int row = softmax.row(half);
        const FinalRow<float> done = softmax.finalize(half, static_cast<float>(p.score.scale), sink);
        softmax.storage.factor[row] = done.normaliser;
        if (p.lse.data && row < saved.queries) st_global(gLse + row * p.lse.row, done.lse);
    }
}

// O times its factors, as floats,
CF_DEVICE void store_float_o(const float (&rO)[kM][kNO][4], const ForwardParams& p, const Softmax& softmax,
                             const Saved& saved) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int i = 0; i < 2 * kM; i++) {
        const int m = i / 2, half = i % 2, row = 16 * m + 8 * half + g;
        if (row >= saved.queries) continue;
        float* to = head_rows<float>(p.o, saved.batch, saved.head, saved.first_q + row);
        CF_UNROLL
        for (int j = 0; j < 2 * kNO; j++) {
            const int n = j / 2, column = grouped_column<kWarps>(n, warp) + 2 * t + j % 2;
            if (column < p.shape.head_dim_v)
                to[column] = rO[m][n][2 * half + j % 2] * softmax.storage.factor[row];
        }
    }
}
// or through the memory of Q and the ring, 16 bytes a lane.
CF_DEVICE void store_o(const float (&rO)[kM][kNO][4], const ForwardParams& p, const Softmax& softmax,
                       const Saved& saved, uint32_t staging) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int i = 0; i < 2 * kM; i++) {
        const int m = i / 2, half = i % 2, row = 16 * m + 8 * half + g;
        const float factor = softmax.storage.factor[row];
        CF_UNROLL
        for (int n = 0; n < kNO; n++)
            st_shared(staging + OTile::offset(row, grouped_column<kWarps>(n, warp) / 8) + 4 * t,
                      pack<Element>(rO[m][n][2 * half] * factor, rO[m][n][2 * half + 1] * factor));
    }
    // sync: O is visible.
    __syncthreads();
    constexpr int kRows = 8;    // of a warp, while there are any
    const int of_warp = kRows * warp;
    Element* o_first = head_rows<Element>(p.o, saved.batch, saved.head, saved.first_q + of_warp);
    copy_staged_rows<Tile<Element, kRows, kHeadDimV>>(
        staging + of_warp * OTile::kPitch, {o_first, p.o.row, saved.queries - of_warp, p.shape.head_dim_v});
}

CF_DEVICE void flash_forward_wide(const ForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();

    // [A1.4]
    const int32_t tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = lpt_query_tile(blockIdx.x, tiles, p.shape, p.shape.heads_q,
                                          kL2SectionBytes / uint32_t(sizeof(Element)));
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t head = work.head, kv_head = head / (p.shape.heads_q / p.shape.heads_k);
    const int32_t m_first = work.tile * kBlockM, m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const int warp = static_cast<int>(threadIdx.x) / 32, row_warp = warp % kRowWarps,
              key_warp = warp / kRowWarps, row_first = 16 * row_warp, key_first = kWarpKeys * key_warp;

    // Blocks of keys [first, first + blocks) hold a key for a query of the tile; from here on they count from first.
    const Band band(p.score, sequence);
    const Range keys = band.keys_of(m_first, m_end);
    const int32_t first = keys.first / kBlockN, blocks = cdiv(keys.end, kBlockN) - first;
    const int32_t first_key = first * kBlockN, keys_left = sequence.seqlen_k - first_key;
    const int64_t first_k = sequence.first_k + first_key;
    const int32_t whole_first = smaller(cdiv(band.first_key(m_end - 1), kBlockN) - first, blocks);
    const int32_t whole_blocks = larger(band.end_key(m_first) / kBlockN - first - whole_first, 0);
    if (threadIdx.x == 0)
        s.saved = {sequence.first_q + m_first,
                   Band::score_offset(p.score, sequence),
                   work.batch,
                   head,
                   m_end - m_first,
                   m_first,
                   first_key,
                   whole_first,
                   whole_blocks,
                   NarrowBand(band)};

    float rO[kM][kNO][4] = {};
    Softmax softmax{s.softmax, key_warp, row_first};
    if (blocks > 0) {
        RegisterQ register_q;
        load_q(register_q, s,
               {head_rows<Element>(p.q, work.batch, head, sequence.first_q + m_first), p.q.row,
                sequence.seqlen_q - m_first, p.shape.head_dim},
               row_first);
        Ring ring{
            {{head_rows<Element>(p.k, work.batch, kv_head, first_k), p.k.row, keys_left, p.shape.head_dim},
             kHeadDim},
            {{head_rows<Element>(p.v, work.batch, kv_head, first_k), p.v.row, keys_left, p.shape.head_dim_v},
             kHeadDimV},
            smem_addr(s.slots)};
        ring.begin(blocks - 1);

        const Saved& saved = s.saved;
        const float unit_log2 = static_cast<float>(p.score.scale * 1.4426950408889634);
        const RowsAsA<QTile> shared_q(smem_addr(s.q.data), row_first);
        const AccumulatorWriter<PTile> p_writer(smem_addr(s.p.data), row_first, kN * key_warp);
        const auto put_p = [&](float left, float right, int n, int half) {
            p_writer.store(left, right, 0, n, half, 0);
        };
        // [A1.6]
#pragma unroll 1
        for (int32_t block = blocks - 1; block >= 0; block--) {
            // [A1.8]
            float rS[1][kN][4] = {};
            multiply_by_keys(rS, ring, block, register_q, shared_q, key_first);
            finish_scores(rS, p.score, saved,
                          Positions<false>(saved.first_query + row_first,
                                           saved.first_key + block * kBlockN + key_first),
                          uint32_t(block - saved.whole_first) < uint32_t(saved.whole_blocks));
            // [A1.9]
            softmax.share_max(rS);
            // sync: maxima of the warps that share these rows.
            bar_sync(1 + row_warp, 32 * kKeyWarps);
            softmax.make_weights(rS, unit_log2, put_p);
            // [A1.10]
            multiply_by_values(rO, ring, block, smem_addr(s.p.data), softmax);
        }
    }

    // [A1.12] [A1.13]
    // sync: all are done with the maxima, with Q and the ring; `saved` is visible.
    __syncthreads();
    const Saved saved = s.saved;
    softmax.share_sums();
    // sync: the sums of all warps.
    __syncthreads();
    if (key_warp == 0 && threadIdx.x % 4 == 0) store_lse(p, saved, softmax);
    // sync: the factors of all rows.
    __syncthreads();
    if (p.float_o) store_float_o(rO, p, softmax, saved);
    else store_o(rO, p, softmax, saved, smem_addr(s.q.data));
}

CF_KERNEL(ForwardParams, kThreads, 1, flash_forward_wide)
