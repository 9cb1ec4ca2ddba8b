// Attention backward on plain multiply-adds, in separate passes that need no atomics and repeat bit for bit: any element type, head
// dim, strides and architecture. CF_PASS names the pass that a compilation makes: delta, then dq, dkv, dbias, dsinks in any order.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, cut into one pass per gradient: each block accumulates what
// it owns in registers and recomputes the scores that it needs, where the paper adds to dQ in global memory (its line 15).
//   [A2.4]  delta = rowsum(dO * O) - dLSE                                             (pass delta)
//   [A2.6]  a block owns a tile: rows of dQ, of dK and dV, or a tile of dbias
//   [A2.8]  for each tile that meets it inside the band, in ascending order
//   [A2.10] S = Q K^T, in pass dkv its transpose
//   [A2.11] P = e^(score(S) - LSE)
//   [A2.12] dV += dropout(P)^T dO
//   [A2.13] dP = dropout(dO V^T)
//   [A2.14] dscore = P * (dP - delta); dbias is its sum; dS = dscore * d cap / dS
//   [A2.15] dQ += scale dS K
//   [A2.16] dK += scale dS^T Q
//   [A2.17] dsinks = -sum over rows of e^(sink - LSE) * delta                          (pass dsinks; not in the paper)
//
// Grid:   everything along x, tiles fastest (work_of_block).
//         delta, dq   (batch * heads_q + head) * ceil(seqlen_q / kBlockM)
//         dkv         (batch * heads_k + head) * ceil(seqlen_k / kBlockN)
//         dbias       ((bias_batch * bias_heads) * ceil(bias_rows / kBlockM)) * ceil(bias_columns / kBlockN)
//         dsinks      heads_q
//         Packed: seqlen_q and seqlen_k are the longest; blocks past the end of their sequence return.
// Block:  256 threads.
// Shared: Simt::Storage with own x other = m x n, in pass dkv n x m (bytes: simple_forward.cu); delta none; dsinks 256 Acc.
//         class (head dim)      64       128       256       512        m x n
//         dq, 32-bit         64x64     64x64     64x64     32x64
//         dq, f64            64x32     64x32     32x32     32x32
//         dkv, 32-bit        64x64     64x64     64x32     64x32
//         dkv, f64           32x64     32x32     32x32     32x16
//         delta, dbias and dsinks take any head dim.
//
// Assumes lse is the forward pass's. A row without keys has only zero gradients, whatever dO holds.
#include "dropout.cuh"
#include "mask.cuh"
#include "simt.cuh"
#include "softmax.cuh"

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

// why: the passes are templates so that only the one of this compilation is instantiated, with tiles that suit it.
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
    CF_DEVICE GlobalRows<Element> rows(const Tensor& t, int32_t head, int64_t first, int32_t count, int32_t columns) const {
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
        if (p.dlse.data) sum -= head_rows<Acc>(p.dlse, work.batch, work.head, head.sequence.first_q)[query * p.dlse.row];
        if (lane == 0) head_rows<Acc>(p.delta, work.batch, work.head, head.sequence.first_q)[query * p.delta.row] = sum;
    }
}

// ---- dq: a block owns query rows of one head and visits tiles of keys.
template <int kBlockM, int kBlockN> CF_DEVICE void dq(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const BlockWork work = work_of_block(blockIdx.x, cdiv(p.shape.seqlen_q, kBlockM), p.shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int32_t m_first = work.tile * kBlockM;
    if (m_first >= head.sequence.seqlen_q) return;
    Acc rDQ[Tiles::kRows][Tiles::kWideColumns] = {};

    // [A2.8]
    const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        // [A2.10] [A2.13]
        Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
        Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
        Tiles::dot_rows(rDP, head.gDO.from(m_first), head.gV.from(n_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP))
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c)
                rS[0][c] = head.pair(rS[0][c], rDP[0][c], m_first + Tiles::own_row(r), n_first + Tiles::other_row(c)).d_product;

        // [A2.15]
        Tiles::put_weights(rS, s);
        Tiles::add_weighted_rows(rDQ, head.gK.from(n_first), s);
    }
    Element* gDQ = head_rows<Element>(p.dq, work.batch, work.head, head.sequence.first_q + m_first);
    Tiles::store_rows(rDQ, head.score.scale, p.dq, gDQ, head.sequence.seqlen_q - m_first, p.shape.head_dim);
}

// ---- dkv: a block owns key rows of one head of k and v and visits tiles of queries of every head that reads them.
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
            // [A2.10] [A2.13] layout: own rows are keys, columns are queries.
            Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
            Tiles::dot_rows(rS, head.gK.from(n_first), head.gQ.from(m_first), s);
            Tiles::dot_rows(rDP, head.gV.from(n_first), head.gDO.from(m_first), s);
#pragma unroll 1
            for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP))
                CF_UNROLL
                for (int c = 0; c < Tiles::kColumns; ++c) {
                    const auto pair = head.pair(rS[0][c], rDP[0][c], m_first + Tiles::other_row(c), n_first + Tiles::own_row(r));
                    rS[0][c] = pair.weight;
                    rDP[0][c] = pair.d_product;
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
    Tiles::store_rows(rDK, static_cast<Acc>(p.score.scale), p.dk, gDK, sequence.rows_k - n_first, p.shape.head_dim);
    Tiles::store_rows(rDV, Acc(1), p.dv, gDV, sequence.rows_k - n_first, p.shape.head_dim_v);
}

// What a block that owns one index of an axis of the bias visits: all of the axis where the bias is broadcast.
CF_DEVICE Range visited(int32_t bias_extent, int32_t index, int32_t extent) {
    return bias_extent == 1 ? Range{0, extent} : Range{index, index + 1};
}

// ---- dbias: a block owns a tile of the bias as the caller gave it, and visits everything that the tile was broadcast to.
template <int kBlockM, int kBlockN> CF_DEVICE void dbias(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, 64>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const int32_t row_tiles = cdiv(p.bias_rows, kBlockM), column_tiles = cdiv(p.bias_columns, kBlockN);
    const BlockWork work = work_of_block(blockIdx.x, row_tiles * column_tiles, p.bias_heads);
    const int32_t bias_row = work.tile / column_tiles * kBlockM, bias_column = work.tile % column_tiles * kBlockN;
    const bool one_row = p.bias_rows == 1, one_column = p.bias_columns == 1;
    const Range batches = visited(p.bias_batch, work.batch, p.shape.batch);
    const Range heads = visited(p.bias_heads, work.head, p.shape.heads_q);
    Acc rDB[Tiles::kRows][Tiles::kColumns] = {};

    for (int32_t batch = batches.first; batch < batches.end; ++batch)
        for (int32_t q_head = heads.first; q_head < heads.end; ++q_head) {
            const Head head(p, batch, q_head);
            // [A2.8]
            const int32_t m_end = one_row ? head.sequence.seqlen_q : smaller(bias_row + kBlockM, head.sequence.seqlen_q);
            for (int32_t m_first = bias_row; m_first < m_end; m_first += kBlockM) {
                const Range reached = head.band.keys_of(m_first, m_first + kBlockM);
                const Range keys = one_column ? reached : Range{larger(reached.first, bias_column), smaller(reached.end, bias_column + kBlockN)};
                for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
                    // [A2.10] [A2.13]
                    Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
                    Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
                    Tiles::dot_rows(rDP, head.gDO.from(m_first), head.gV.from(n_first), s);
#pragma unroll 1
                    for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP), Tiles::rotate_rows(rDB))
                        CF_UNROLL
                        for (int c = 0; c < Tiles::kColumns; ++c)
                            rDB[0][c] += head.pair(rS[0][c], rDP[0][c], m_first + Tiles::own_row(r), n_first + Tiles::other_row(c)).d_score;
                }
            }
        }

    // [A2.14]
    Tiles::put_weights(rDB, s);
    __syncthreads();    // sync: every thread's part of the tile is there before any is summed
    const int32_t rows = smaller(kBlockM, p.bias_rows - bias_row), columns = smaller(kBlockN, p.bias_columns - bias_column);
    const int64_t first = work.batch * p.dbias.batch + work.head * p.dbias.head + bias_row * p.dbias.row + bias_column * p.dbias.column;
    for (int index = threadIdx.x; index < rows * columns; index += kThreads) {
        const int row = index / columns, column = index % columns;
        Acc sum = 0;
        for (int m = row; m < (one_row ? kBlockM : row + 1); ++m)
            for (int n = column; n < (one_column ? kBlockN : column + 1); ++n) sum += s.weights[m][n];
        store_bias(p.dbias.data, first + row * p.dbias.row + column * p.dbias.column, p.score.bias_type, sum);
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
        __syncthreads();    // sync: the parts that the upper half leaves are there before the lower half adds them
        if (static_cast<int>(threadIdx.x) < half) s.part[threadIdx.x] += s.part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) static_cast<Acc*>(p.dsinks)[head] = s.part[0];
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
