// Operands of products: reals, or pairs of bfloat16, neighbours along the depth, whose two products one instruction adds
// (AVX512-BF16). Sums are reals.
//
// Q, K, V and dO are bfloat16 already and lose nothing; weights and dS are rounded, as kernels of GPUs round them.
// layout: depth x lanes reals become half as many rows of pairs, with 0 for a missing row; where rows are along the
// depth, each becomes half as many pairs and begins where it did. Both in place.
#pragma once
#include "panel.h"

enum Pair : uint32_t {};    // the first of the two in the low half
struct Triples;             // triples.h

template <>
struct Lanes<Pair> {
    typedef uint32_t V __attribute__((vector_size(kVectorBytes)));
    typedef uint32_t Anywhere __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
};
template <class Entry>
struct Entries {
    typedef Entry Real, Plain;
    static constexpr int64_t depth = 1;    // reals of an entry
};
template <>
struct Entries<Pair> {
    typedef float Real;
    typedef Pair Plain;
    static constexpr int64_t depth = 2;
};
template <class Entry>
using RealOf = typename Entries<Entry>::Real;
// The entries that compute what these cannot hold.
template <class Entry>
using Plain = typename Entries<Entry>::Plain;
template <class Entry>
constexpr int64_t kDepth = Entries<Entry>::depth;
// Whether reals are rounded where they become entries.
template <class Entry>
constexpr bool kRounds = __is_same(Entry, Pair);

// The entry at a place in every lane.
template <class Real>
INLINE V<Real> splat_at(const Real* p) {
    return splat(*p);
}
INLINE V<Pair> splat_at(const Pair* p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);    // why: a row of bfloat16 begins at any even address
    return x | V<Pair>{};
}
#if defined(__AVX512BF16__)
INLINE V<float> add_both(V<float> sum, V<Pair> a, V<Pair> b) {
    return (V<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// Two vectors, rounded, one behind the other.
INLINE V<Pair> both(V<float> first, V<float> second) {
    return (V<Pair>)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
// The halves of a vector, interleaved.
INLINE V<Pair> interleave(__m512i halves) {
    alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (V<Pair>)_mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
}
// The lanes of two vectors, rounded, interleaved; or those that lie in memory.
INLINE V<Pair> interleave(V<float> first, V<float> second) {
    return interleave((__m512i)both(first, second));
}
INLINE V<Pair> interleave(const Bf16* first, const Bf16* second) {
    const auto half = [](const Bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    // why a mask: GCC warns of the header's form without one.
    return interleave(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(first)), half(second), 1));
}
#endif

template <class Entry>
INLINE V<RealOf<Entry>> add_products(V<RealOf<Entry>> sum, V<Entry> a, V<Entry> b) {
    if constexpr (kDepth<Entry> == 1) return sum + a * b;
    else return add_both(sum, a, b);
}

// Rows of `width` reals, `step` apart, that follow the depth: what a product multiplies. It may be in place, of rows
// that are whole vectors apart.
template <class Entry, class Real = RealOf<Entry>>
INLINE const Entry* down(Real* to, const Real* from, int64_t rows, int64_t width, int64_t step) {
    if constexpr (kDepth<Entry> == 1) return from;
    else {
        for (int64_t r = 0; r < rows; r += 2)
            for (int64_t c = 0; c < width; c += W<Real>) {
                V<Real> second = r + 1 < rows ? load(from + (r + 1) * step + c) : zero<Real>();
                store(reinterpret_cast<Entry*>(to + r / 2 * step + c),
                      interleave(load(from + r * step + c), second));
            }
        return reinterpret_cast<const Entry*>(to);
    }
}
// The same for rows along the depth, of whole panels.
template <class Entry, class Real = RealOf<Entry>>
INLINE const Entry* along(Real* rows, int64_t count, int64_t step) {
    if constexpr (kDepth<Entry> == 1) return rows;
    else {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < step; c += 2 * W<Real>) {
                const Real* at = rows + r * step + c;
                store(reinterpret_cast<Entry*>(rows + r * step) + c / 2, both(load(at), load(at + W<Real>)));
            }
        return reinterpret_cast<const Entry*>(rows);
    }
}

// Columns (rows x width) of reals, which become operands where they lie.
template <class Entry>
struct Columns {
    using Real = RealOf<Entry>;
    static constexpr int64_t space(int64_t rows, int64_t width = kPanel<Real>) { return rows * width; }
    // Where in the space of this many rows reals are.
    static constexpr int64_t lead(int64_t, int64_t = kPanel<Real>) { return 0; }
    static const Entry* of(Real* space, int64_t rows, int64_t, int64_t width = kPanel<Real>) {
        return down<Entry>(space, space, rows, width, width);
    }
    // Of reals that lie elsewhere; without a space if entries are reals.
    static const Entry* copied(Real* space, const Real* from, int64_t rows) {
        return down<Entry>(space, from, rows, kPanel<Real>, kPanel<Real>);
    }
    static const Entry* second_lanes(const Entry* columns) { return columns + W<Real>; }
};

// A tile (rows x kPanel) of reals, whose rows become operands along their lanes where they lie.
template <class Entry>
struct Lines {
    using Real = RealOf<Entry>;
    static constexpr int64_t step = kPanel<Real>;
    static constexpr int64_t space(int64_t rows) { return rows * kPanel<Real>; }
    static constexpr int64_t lead(int64_t) { return 0; }    // as of Columns
    static const Entry* of(Real* rows, int64_t count, int64_t) {
        return along<Entry>(rows, count, kPanel<Real>);
    }
};

// A vector of row k of an operand: as stored, or pairs made of two rows of 16-bit elements.
template <class Entry, class B>
INLINE V<Entry> load_row(const B* b, int64_t step, int64_t k) {
    if constexpr (sizeof(B) == sizeof(Entry) || kDepth<Entry> == 1) return load(b + k * step);
    else return interleave(b + 2 * k * step, b + (2 * k + 1) * step);
}
