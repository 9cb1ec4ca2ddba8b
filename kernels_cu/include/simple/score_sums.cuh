// Gradients of what is added to the scores, and their derivatives: those of the bias and of the sinks. Head says what is
// added up: add_d_scores() of a tile, d_sink() of a row.
// Design note: docs/kernels/simple.md.
#pragma once
#include "simple/gradient_head.cuh"

// What a block visits of an axis along which its tile of the bias begins at `first`: all of it, where the
// bias is broadcast.
CF_DEVICE Range visited(int32_t bias_extent, int32_t first, int32_t block, int32_t extent) {
    return bias_extent == 1 ? Range{0, extent} : Range{first, smaller(first + block, extent)};
}

// A block owns a tile of the bias as the caller gave it, and visits all that it was broadcast to.
template <class Head, class Tiles, int kBlockM, int kBlockN, class Params>
CF_DEVICE void sum_bias(const Params& params, const BackwardParams& p, typename Tiles::Storage& s) {
    using Acc = typename Tiles::Acc;
    // [A2.6]
    const int32_t row_tiles = cdiv(p.bias_rows, kBlockM), column_tiles = cdiv(p.bias_columns, kBlockN);
    const TileCoord work = tile_coord(blockIdx.x, row_tiles * column_tiles, p.bias_heads);
    const int32_t row_first = work.tile / column_tiles * kBlockM;
    const int32_t column_first = work.tile % column_tiles * kBlockN;
    const Range batches = visited(p.bias_batch, work.batch, 1, p.shape.batch);
    const Range heads = visited(p.bias_heads, work.head, 1, p.shape.heads_q);
    typename Tiles::Product rDB = {};

    for (int32_t batch = batches.first; batch < batches.end; ++batch)
        for (int32_t q_head = heads.first; q_head < heads.end; ++q_head) {
            const Head head(params, batch, q_head);
            // [A2.8]
            const Range queries = visited(p.bias_rows, row_first, kBlockM, head.sequence.seqlen_q);
            const Range columns = visited(p.bias_columns, column_first, kBlockN, head.sequence.seqlen_k);
            for (int32_t m_first = queries.first; m_first < queries.end; m_first += kBlockM) {
                const Range seen = head.band.keys_of(m_first, m_first + kBlockM);
                const Range keys{larger(seen.first, columns.first), smaller(seen.end, columns.end)};
                int32_t n_first = keys.first / kBlockN * kBlockN;
                for (; n_first < keys.end; n_first += kBlockN) {
                    const int32_t n_end = n_first + kBlockN;
                    if (!head.score.reach(m_first, m_first + kBlockM, n_first, n_end)) continue;
                    head.template add_d_scores<Tiles>(rDB, m_first, n_first, s);
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

// One block per head, sums in a fixed order.
template <class Acc> struct SinkStorage {
    Acc part[kThreads];
};
template <class Head, class Params, class Acc>
CF_DEVICE void sum_sinks(const Params& params, const BackwardParams& p, SinkStorage<Acc>& s) {
    const int32_t head = static_cast<int32_t>(blockIdx.x);
    Acc sum = 0;
    for (int32_t batch = 0; batch < p.shape.batch; ++batch) {
        const Head rows(params, batch, head);
        for (int32_t query = threadIdx.x; query < rows.sequence.seqlen_q; query += kThreads)
            sum -= rows.d_sink(head, query);
    }
    s.part[threadIdx.x] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();    // sync: the upper half's sums are there before the lower half adds them
        if (static_cast<int>(threadIdx.x) < half) s.part[threadIdx.x] += s.part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) static_cast<Acc*>(p.dsinks)[head] = s.part[0];
}
