// The stream of queries and their tangents in second order: what a block of keys reads in one step, as one tile.
// And rows of an array with those of its tangent.
// Design note: docs/kernels/derivatives.md.
#pragma once
#include "attention/seqlen.cuh"
#include "backward/second_gradient.cuh"
#include "tile/tile_pair.cuh"

// Rows of a head from `first` on: `rows` of them exist, none beyond is touched.
template <class Element>
CF_DEVICE GlobalRows<Element> tensor_rows(const Tensor& t, int32_t batch, int32_t head, int64_t first,
                                          int32_t rows, int32_t columns) {
    return GlobalRows<Element>(head_rows<Element>(t, batch, head, first), t.row, rows, columns);
}
template <class Element>
CF_DEVICE RowsPair<Element> pair_of_rows(const Tensor& t, const Tensor& dot, int32_t batch, int32_t head,
                                         int64_t first, int32_t rows, int32_t columns) {
    const auto of = [&](const Tensor& x) {
        return tensor_rows<Element>(x, batch, head, first, rows, columns);
    };
    return {of(t), of(dot.data ? dot : t), dot.data != nullptr};
}

// layout: Q, dotQ, dO; then the four numbers of each row.
template <class QTile, class DOTile>
struct TangentQueries {
    enum : int {
        kRows = QTile::kRows,
        kOfDO = 2 * QTile::kBytes,
        kOfRows = kOfDO + DOTile::kBytes,
        kBytes = kOfRows + 16 * kRows
    };
    static_assert(int(DOTile::kRows) == int(kRows), "a slot is of one set of rows");
    alignas(128) unsigned char data[kBytes];

    // Of row `row` of the tile at an address.
    CF_DEVICE static RowNumbers row_of(uint32_t address, int row, bool exists) {
        const float4 x = ld_shared<float4>(address + kOfRows + 16 * row);
        return row_numbers(x.x, x.y, x.z, x.w, exists);
    }
};

// Fills such tiles with the queries of a head.
template <class Tile, class QTile, class DOTile, int kThreads>
struct TangentQueriesLoader {
    using Element = typename QTile::Element;
    static_assert(4 * QTile::kRows <= kThreads, "a thread copies one number");
    TileLoader<TilePair<QTile>, kThreads> q;
    TileLoader<DOTile, kThreads> d_o;
    GlobalRows<float> numbers;    // those that this thread copies

    CF_DEVICE TangentQueriesLoader(const SecondOrderParams& p, const Sequence& sequence, int32_t head)
        : q(pair_of_rows<Element>(p.call.q, p.q_dot, sequence.batch, head, sequence.first_q,
                                  sequence.seqlen_q, p.call.shape.head_dim)),
          d_o(tensor_rows<Element>(p.call.d_o, sequence.batch, head, sequence.first_q, sequence.seqlen_q,
                                   p.call.shape.head_dim_v)),
          numbers(numbers_of(p, sequence, head)) {
        d_o.agree(q.array);
        q.tangent.agree(d_o);
        d_o.agree(q.array);    // why again: it changes nothing, but the three counts are then one register
    }
    CF_DEVICE void start(uint32_t address, int32_t first_row) const {
        q.start(address, first_row);
        d_o.start(address + Tile::kOfDO, first_row);
        if (threadIdx.x < 4 * Tile::kRows) {
            const int32_t row = first_row + threadIdx.x / 4;
            cp_async4(address + Tile::kOfRows + 4 * threadIdx.x, numbers.row(row), row < numbers.rows);
        }
    }

  private:
    CF_DEVICE static GlobalRows<float> numbers_of(const SecondOrderParams& p, const Sequence& sequence,
                                                  int32_t head) {
        const int which = threadIdx.x % 4;
        const Rows& of = which == 0   ? p.call.lse
                         : which == 1 ? p.lse_dot
                         : which == 2 ? p.call.delta
                                      : p.delta_dot;
        return {head_rows<float>(of, sequence.batch, head, sequence.first_q), of.row, sequence.seqlen_q, 1};
    }
};
