// Attention backward on plain multiply-adds, in separate passes that need no atomics and repeat bit for bit:
// any element type, head dim, strides and architecture. CF_PASS names the pass that a compilation makes:
// delta, then dq, dkv, dbias and dsinks in any order.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, cut into one pass per gradient: a block
// accumulates what it owns in registers and recomputes the scores that it needs, where the paper adds to dQ
// in global memory (its line 15).
//   [A2.4]  delta = rowsum(dO * O) - dLSE                                      (pass delta)
//   [A2.6]  a block owns a tile: rows of dQ, of dK and dV, or a tile of dbias
//   [A2.8]  for each tile that meets it inside the band and that spans reach, in ascending order
//   [A2.10] S = Q K^T, in pass dkv its transpose
//   [A2.11] P = e^(score(S) - LSE)
//   [A2.12] dV += dropout(P)^T dO
//   [A2.13] dP = dropout(dO V^T)
//   [A2.14] dscore = P * (dP - delta); dbias is its sum; dS = dscore * d cap / dS
//   [A2.15] dQ += scale dS K
//   [A2.16] dK += scale dS^T Q
//   [A2.17] dsinks = -sum over rows of e^(sink - LSE) * delta             (pass dsinks; not in the paper)
//
// Grid:   everything along x, tiles fastest (work_of_block).
//         delta, dq   (batch * heads_q + head) * ceil(seqlen_q / kBlockM); in dq the last tile first
//         dkv         (batch * heads_k + head) * ceil(seqlen_k / kBlockN)
//         dbias       (bias_batch * bias_heads) * ceil(bias_rows / kBlockM) * ceil(bias_columns / kBlockN)
//         dsinks      heads_q
//         Packed: seqlen_q and seqlen_k are the longest; blocks past the end of their sequence return.
// Block:  256 threads.
// Shared: dq and dbias: Simt::Storage of m x n; dkv: of n x m; dsinks: 256 Acc; delta: none. Tiles and bytes
//         by head dim class; delta (64 rows), dbias and dsinks take any:
//                                   64              128              256              512
//         dq, 32-bit        64x64   35840    64x64   35840    64x64   35840    32x64   25088
//         dq, f64           64x32   33792    64x32   33792    32x32   25088    16x32   20736
//         dkv, 32-bit       64x64   35840    64x32   25088    64x32   25088    64x16   20736
//         dkv, f64          32x64   33792    32x32   25088    32x16   20736    32x16   20736
//         dbias             64x64   35840, f64 64x32 33792
//
// Assumes that lse and o are the forward pass's, and that v and do are finite even where they are masked.
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "simple/simt.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT float
#define CF_HEAD_DIM 64
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_THREADS 256
#define CF_SHARED_BYTES 35840
#define CF_PASS dq
#endif
using Element = CF_ELEMENT;
using Acc = Accumulator<Element>;
constexpr int kHeadDim = CF_HEAD_DIM;    // the largest head dim, of q and k and of v
static_assert(CF_THREADS == kThreads, "the thread layout of simt.cuh is 16 x 16");

// why: passes are templates so that only the one of this compilation, whose tiles suit it, is instantiated.
template <class Storage> CF_DEVICE Storage& storage_of_pass() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "the catalog and the kernel disagree on shared memory");
    return shared_memory<Storage>();
}

// One query head of one sequence: its rows in every array, and what happens to its scores.
struct Head {
    Sequence sequence;
    Band band;
    HeadScore<Acc> score;
    Dropout dropout;
    GlobalRows<Element> gQ, gK, gV, gO, gDO;
    const Acc *gLse, *gDelta;
    int64_t lse_row, delta_row;
    Acc dropout_scale;

    CF_DEVICE Head(const BackwardParams& p, int32_t batch, int32_t head)
        : sequence(sequence_of(p.shape, batch)), band(p.score, sequence), score(p.score, sequence, head),
          dropout(p.score, batch, head), lse_row(p.lse.row), delta_row(p.delta.row),
          dropout_scale(static_cast<Acc>(p.score.dropout_scale)) {
        const int32_t kv_head = head / (p.shape.heads_q / p.shape.heads_k);
        gQ = rows(p.q, head, sequence.first_q, sequence.seqlen_q, p.shape.head_dim);
        gK = rows(p.k, kv_head, sequence.first_k, sequence.seqlen_k, p.shape.head_dim);
        gV = rows(p.v, kv_head, sequence.first_k, sequence.seqlen_k, p.shape.head_dim_v);
        gO = rows(p.o, head, sequence.first_q, sequence.seqlen_q, p.shape.head_dim_v);
        gDO = rows(p.d_o, head, sequence.first_q, sequence.seqlen_q, p.shape.head_dim_v);
        gLse = head_rows<Acc>(p.lse, batch, head, sequence.first_q);
        gDelta = head_rows<Acc>(p.delta, batch, head, sequence.first_q);
    }
    CF_DEVICE GlobalRows<Element> rows(const Tensor& t, int32_t head, int64_t first, int32_t count,
                                       int32_t columns) const {
        return {head_rows<Element>(t, sequence.batch, head, first), t.row, t.column, count, columns};
    }

    // The weight and the gradients of one pair of a query and a key.
    struct Pair {
        Acc weight;       // dropout(P)
        Acc d_score;      // of the score, after softcap and bias
        Acc d_product;    // of scale * q.k
    };
    CF_DEVICE Pair pair(Acc product, Acc d_weight, int32_t query, int32_t key) const {
        if (!contains(band.keys_of(query), key)) return {0, 0, 0};
        // [A2.11]
        const Acc capped = score.cap(product);
        const Acc masked = score.score(capped, query, key);
        // why: 0 * (dP - delta) is not 0 when what was masked is infinite or NaN.
        if (masked == -Acc(kInfinity)) return {0, 0, 0};
        const Acc weight = natural_exp(masked - gLse[query * lse_row]);
        const Acc kept = !dropout.active() ? 1 : dropout.keeps(query, key) ? dropout_scale : 0;
        // [A2.14]
        const Acc d_score = weight * (d_weight * kept - gDelta[query * delta_row]);
        return {weight * kept, d_score, d_score * score.cap_slope(capped)};
    }
};

// ---- delta: one warp per row at a time.
template <int kBlockM, int kBlockN> CF_DEVICE void delta(const BackwardParams& p) {
    const BlockWork work = work_of_block(blockIdx.x, cdiv(p.shape.seqlen_q, kBlockM), p.shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int32_t m_first = work.tile * kBlockM;
    const int32_t m_end = smaller(m_first + kBlockM, head.sequence.seqlen_q);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // [A2.4]
    for (int32_t query = m_first + warp; query < m_end; query += kThreads / 32) {
        Acc sum = 0;
        for (int32_t column = lane; column < p.shape.head_dim_v; column += 32)
            sum += head.gDO.at(query, column) * head.gO.at(query, column);
        sum = sum_over_lanes<32>(sum);
        if (p.dlse.data)
            sum -= head_rows<Acc>(p.dlse, work.batch, work.head, head.sequence.first_q)[query * p.dlse.row];
        if (lane == 0)
            head_rows<Acc>(p.delta, work.batch, work.head, head.sequence.first_q)[query * p.delta.row] = sum;
    }
}

// ---- dq: a block owns query rows of one head and visits tiles of keys.
template <int kBlockM, int kBlockN> CF_DEVICE void dq(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const int32_t m_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const BlockWork work = work_of_block(blockIdx.x, m_tiles, p.shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int32_t m_first = (m_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= head.sequence.seqlen_q) return;
    Acc rDQ[Tiles::kRows][Tiles::kWideColumns] = {};

    // [A2.8]
    const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        if (!head.score.spans.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
        // [A2.10] [A2.13]
        Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
        Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
        Tiles::dot_rows(rDP, head.gDO.from(m_first), head.gV.from(n_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP)) {
            const int32_t query = m_first + Tiles::own_row(r);
    CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c)
                rS[0][c] = head.pair(rS[0][c], rDP[0][c], query, n_first + Tiles::other_row(c)).d_product;
        }

        // [A2.15]
        Tiles::put_weights(rS, s);
        Tiles::add_weighted_rows(rDQ, head.gK.from(n_first), s);
    }
    Element* gDQ = head_rows<Element>(p.dq, work.batch, work.head, head.sequence.first_q + m_first);
    Tiles::store_rows(rDQ, head.score.scale, p.dq, gDQ, head.sequence.seqlen_q - m_first, p.shape.head_dim);
}

// ---- dkv: a block owns key rows of one head of k and v and visits query tiles of all heads that read it.
template <int kBlockM, int kBlockN> CF_DEVICE void dkv(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockN, kBlockM, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const BlockWork work = work_of_block(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t n_first = work.tile * kBlockN, group = p.shape.heads_q / p.shape.heads_k;
    if (n_first >= sequence.rows_k) return;
    Acc rDK[Tiles::kRows][Tiles::kWideColumns] = {}, rDV[Tiles::kRows][Tiles::kWideColumns] = {};

    for (int32_t q_head = work.head * group; q_head < (work.head + 1) * group; ++q_head) {
        const Head head(p, work.batch, q_head);
        // [A2.8]
        const Range queries = head.band.queries_of(n_first, n_first + kBlockN);
        for (int32_t m_first = queries.first / kBlockM * kBlockM; m_first < queries.end; m_first += kBlockM) {
            if (!head.score.spans.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
            // [A2.10] [A2.13] layout: own rows are keys, columns are queries.
            Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
            Tiles::dot_rows(rS, head.gK.from(n_first), head.gQ.from(m_first), s);
            Tiles::dot_rows(rDP, head.gV.from(n_first), head.gDO.from(m_first), s);
#pragma unroll 1
            for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP)) {
                const int32_t key = n_first + Tiles::own_row(r);
                CF_UNROLL
                for (int c = 0; c < Tiles::kColumns; ++c) {
                    const auto pair = head.pair(rS[0][c], rDP[0][c], m_first + Tiles::other_row(c), key);
                    rS[0][c] = pair.weight;
                    rDP[0][c] = pair.d_product;
                }
            }

            // [A2.12]
            Tiles::put_weights(rS, s);
            Tiles::add_weighted_rows(rDV, head.gDO.from(m_first), s);
            // [A2.16]
            __syncthreads();    // sync: all have read the weights of dV before those of dK replace them
            Tiles::put_weights(rDP, s);
            Tiles::add_weighted_rows(rDK, head.gQ.from(m_first), s);
        }
    }
    Element* gDK = head_rows<Element>(p.dk, work.batch, work.head, sequence.first_k + n_first);
    Element* gDV = head_rows<Element>(p.dv, work.batch, work.head, sequence.first_k + n_first);
    const int32_t rows = sequence.rows_k - n_first;
    Tiles::store_rows(rDK, static_cast<Acc>(p.score.scale), p.dk, gDK, rows, p.shape.head_dim);
    Tiles::store_rows(rDV, Acc(1), p.dv, gDV, rows, p.shape.head_dim_v);
}

// What a block visits of an axis along which its tile of the bias begins at `first`: all of it, where the
// bias is broadcast.
CF_DEVICE Range visited(int32_t bias_extent, int32_t first, int32_t block, int32_t extent) {
    return bias_extent == 1 ? Range{0, extent} : Range{first, smaller(first + block, extent)};
}

// ---- dbias: a block owns a tile of the bias as the caller gave it, and visits all that it was broadcast to.
template <int kBlockM, int kBlockN> CF_DEVICE void dbias(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, 64>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const int32_t row_tiles = cdiv(p.bias_rows, kBlockM), column_tiles = cdiv(p.bias_columns, kBlockN);
    const BlockWork work = work_of_block(blockIdx.x, row_tiles * column_tiles, p.bias_heads);
    const int32_t row_first = work.tile / column_tiles * kBlockM;
    const int32_t column_first = work.tile % column_tiles * kBlockN;
    const Range batches = visited(p.bias_batch, work.batch, 1, p.shape.batch);
    const Range heads = visited(p.bias_heads, work.head, 1, p.shape.heads_q);
    Acc rDB[Tiles::kRows][Tiles::kColumns] = {};

    for (int32_t batch = batches.first; batch < batches.end; ++batch)
        for (int32_t q_head = heads.first; q_head < heads.end; ++q_head) {
            const Head head(p, batch, q_head);
            // [A2.8]
            const Range queries = visited(p.bias_rows, row_first, kBlockM, head.sequence.seqlen_q);
            const Range columns = visited(p.bias_columns, column_first, kBlockN, head.sequence.seqlen_k);
            for (int32_t m_first = queries.first; m_first < queries.end; m_first += kBlockM) {
                const Range seen = head.band.keys_of(m_first, m_first + kBlockM);
                const Range keys{larger(seen.first, columns.first), smaller(seen.end, columns.end)};
                int32_t n_first = keys.first / kBlockN * kBlockN;
                for (; n_first < keys.end; n_first += kBlockN) {
                    const int32_t n_end = n_first + kBlockN;
                    if (!head.score.spans.reach(m_first, m_first + kBlockM, n_first, n_end)) continue;
                    // [A2.10] [A2.13]
                    Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
                    Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
                    Tiles::dot_rows(rDP, head.gDO.from(m_first), head.gV.from(n_first), s);
#pragma unroll 1
                    for (int r = 0; r < Tiles::kRows; ++r) {
                        const int32_t query = m_first + Tiles::own_row(r);
                        CF_UNROLL
                        for (int c = 0; c < Tiles::kColumns; ++c)
                            rDB[0][c] +=
                                head.pair(rS[0][c], rDP[0][c], query, n_first + Tiles::other_row(c)).d_score;
                        Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP), Tiles::rotate_rows(rDB);
                    }
                }
            }
        }

    // [A2.14]
    Tiles::put_weights(rDB, s);
    __syncthreads();    // sync: every thread's part of the tile is there before any is summed
    const int32_t rows = smaller(kBlockM, p.bias_rows - row_first);
    const int32_t columns = smaller(kBlockN, p.bias_columns - column_first);
    for (int index = threadIdx.x; index < rows * columns; index += kThreads) {
        const int row = index / columns, column = index % columns;
        const int m_end = p.bias_rows == 1 ? kBlockM : row + 1;
        const int n_end = p.bias_columns == 1 ? kBlockN : column + 1;
        Acc sum = 0;
        for (int m = row; m < m_end; ++m)
            for (int n = column; n < n_end; ++n) sum += s.weights[m][n];
        const int64_t element = work.batch * p.dbias.batch + work.head * p.dbias.head +
                                (row_first + row) * p.dbias.row + (column_first + column) * p.dbias.column;
        store_bias(p.dbias.data, element, p.score.bias_type, sum);
    }
}

// ---- dsinks: one block per head, sums in a fixed order.
template <int kBlockM, int kBlockN> CF_DEVICE void dsinks(const BackwardParams& p) {
    struct Storage {
        Acc part[kThreads];
    };
    auto& s = storage_of_pass<Storage>();
    const int32_t head = static_cast<int32_t>(blockIdx.x);
    const Acc sink = static_cast<const Acc*>(p.score.sinks)[head * p.score.sinks_head];

    // [A2.17]
    Acc sum = 0;
    for (int32_t batch = 0; batch < p.shape.batch; ++batch) {
        const Sequence sequence = sequence_of(p.shape, batch);
        const Acc* gLse = head_rows<Acc>(p.lse, batch, head, sequence.first_q);
        const Acc* gDelta = head_rows<Acc>(p.delta, batch, head, sequence.first_q);
        // why: a sink of -inf has no share of any row, and its rows without keys have an LSE of -inf too.
        if (sink > -Acc(kInfinity))
            for (int32_t query = threadIdx.x; query < sequence.seqlen_q; query += kThreads)
                sum -= natural_exp(sink - gLse[query * p.lse.row]) * gDelta[query * p.delta.row];
    }
    s.part[threadIdx.x] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();    // sync: the upper half's sums are there before the lower half adds them
        if (static_cast<int>(threadIdx.x) < half) s.part[threadIdx.x] += s.part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) static_cast<Acc*>(p.dsinks)[head] = s.part[0];
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
