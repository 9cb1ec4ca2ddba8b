// Gradients of what a score function reads, on plain multiply-adds: any element type, head dim, strides and
// architecture. It is compiled for functions alone. CF_PASS names the pass that a compilation makes: `sum`, then `reduce`.
// Design note: docs/kernels/simple.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, as simple_backward.cu has it. An element may be
// read at any pairs, so no block can own it; no two blocks add to one element, either:
//   [G1]    a block owns every slices-th tile of queries, and sums of all elements; S = 0
//   [A2.8]  for each tile of keys that meets it, in ascending order
//   [A2.14]     dscore = P * (dP - delta)
//   [G2]        an element that is read at pair (i, j) gets dscore * d score / d element; where its place does not
//               depend on the key (the query), the shares of a row (a column) are summed first
//   [G3]        each thread looks at all shares of the tile, row by row, and adds up those of the elements it owns
//   [G4]    the sums of slices are added in their order                                         (pass `reduce`)
// The same bits every run: an element of a slice has one owner, which adds in one order.
//
// Grid:   `sum`: slices. `reduce`: ceil(elements / 256).
// Block:  256 threads.
// Shared: sum: Simt::Storage of m x n, 64 x 64 (f64 64 x 32): shares lie where weights do, their places over the
//         slices of the products. `reduce`: none.
//
// Assumes: as simple_backward.cu; delta is written.
#include "simple/config.cuh"
#include "simple/gradient_head.cuh"

#if defined(CF_FUNCTION)
#if !defined(CF_PASS)
#define CF_PASS sum
#endif
using Head = GradientHead<Element>;

// why such a number: its multiples spread evenly, so that neighbours in any direction have different owners.
CF_DEVICE bool owns(int32_t place) {
    static_assert(kThreads == 256, "an owner is the upper 8 bits");
    return (static_cast<uint32_t>(place) * 2654435769u) >> 24 == threadIdx.x;
}

// [G3] Shares and their places are (kRows, kColumns), their rows kPitch apart.
template <int kRows, int kColumns, int kPitch>
CF_DEVICE void add_owned(double* sums, const Acc* shares, const int32_t* places) {
    int32_t at = -1;
    double total = 0;
    for (int row = 0; row < kRows; ++row) {
        Acc sum = 0;    // why: of a row; double adds are scarce on many GPUs, and long sums of floats inexact
#pragma unroll 4
        for (int column = 0; column < kColumns; ++column) {
            const int32_t place = places[row * kColumns + column];
            if (!owns(place)) continue;
            if (place != at) {
                if (at >= 0) sums[at] += total + sum;
                at = place, total = 0, sum = 0;
            }
            sum += shares[row * kPitch + column];
        }
        if (sum != 0) total += sum;
    }
    if (at >= 0) sums[at] += total;
}

// [G2] [G3] Adds what a tile has for the elements of one read, and for those of the next ones.
template <int kShare, class Tiles, int kBlockM, int kBlockN>
CF_DEVICE void add_shares(const ArgumentParams& p, const Head& head, double* sums, int32_t q_head,
                          int32_t m_first, int32_t n_first, typename Tiles::Product& capped,
                          typename Tiles::Product& d_score, typename Tiles::Storage& s) {
    if constexpr (kShare < kShares) {
        using One = ScoreShare<kShare>;
        constexpr int kPitch = sizeof(s.weights[0]) / sizeof(Acc);
        static_assert(sizeof(s.slices) >= kBlockM * kBlockN * sizeof(int32_t), "places lie over the slices");
        auto& places = *reinterpret_cast<int32_t (*)[kBlockM * kBlockN]>(&s.slices);
        const ArgumentGradient& to = p.gradients[One::kArgument];
        if (to.data) {
            __syncthreads();    // sync: what shares and places replace has been read by all
#pragma unroll 1
            for (int r = 0; r < Tiles::kRows; ++r) {
                const int row = Tiles::own_row(r);
                Acc of_row = 0;
                int32_t place = 0;
                CF_UNROLL
                for (int c = 0; c < Tiles::kColumns; ++c) {
                    const int column = Tiles::other_row(c);
                    const auto one = One::at(capped[0][c], head.sequence.batch, q_head, m_first + row,
                                             n_first + column, p.call.score.arrays);
                    // why the test: a function may have any slope where it masks a pair.
                    const Acc share = d_score[0][c] == 0 ? 0 : d_score[0][c] * one.factor;
                    place = one.place;
                    if constexpr (One::kByKey) {
                        s.weights[row][column] = share;
                        if (One::kByQuery) places[row * kBlockN + column] = place;
                        else if (row == 0) places[column] = place;
                    } else {
                        of_row += share;
                    }
                }
                if constexpr (!One::kByKey) {
                    of_row = sum_over_lanes<kLanes>(of_row);
                    if (Tiles::lane() == 0) s.weights[row][0] = of_row, places[row] = place;
                }
                Tiles::rotate_rows(capped), Tiles::rotate_rows(d_score);
            }
            __syncthreads();    // sync: shares and places of all threads are there before any adds its own
            Acc* shares = &s.weights[0][0];
            double* own = sums + to.first;
            if constexpr (!One::kByKey) {
                add_owned<kBlockM, 1, kPitch>(own, shares, places);
            } else if constexpr (One::kByQuery) {
                add_owned<kBlockM, kBlockN, kPitch>(own, shares, places);
            } else {
                if (threadIdx.x < kBlockN)
                    for (int row = 1; row < kBlockM; ++row)
                        shares[threadIdx.x] += shares[row * kPitch + threadIdx.x];
                __syncthreads();    // sync: columns are summed before any is added to its element
                add_owned<1, kBlockN, kPitch>(own, shares, places);
            }
        }
        add_shares<kShare + 1, Tiles, kBlockM, kBlockN>(p, head, sums, q_head, m_first, n_first, capped,
                                                        d_score, s);
    }
}

template <int kBlockM, int kBlockN> CF_DEVICE void sum(const ArgumentParams& params) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, 64>;
    const BackwardParams& p = params.call;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [G1]
    const int32_t m_tiles = cdiv<int32_t>(p.shape.seqlen_q, kBlockM);
    const int64_t tiles = int64_t(p.shape.batch) * p.shape.heads_q * m_tiles;
    double* sums = params.sums + blockIdx.x * params.elements;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += params.slices) {
        const TileCoord work = tile_coord(static_cast<uint32_t>(tile), m_tiles, p.shape.heads_q);
        const Head head(p, work.batch, work.head);
        const int32_t m_first = work.tile * kBlockM;
        // [A2.8]
        const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
        for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
            if (!head.score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
            // [A2.14]
            typename Tiles::Product rS, rDP;
            Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
            Tiles::dot_rows(rDP, head.gDO.from(m_first), head.gV.from(n_first), s);
#pragma unroll 1
            for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP)) {
                const int32_t query = m_first + Tiles::own_row(r);
                CF_UNROLL
                for (int c = 0; c < Tiles::kColumns; ++c) {
                    rDP[0][c] = head.pair(rS[0][c], rDP[0][c], query, n_first + Tiles::other_row(c)).d_score;
                    rS[0][c] = head.score.apply_softcap(rS[0][c]);
                }
            }
            add_shares<0, Tiles, kBlockM, kBlockN>(params, head, sums, work.head, m_first, n_first, rS, rDP,
                                                   s);
        }
    }
}

template <int, int> CF_DEVICE void reduce(const ArgumentParams& p) {
    const int64_t element = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    for (int number = 0; number < CF_FUNCTION; ++number) {
        const ArgumentGradient& to = p.gradients[number];
        int64_t left = element - to.first;
        if (!to.data || left < 0 || left >= to.count) continue;
        // [G4]
        double total = 0;
        for (int64_t slice = 0; slice < p.slices; ++slice) total += p.sums[slice * p.elements + element];
        int64_t place = 0;
        for (int axis = 3; axis >= 0; --axis) {
            const int64_t extent = larger<int64_t>(1, p.call.score.arrays[number].extent[axis]);
            place += left % extent * to.stride[axis], left /= extent;
        }
        store_bias(to.data, place, to.type, total);
    }
}

CF_KERNEL(ArgumentParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
#endif
