// The one product of the core: C (rows x lanes) = or += A (rows x depth, scalars read in place) B (depth x lanes), of
// entries that are reals or pairs.
//
// A tile of kRows rows and kVectors vectors of C stays in registers; every scalar of A is broadcast once and
// multiplies kVectors vectors. A is never packed: Along says which of its axes is contiguous. All seven products
// of attention are this one, with lanes along queries (S^T, dP^T, O^T, dQ^T) or along features (dV, dK).
#pragma once
#include "entries.h"
#include "tiles.h"

// why: 12 x 2 accumulators, 2 vectors of B and a scalar fit 32 registers, 6 x 2 fit 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

enum class Along { rows, depth };    // the contiguous axis of A

// B: of entries, or of what `load_row` makes them from.
template <class Entry, int m, int n, Along along, class B = Entry, class Real = RealOf<Entry>>
INLINE void tile(const Entry* __restrict a, int64_t step, const B* __restrict b, int64_t b_step,
                 Real* __restrict c, int64_t c_step, int64_t depth, bool add) {
    constexpr int w = W<Real>;
    V<Real> acc[m][n];
    UNROLL for (int i = 0; i < m; ++i) UNROLL for (int j = 0; j < n; ++j) acc[i][j] =
        add ? load(c + i * c_step + j * w) : V<Real>{};
    // Every third row of A. why: the rows between are one or two steps away, which is part of an address; offsets of
    // all rows do not fit the registers.
    constexpr int third = 3, thirds = along == Along::depth ? (m + third - 1) / third : 0;
    const Entry* row[thirds + 1];
    UNROLL for (int g = 0; g < thirds; ++g) {
        row[g] = a + g * third * step;
#if !defined(__clang__)
        asm("" : "+r"(row[g]));    // or GCC makes offsets of them
#endif
    }
    for (int64_t k = 0; k < depth; ++k) {
        V<Entry> x[n];
        UNROLL for (int j = 0; j < n; ++j) x[j] = load_row<Entry>(b + j * w, b_step, k);
        UNROLL for (int i = 0; i < m; ++i) {
            V<Entry> s =
                splat_at(along == Along::rows ? a + k * step + i : row[i / third] + i % third * step);
            UNROLL for (int j = 0; j < n; ++j) acc[i][j] = add_products<Entry>(acc[i][j], s, x[j]);
        }
        UNROLL for (int g = 0; g < thirds; ++g) row[g] += 1;
    }
    UNROLL for (int i = 0; i < m; ++i) UNROLL for (int j = 0; j < n; ++j)
        store(c + i * c_step + j * w, acc[i][j]);
}

// All rows, kRows at a time; what is left in tiles that halve. why two of the second size instead of a full one and a
// small one: small tiles wait for their own sums.
template <class Entry, int n, Along along, class Real = RealOf<Entry>>
__attribute__((noinline)) void strip(const Entry* a, int64_t step, const Entry* b, int64_t b_step, Real* c,
                                     int64_t c_step, int64_t rows, int64_t depth, bool add) {
    if constexpr (kTiles && kDepth<Entry> > 1) {
        static_assert(along == Along::depth, "what is multiplied along its rows is transposed first");
        return strip_of_tiles<n>(a, step, b, b_step, c, c_step, rows, depth, add);
    }
    constexpr int second = kRows / 3 * 2;
    auto next = [&](auto height) __attribute__((always_inline)) {
        constexpr int m = decltype(height)::value;
        tile<Entry, m, n, along>(a, step, b, b_step, c, c_step, depth, add);
        rows -= m, a += along == Along::rows ? m : m * step, c += m * c_step;
    };
    while (rows >= kRows && rows != 2 * second) next(Constant<kRows>());
    while (rows >= second) next(Constant<second>());
    if constexpr (second > 4)
        if (rows >= 4) next(Constant<4>());
    if (rows >= 2) next(Constant<2>());
    if (rows >= 1) next(Constant<1>());
}

// Lanes of C: n vectors of a panel.
template <Along along, int n = kVectors, class Entry, class Real = RealOf<Entry>>
INLINE void product(const Entry* a, int64_t step, const Entry* b, Real* c, int64_t rows, int64_t depth,
                    bool add) {
    strip<Entry, n, along>(a, step, b, kPanel<Real>, c, kPanel<Real>, rows, depth, add);
}

// Lanes of C: features, `width` of them, a multiple of the lanes of a vector.
template <Along along, class Entry, class Real = RealOf<Entry>>
INLINE void product_wide(const Entry* a, int64_t step, const Entry* b, int64_t b_step, Real* c,
                         int64_t c_step, int64_t rows, int64_t depth, int64_t width, bool add) {
    constexpr int two = kVectors * W<Real>;
    for (; width >= two; width -= two, b += two, c += two)
        strip<Entry, kVectors, along>(a, step, b, b_step, c, c_step, rows, depth, add);
    if (width > 0) strip<Entry, 1, along>(a, step, b, b_step, c, c_step, rows, depth, add);
}
