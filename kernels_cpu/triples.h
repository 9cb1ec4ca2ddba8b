// Products of floats by AMX. A float is the sum of three bfloat16 of 8 bits each, high, middle and low; of the nine
// products of two floats' parts the six largest are added, and the other three are below 2^-24 of their product.
//
// The three are exact for 0 and for sizes from 2^-100 to 2^60, with which no product overflows. A row of Q, K or V with
// any other number, an infinity or NaN is unusual, as is one of dO: rows that are, or see such a key, are computed with
// floats (forward.cpp, backward.cpp).
//
// layout: 32 floats along the depth are three tiles' rows of 16 pairs, one of each part. A pair is floats i and i + 16,
// so that nothing is shuffled: rows are split in their order. Missing floats are 0.
#pragma once
#include "operand.h"

#if defined(__AMX_BF16__)
struct Triples {
    uint32_t part[3][kTile];
};
template <>
struct Entries<Triples> {
    typedef float Real, Plain;
    static constexpr int64_t depth = 2 * kTile;
};

// Two vectors as three of pairs, `step` apart.
INLINE void split_in_three(V<float> first, V<float> second, uint32_t* to, int64_t step) {
    constexpr __mmask32 high_halves = 0xaaaaaaaa;
    UNROLL for (int i = 0; i < 3; ++i) {
        U<float> a = (U<float>)first, b = (U<float>)second;
        if (i < 2) a += 0x8000, b += 0x8000;    // rounded; the last is exact
        U<float> pairs = (U<float>)_mm512_mask_blend_epi16(high_halves, (__m512i)(a >> 16), (__m512i)b);
        memcpy(to + i * step, &pairs, sizeof pairs);
        first -= (V<float>)(pairs << 16), second -= (V<float>)(pairs & 0xffff0000);
    }
}
// The least and the largest size of floats, lane by lane; 0 is no size.
struct Sizes {
    U<float> least = {}, most = {};    // of the bits without a sign; the least as its negative
    __attribute__((always_inline)) void meet(V<float> x) {
        U<float> size = (U<float>)x << 1;
        least = bigger(least, -size), most = bigger(most, size);
    }
    static constexpr uint32_t lowest = 27u << 24, highest = 187u << 24;
    // The lanes in which not every float is exactly three bfloat16.
    uint32_t unusual() const {
        uint32_t found = 0;
        for (int l = 0; l < W<float>; ++l) found |= uint32_t((least[l] > -lowest) | (most[l] > highest)) << l;
        return found;
    }
    bool any_large() const { return any_bit((U<float>)(most > highest)); }
};
INLINE V<float> load_first(const float* from, int64_t count) {
    return (V<float>)_mm512_maskz_loadu_ps(__mmask16(count >= kTile ? 0xffff : (1u << most(count, 0)) - 1),
                                           from);
}

// Marks unusual rows.
RARE inline void find_unusual(const float* rows, int64_t step, int64_t count, int64_t width, bool* unusual) {
    for (int64_t i = 0; i < count; ++i, rows += step) {
        Sizes sizes;
        for (int64_t c = 0; c < width; c += kTile) sizes.meet(load_first(rows + c, width - c));
        unusual[i] = sizes.unusual() != 0;
    }
}
// Rows along the depth; whether all are usual, if none is left out as a row of 0.
inline __attribute__((noinline)) bool split_rows(const float* rows, int64_t step, int64_t count,
                                                 int64_t width, const bool* left_out, Triples* to) {
    Sizes sizes;
    for (int64_t i = 0; i < count; ++i, rows += step) {
        int64_t columns = left_out && left_out[i] ? 0 : width;
        for (int64_t c = 0; c < width; c += 2 * kTile, ++to) {
            V<float> x = load_first(rows + c, columns - c),
                     y = load_first(rows + c + kTile, columns - c - kTile);
            sizes.meet(x), sizes.meet(y);
            split_in_three(x, y, to->part[0], kTile);
        }
    }
    return !sizes.unusual();
}
// Rows along the features become rows along the keys, up(width, kTile) of them.
inline __attribute__((noinline)) bool split_transposed(const float* rows, int64_t step, int64_t count,
                                                       int64_t width, const bool* left_out, Triples* to,
                                                       int64_t to_step) {
    Sizes sizes;
    for (int64_t j = 0; j < count; j += 2 * kTile, ++to)
        for (int64_t c = 0; c < width; c += kTile) {
            V<float> x[2][kTile];
            for (int half = 0; half < 2; ++half) {
                for (int64_t i = 0, key = j + half * kTile; i < kTile; ++i, ++key) {
                    bool absent = key >= count || (left_out && left_out[key]);
                    x[half][i] = load_first(rows + key * step + c, absent ? 0 : width - c);
                    sizes.meet(x[half][i]);
                }
                transpose<float>(x[half]);
            }
            UNROLL for (int i = 0; i < kTile; ++i)
                split_in_three(x[0][i], x[1][i], to[(c + i) * to_step].part[0], kTile);
        }
    return !sizes.unusual();
}
// Columns become, of every 32 rows, the high parts in 16 rows of pairs, then the other two. In place: rows begin a third
// of the space behind it, and 16 rows of pairs are written where those before were read.
template <>
struct Columns<Triples> {
    static constexpr int64_t panel = kPanel<float>;
    static constexpr int64_t space(int64_t rows, int64_t width = panel) { return 3 * lead(rows, width); }
    static constexpr int64_t lead(int64_t rows, int64_t width = panel) {
        return blocks_of(rows, 2 * kTile) * kTile * width;
    }
    // Of `rows`, where there is space for `most`.
    static const Triples* of(float* space, int64_t rows, int64_t most) {
        return split(space, space + lead(most), rows, panel);
    }
    static const Triples* of(float* space, int64_t rows, int64_t most, int64_t width) {
        return split(space, space + lead(most, width), rows, width);
    }
    static const Triples* copied(float* space, const float* from, int64_t rows) {
        return split(space, from, rows, panel);
    }
    static const Triples* second_lanes(const Triples* columns) {
        return reinterpret_cast<const Triples*>(reinterpret_cast<const uint32_t*>(columns) + kTile);
    }

  private:
    static __attribute__((always_inline)) const Triples* split(float* space, const float* from, int64_t rows,
                                                               int64_t width) {
        const int64_t part = kTile * width;
        uint32_t* to = reinterpret_cast<uint32_t*>(space);
        for (int64_t r = 0; r < rows; r += 2 * kTile, from += part, to += 2 * part)
            for (int64_t i = 0; i < kTile; ++i, from += width, to += width)
                for (int64_t l = 0; l < width; l += kTile) {
                    V<float> x = r + i < rows ? load(from + l) : zero<float>();
                    V<float> y = r + i + kTile < rows ? load(from + part + l) : zero<float>();
                    split_in_three(x, y, to + l, part);
                }
        return reinterpret_cast<const Triples*>(space);
    }
};
// The lanes of columns with an unusual float.
inline __attribute__((noinline)) uint32_t unusual_lanes(const float* columns, int64_t rows) {
    Sizes sizes[kVectors];
    for (int64_t r = 0; r < rows; ++r, columns += kPanel<float>)
        UNROLL for (int j = 0; j < kVectors; ++j) sizes[j].meet(load(columns + j * kTile));
    return sizes[0].unusual() | sizes[1].unusual() << kTile;
}
// Rows of 32 lanes, each an operand; null if any float is too large. In place: rows begin a third of the space behind it.
// Behind the last one follow zeros, up to a whole tile.
template <>
struct Lines<Triples> {
    static constexpr int64_t step = 1, words = sizeof(Triples) / sizeof(float);
    static constexpr int64_t space(int64_t rows) { return rows * words; }
    static constexpr int64_t lead(int64_t rows) { return rows * (words - kPanel<float>); }
    static __attribute__((noinline)) const Triples* of(float* rows, int64_t count, int64_t most) {
        static_assert(kPanel<float> == 2 * kTile);
        Sizes sizes;
        Triples *first = reinterpret_cast<Triples*>(rows - lead(most)), *to = first;
        const float* from = rows;
        for (int64_t i = 0; i < count; ++i, ++to, from += kPanel<float>) {
            V<float> x = load(from), y = load(from + kTile);
            sizes.meet(x), sizes.meet(y);
            split_in_three(x, y, to->part[0], kTile);
        }
        memset(to, 0, size_t(up(count, kTile) - count) * sizeof(Triples));
        return sizes.any_large() ? nullptr : first;
    }
};

// m x n tiles of C. The small products come first, and each step loads one operand.
template <int m, int n>
INLINE void tiles(const Triples* a, int64_t step, const Triples* b, int64_t b_step, float* c, int64_t c_step,
                  int64_t steps, bool add) {
    constexpr int64_t words = sizeof(Triples) / sizeof(uint32_t);
    load_c<m, n>(c, c_step, add);
    for (int64_t k = 0; k < steps; ++k, ++a, b += b_step) {
        const auto load_a = [&](int part) __attribute__((always_inline)) {
            load_tile<4>(a->part[part], step * words);
            if constexpr (m > 1) load_tile<5>(a[kTile * step].part[part], step * words);
        };
        const auto load_b = [&](int part) __attribute__((always_inline)) {
            const uint32_t* rows = b->part[0] + part * kTile * b_step;
            load_tile<6>(rows, b_step);
            if constexpr (n > 1) load_tile<7>(rows + kTile, b_step);
        };
        const auto multiply = [&] {
            multiply_tiles<0, 4, 6>();
            if constexpr (n > 1) multiply_tiles<1, 4, 7>();
            if constexpr (m > 1) multiply_tiles<2, 5, 6>();
            if constexpr (m > 1 && n > 1) multiply_tiles<3, 5, 7>();
        };
        load_a(0), load_b(2), multiply();
        load_b(1), multiply();
        load_a(1), multiply();
        load_b(0), multiply();
        load_a(2), multiply();
        load_a(0), multiply();
    }
    store_c<m, n>(c, c_step);
}

// Up to 15 rows behind the last one are multiplied too.
template <Along along, int n = kVectors>
__attribute__((noinline)) void product(const Triples* a, int64_t step, const Triples* b, float* c,
                                       int64_t rows, int64_t depth, bool add) {
    static_assert(along == Along::depth);
    constexpr int64_t panel = kPanel<float>;
    for (; rows > kTile; rows -= 2 * kTile, a += 2 * kTile * step, c += 2 * kTile * panel)
        tiles<2, n>(a, step, b, panel, c, panel, depth, add);
    if (rows > 0) tiles<1, n>(a, step, b, panel, c, panel, depth, add);
}

// The same of `width` lanes. why columns of C are the inner loop: then two rows of tiles of A stay in L1, and B is small.
template <Along along>
__attribute__((noinline)) void product_wide(const Triples* a, int64_t step, const Triples* b, int64_t b_step,
                                            float* c, int64_t c_step, int64_t rows, int64_t depth,
                                            int64_t width, bool add) {
    static_assert(along == Along::depth);
    const auto next = [&](auto height) __attribute__((always_inline)) {
        constexpr int m = decltype(height)::value;
        const auto at = [&](int64_t lane) {
            return reinterpret_cast<const Triples*>(reinterpret_cast<const uint32_t*>(b) + lane);
        };
        int64_t l = 0;
        for (; l + 2 * kTile <= width; l += 2 * kTile)
            tiles<m, 2>(a, step, at(l), b_step, c + l, c_step, depth, add);
        if (l < width) tiles<m, 1>(a, step, at(l), b_step, c + l, c_step, depth, add);
    };
    for (; rows > kTile; rows -= 2 * kTile, a += 2 * kTile * step, c += 2 * kTile * c_step)
        next(Constant<2>());
    if (rows > 0) next(Constant<1>());
}

// Keys or values as a product reads them, unusual ones as 0.
template <>
struct Operand<Triples, float> {
    const Keys<float>& keys;
    bool any_unusual = false;        // of the keys that were read last
    bool unusual[kSpanKeys] = {};    // each of them, if any is
    static constexpr bool kTransposed = true;
    static constexpr int64_t words = sizeof(Triples) / sizeof(float);

    int64_t of_rows(int64_t count) const { return words * count * blocks_of(keys.width, 2 * kTile); }
    int64_t of_columns(int64_t count) const {
        return words * up(keys.width, kTile) * blocks_of(count, 2 * kTile);
    }
    int64_t copied(int64_t count) const { return keys.in_place() ? 0 : count * keys.width; }
    int64_t space_of_rows(int64_t count) const { return of_rows(count) + copied(count); }
    int64_t space_of_columns(int64_t count) const { return of_columns(count) + copied(count); }
    // The depth is features: row i is key j + i.
    const Triples* rows(int64_t j, int64_t count, float* space, int64_t* step) {
        Triples* to = reinterpret_cast<Triples*>(space);
        *step = blocks_of(keys.width, 2 * kTile);
        return read(j, count, space + of_rows(count), to,
                    [&](auto... from) { return split_rows(from..., to); });
    }
    // The depth is keys: row i is a feature.
    const Triples* columns(int64_t j, int64_t count, float* space, int64_t* step) {
        Triples* to = reinterpret_cast<Triples*>(space);
        *step = blocks_of(count, 2 * kTile);
        return read(j, count, space + of_columns(count), to,
                    [&](auto... from) { return split_transposed(from..., to, *step); });
    }
    // As of other entries. Here all are finite.
    int64_t space_of_finite_columns(int64_t count) const { return space_of_columns(count); }
    const Triples* finite_columns(const Triples*, int64_t j, int64_t count, float* space, int64_t* step) {
        return columns(j, count, space, step);
    }
    // The lanes that see an unusual key, of a tile of scores that begins at key `first` of those read.
    uint32_t unusual_lanes(int64_t first, int64_t count, const float* tile) const {
        return any_unusual ? lanes_of(unusual + first, count, tile) : 0;
    }

  private:
    RARE static uint32_t lanes_of(const bool* which, int64_t count, const float* tile) {
        uint32_t found = 0;
        for (int64_t i = 0; i < count; ++i, tile += kPanel<float>)
            for (int64_t l = 0; which[i] && l < kPanel<float>; ++l)
                found |= uint32_t(!(tile[l] == -kInfinity<float>)) << l;
        return found;
    }
    template <class Split>
    const Triples* read(int64_t j, int64_t count, float* space, const Triples* to, Split split) {
        int64_t step;
        const float* from = keys.rows(j, count, space, &step);
        any_unusual = !split(from, step, count, keys.width, static_cast<const bool*>(nullptr));
        if (any_unusual) {
            find_unusual(from, step, count, keys.width, unusual);
            split(from, step, count, keys.width, static_cast<const bool*>(unusual));
        }
        return to;
    }
};
#endif
