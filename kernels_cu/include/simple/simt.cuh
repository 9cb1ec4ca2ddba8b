// The matrix products of attention on plain multiply-adds, for a tile of "own" rows that a block accumulates
// for and tiles of "other" rows that it visits: queries and keys, or keys and queries.
// Design note: docs/kernels/simple.md.
//
// layout: 256 threads as 16 x 16, thread = 16 * row_lane + lane. Of own rows row_lane * kRows + r it holds
//   in a score tile (own x other)     columns lane + 16 * c: 16 lanes read 16 neighbouring other rows;
//   in an accumulator (own x wide)    columns 16 bytes wide at lane * kVector + c / kVector * 16 * kVector.
// A row belongs to 16 neighbouring lanes of one warp in both, so softmax statistics stay in registers.
#pragma once
#include "abi.cuh"
#include "element.cuh"

constexpr int kLanes = 16;    // that share a row
constexpr int kThreads = kLanes * kLanes;

// Rows of a matrix in global memory, any strides; what lies outside rows x columns reads as 0.
template <class Element> struct GlobalRows {
    const Element* data;
    int64_t row_stride, column_stride;
    int32_t rows, columns;

    // An element that exists.
    CF_DEVICE Accumulator<Element> at(int32_t row, int32_t column) const {
        return widen(data[row * row_stride + column * column_stride]);
    }
    CF_DEVICE GlobalRows from(int32_t row) const {
        return {data + row * row_stride, row_stride, column_stride, rows - row, columns};
    }
};

// 16 bytes, the widest access to shared memory.
template <class Acc> struct alignas(16) Vector {
    Acc x[16 / sizeof(Acc)];
};

// A block's tiles: kOwn rows to accumulate for, kOther rows per step, head dims up to kWide.
template <class Accum, int kOwn, int kOther, int kWide> struct Simt {
    using Acc = Accum;
    static constexpr int kVector = 16 / sizeof(Acc);
    static constexpr int kRows = kOwn / kLanes;            // own rows per thread
    static constexpr int kColumns = kOther / kLanes;       // other rows per thread
    static constexpr int kWideColumns = kWide / kLanes;    // accumulator columns per thread
    // Head dims multiplied per step, 128 bytes: one per lane of a warp on floats.
    static constexpr int kSlice = 128 / sizeof(Acc);
    // Weighted rows added per step, 16 KiB.
    static constexpr int kDepth = smaller(kOther, int(16384 / sizeof(Acc) / kWide));
    // Loads of a thread before its first store, as many as registers permit.
    static constexpr int kInFlight = sizeof(Acc) == 4 ? 8 : 2;
    static_assert(kOwn % kLanes == 0 && kOther % kLanes == 0, "the threads are 16 x 16");
    static_assert(kWideColumns % kVector == 0, "accumulator columns are held in 16-byte groups");
    static_assert(kDepth % kVector == 0 && kOther % kDepth == 0, "weights are read in 16-byte groups");

    // why: one vector of padding per row puts 8 neighbouring rows in 8 different groups of banks.
    struct Slices {
        alignas(16) Acc own[kOwn][kSlice + kVector];
        alignas(16) Acc other[kOther][kSlice + kVector];
    };
    // layout: `slices` or `wide` (never both), then the weights, a tile of own x other.
    struct Storage {
        union {
            Slices slices;
            alignas(16) Acc wide[kDepth][kWide];
        };
        alignas(16) Acc weights[kOwn][kOther + kVector];
    };

    CF_DEVICE static int lane() { return threadIdx.x % kLanes; }
    CF_DEVICE static int own_row(int r) { return threadIdx.x / kLanes * kRows + r; }
    CF_DEVICE static int other_row(int c) { return lane() + c * kLanes; }
    CF_DEVICE static int wide_column(int c) {
        return c / kVector * kLanes * kVector + lane() * kVector + c % kVector;
    }

    // to[row][column] = from (row, first_column + column); neighbouring threads read neighbouring columns.
    template <int kTileColumns, class Element, int kTileRows, int kPitch>
    CF_DEVICE static void stage(Acc (&to)[kTileRows][kPitch], const GlobalRows<Element>& from,
                                int first_column) {
        constexpr int kAcross = smaller(kTileColumns, kThreads), kDown = kThreads / kAcross;
        static_assert(kTileRows % kDown == 0, "every thread has as many rows");
        const int first_row = threadIdx.x / kAcross;
        for (int column = threadIdx.x % kAcross; column < kTileColumns; column += kAcross) {
            const int32_t rows = first_column + column < from.columns ? from.rows - first_row : 0;
            const Element* source =
                from.data + (first_column + column) * from.column_stride + first_row * from.row_stride;
#pragma unroll kInFlight
            for (int n = 0; n < kTileRows; n += kDown, source += kDown * from.row_stride)
                to[first_row + n][column] = n < rows ? widen(*source) : Acc(0);
        }
    }

    using Product = Acc[kRows][kColumns];
    CF_DEVICE static void clear(Product& product) {
        CF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            CF_UNROLL
            for (int c = 0; c < kColumns; ++c) product[r][c] = 0;
        }
    }

    // product[r][c] = own row . other row
    template <class Element>
    CF_DEVICE static void dot_rows(Acc (&product)[kRows][kColumns], const GlobalRows<Element>& own,
                                   const GlobalRows<Element>& other, Storage& s) {
        clear(product);
        add_dot_rows(product, own, other, s);
    }

    // product[r][c] += own row . other row
    template <class Element>
    CF_DEVICE static void add_dot_rows(Acc (&product)[kRows][kColumns], const GlobalRows<Element>& own,
                                       const GlobalRows<Element>& other, Storage& s) {
        for (int first = 0; first < own.columns; first += kSlice) {
            __syncthreads();    // sync: the slices (or wide rows) that are overwritten have been read by all
            stage<kSlice>(s.slices.own, own, first);
            stage<kSlice>(s.slices.other, other, first);
            __syncthreads();    // sync: both slices are complete before any thread reads them
#pragma unroll 1
            for (int d = 0; d < kSlice; d += kVector) {
                Vector<Acc> b[kColumns];
                CF_UNROLL
                for (int c = 0; c < kColumns; ++c) b[c] = vector_at(&s.slices.other[other_row(c)][d]);
                CF_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    const Vector<Acc> a = vector_at(&s.slices.own[own_row(r)][d]);
                    CF_UNROLL
                    for (int c = 0; c < kColumns; ++c) {
                        CF_UNROLL
                        for (int e = 0; e < kVector; ++e)
                            product[r][c] = multiply_add(a.x[e], b[c].x[e], product[r][c]);
                    }
                }
            }
        }
    }

    // why: what happens to a score is long code. A loop that is not unrolled can name only row 0 of a tile in
    // registers, so the rows take turns there: kRows calls bring each to the place of row 0 and back, at one
    // move per element.
    template <int kN> CF_DEVICE static void rotate_rows(Acc (&tile)[kRows][kN]) {
        CF_UNROLL
        for (int c = 0; c < kN; ++c) {
            const Acc top = tile[0][c];
            CF_UNROLL
            for (int r = 0; r + 1 < kRows; ++r) tile[r][c] = tile[r + 1][c];
            tile[kRows - 1][c] = top;
        }
    }

    // Leaves a score tile in s.weights for add_weighted_rows, whose first barrier makes it visible.
    CF_DEVICE static void put_weights(const Acc (&weights)[kRows][kColumns], Storage& s) {
        CF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            CF_UNROLL
            for (int c = 0; c < kColumns; ++c) s.weights[own_row(r)][other_row(c)] = weights[r][c];
        }
    }

    // sum[r] += weights[own row] . rows of `other`
    template <class Element>
    CF_DEVICE static void add_weighted_rows(Acc (&sum)[kRows][kWideColumns], const GlobalRows<Element>& other,
                                            Storage& s) {
        const int depth = smaller(kOther, other.rows);
        for (int first = 0; first < depth; first += kDepth) {
            __syncthreads();    // sync: the weights are complete, and what `wide` overwrites has been read
            stage<kWide>(s.wide, other.from(first), 0);
            __syncthreads();    // sync: the rows are complete before any thread reads them
#pragma unroll 1
            for (int n = 0; n < kDepth; n += kVector) {
                Vector<Acc> weight[kRows];
                CF_UNROLL
                for (int r = 0; r < kRows; ++r) weight[r] = vector_at(&s.weights[own_row(r)][first + n]);
                CF_UNROLL
                for (int e = 0; e < kVector; ++e) {
                    CF_UNROLL
                    for (int c = 0; c < kWideColumns; c += kVector) {
                        const Vector<Acc> row = vector_at(&s.wide[n + e][wide_column(c)]);
                        CF_UNROLL
                        for (int r = 0; r < kRows; ++r) {
                            CF_UNROLL
                            for (int i = 0; i < kVector; ++i)
                                sum[r][c + i] = multiply_add(weight[r].x[e], row.x[i], sum[r][c + i]);
                        }
                    }
                }
            }
        }
    }

    // Multiplies every element by the factor of its row.
    CF_DEVICE static void scale_row(Acc (&sum)[kRows][kWideColumns], int r, Acc factor) {
        CF_UNROLL
        for (int c = 0; c < kWideColumns; ++c) sum[r][c] *= factor;
    }

    // Calls store(place, sum) for the rows and columns that exist, with their places in a tensor.
    // why places by sums: a product with a stride per element made half the code of the widest kernels.
    template <class Store>
    CF_DEVICE static void store_rows(Acc (&sum)[kRows][kWideColumns], const Tensor& to, int32_t rows,
                                     int32_t columns, const Store& store) {
#pragma unroll 1
        for (int r = 0; r < kRows; ++r, rotate_rows(sum)) {
            if (own_row(r) >= rows) continue;
            int64_t place = own_row(r) * to.row + wide_column(0) * to.column;
            CF_UNROLL
            for (int c = 0; c < kWideColumns; ++c) {
                if (wide_column(c) < columns) store(place, sum[0][c]);
                place += (wide_column(c + 1) - wide_column(c)) * to.column;
            }
        }
    }

  private:
    CF_DEVICE static const Vector<Acc>& vector_at(const Acc* p) {
        return *reinterpret_cast<const Vector<Acc>*>(p);
    }
};
