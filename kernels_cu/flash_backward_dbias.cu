// Gradient of an attention bias on mma.sync tensor cores, sm_75 to sm_120. flash_backward.cu has the other gradients.
// Design note: docs/kernels/backward.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2. The bias is added to the scores, so its
// gradient is theirs; a softcap, which comes before, has no part in it.
//   [B1]    a block owns a tile of the bias as the caller gave it; dB = 0
//   [B2]    for each batch entry, head and tile of queries and keys that it was broadcast to
//   [A2.10]     S = score(Q_i K_j^T)
//   [A2.11]     P = e^(S - LSE), 0 where a pair is outside the band or masked
//   [A2.13]     dP = dropout(dO_i V_j^T)
//   [A2.14]     dB = dB + P * (dP - delta)
//   [B3]    dB summed over the queries or keys that share an element
// The same bits every run: no other block adds to the tile.
//
// Grid:   x = (bias_batch * bias_heads + head) * tiles of the bias + tile.
// Block:  the warps share S and dP out in parts, see row_groups.
// Shared: two slots for a strip of Q and K, or of dO and V; at the end dB lies over them.
//
// Assumes: as flash_backward.cu; delta is written.
#include "backward/gradient.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_TURING 0
#define CF_BLOCK_M 128
#define CF_BLOCK_N 64
#define CF_THREADS 256
#define CF_SHARED_BYTES 49152
#endif
using Element = CF_ELEMENT;
constexpr bool kTuring = CF_TURING;    // no cp.async, no m16n8k16
enum : int {                           // why not variables: as in tile.cuh
    kBlockM = CF_BLOCK_M,
    kBlockN = CF_BLOCK_N,
    kStrip = 64,    // columns of the head dim at a time. why: one kernel then takes every head dim
    kThreads = CF_THREADS,
    kWarps = kThreads / 32
};

using Product = Math<Element, CF_PRODUCTS, kTuring>;
using QueryTile = Tile<Element, kBlockM, kStrip>;    // of Q, dO
using KeyTile = Tile<Element, kBlockN, kStrip>;      // of K, V

struct SharedStorage {
    struct Slot {
        QueryTile queries;
        KeyTile keys;
    };
    union {
        Slot slots[2];
        float sums[kBlockM][kBlockN + 1];
    };
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// What a block visits of an axis along which its tile of the bias begins at `first`: all of it, where the
// bias is broadcast.
CF_DEVICE Range visited(int32_t bias_extent, int32_t first, int32_t block, int32_t extent) {
    return bias_extent == 1 ? Range{0, extent} : Range{first, smaller(first + block, extent)};
}

CF_DEVICE void flash_backward_dbias(const BackwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();

    // [B1]
    const int32_t row_tiles = cdiv<int32_t>(p.bias_rows, kBlockM),
                  column_tiles = cdiv<int32_t>(p.bias_columns, kBlockN);
    const TileCoord work = tile_coord(blockIdx.x, row_tiles * column_tiles, p.bias_heads);
    const int32_t row_first = work.tile / column_tiles * kBlockM;
    const int32_t column_first = work.tile % column_tiles * kBlockN;
    const Range batches = visited(p.bias_batch, work.batch, 1, p.shape.batch);
    const Range heads = visited(p.bias_heads, work.head, 1, p.shape.heads_q);
    const int32_t group = p.shape.heads_q / p.shape.heads_k;
    const int32_t strips = cdiv<int32_t>(p.shape.head_dim, kStrip),
                  all_strips = strips + cdiv<int32_t>(p.shape.head_dim_v, kStrip);

    // layout: the part of this warp, rows are queries.
    constexpr int kQueryGroups = score_groups(kBlockM, kBlockN, kWarps), kKeyGroups = kWarps / kQueryGroups;
    constexpr int kM = kBlockM / kQueryGroups / 16, kN = kBlockN / kKeyGroups / 8;
    const int warp = threadIdx.x / 32, query_row = warp % kQueryGroups * 16 * kM,
              key_row = warp / kQueryGroups * 8 * kN;
    float rDB[kM][kN][4] = {};
    uint32_t slot = 0;

    for (int32_t batch = batches.first; batch < batches.end; batch++) {
        const Sequence sequence = sequence_of(p.shape, batch);
        const Band band(p.score, sequence);
        for (int32_t head = heads.first; head < heads.end; head++) {
            ScoreGradient<Product, true, kM, false> gradient(p, sequence, band, head);
            // [B2]
            const Range queries = visited(p.bias_rows, row_first, kBlockM, sequence.seqlen_q);
            const Range columns = visited(p.bias_columns, column_first, kBlockN, sequence.seqlen_k);
            for (int32_t m_first = queries.first; m_first < queries.end; m_first += kBlockM) {
                const Range seen = band.keys_of(m_first, m_first + kBlockM);
                const int32_t n_end = smaller(seen.end, columns.end);
                int32_t n_first = larger(seen.first, columns.first) / kBlockN * kBlockN;
                gradient.load_lse(m_first + query_row);
                gradient.load_delta(m_first + query_row);
                for (; n_first < n_end; n_first += kBlockN) {
                    const auto& score = gradient.score;
                    if (!kTuring && !score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN))
                        continue;
                    // Sends for a strip of Q and K, or, after these, of dO and V.
                    const auto send = [&](int32_t strip) {
                        const bool of_values = strip >= strips;
                        const int32_t column = (of_values ? strip - strips : strip) * kStrip;
                        const int32_t left = (of_values ? p.shape.head_dim_v : p.shape.head_dim) - column;
                        const Tensor &of_queries = of_values ? p.d_o : p.q, &of_keys = of_values ? p.v : p.k;
                        GlobalRows<Element> from =
                            rows_of<Element>(of_queries, batch, head, sequence.first_q + m_first,
                                             sequence.seqlen_q - m_first, smaller<int32_t>(left, kStrip));
                        GlobalRows<Element> to =
                            rows_of<Element>(of_keys, batch, head / group, sequence.first_k + n_first,
                                             sequence.seqlen_k - n_first, smaller<int32_t>(left, kStrip));
                        from.data += column, to.data += column;
                        load_tile<kThreads, kTuring>(from, s.slots[slot].queries);
                        load_tile<kThreads, kTuring>(to, s.slots[slot].keys);
                        if constexpr (!kTuring) cp_async_commit();
                    };
                    // [A2.10] [A2.13]
                    float rS[kM][kN][4] = {}, rDP[kM][kN][4] = {};
                    send(0);
                    for (int32_t strip = 0; strip < all_strips; strip++) {
                        const SharedStorage::Slot& now = s.slots[slot];
                        if constexpr (!kTuring) cp_async_wait<0>();
                        // sync: the strip is visible to all; and all are done with the one before, whose
                        // slot is filled next.
                        __syncthreads();
                        slot ^= 1;
                        if (strip + 1 < all_strips) send(strip + 1);
                        const RowsAsA<QueryTile> a(smem_addr(now.queries.data), query_row);
                        const RowsAsB<KeyTile> b(smem_addr(now.keys.data), key_row);
                        constexpr int kSteps = kStrip / Product::kDepth;
                        if (strip < strips) multiply<Product, kSteps>(rS, a, b);
                        else multiply<Product, kSteps>(rDP, a, b);
                    }
                    // [A2.11] [A2.14]
                    const Positions<false> at(m_first + query_row, n_first + key_row);
                    gradient.recompute_p(rS, at, false, [](auto...) {});
                    gradient.compute_ds(rDP, rS, Share{0, 1}, [](auto...) {});
                    CF_UNROLL
                    for (int m = 0; m < kM; m++) {
                        CF_UNROLL
                        for (int n = 0; n < kN; n++) {
                            CF_UNROLL
                            for (int e = 0; e < 4; e++) rDB[m][n][e] += rDP[m][n][e];
                        }
                    }
                }
            }
        }
    }
    // [B3]
    // sync: all are done with the slots, over which the sums are laid.
    __syncthreads();
    const Positions<false> own(query_row, key_row);
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int e = 0; e < 4; e++) s.sums[own.query(m, n, e)][own.key(m, n, e)] = rDB[m][n][e];
        }
    }
    // sync: every thread's part of the tile is there before any is summed.
    __syncthreads();
    const int32_t rows = smaller<int32_t>(kBlockM, p.bias_rows - row_first);
    const int32_t columns = smaller<int32_t>(kBlockN, p.bias_columns - column_first);
    for (int32_t i = threadIdx.x; i < rows * columns; i += kThreads) {
        const int32_t row = i / columns, column = i % columns;
        const int32_t m_end = p.bias_rows == 1 ? kBlockM : row + 1;
        const int32_t n_end = p.bias_columns == 1 ? kBlockN : column + 1;
        float sum = 0;
        for (int32_t m = row; m < m_end; m++)
            for (int32_t n = column; n < n_end; n++) sum += s.sums[m][n];
        const int64_t element = work.batch * p.dbias.batch + work.head * p.dbias.head +
                                (row_first + row) * p.dbias.row + (column_first + column) * p.dbias.column;
        store_bias(p.dbias.data, element, p.score.bias_type, sum);
    }
}

CF_KERNEL(BackwardParams, kThreads, 1, flash_backward_dbias)
