// Products of pairs of bfloat16 by AMX: C (16 rows x 16 floats) += A (16 x 16 pairs) B (16 x 16 pairs), in one instruction
// of 16 cycles, 16 times the rate of floats.
//
// A is read in place, rows along the depth; B comes from `down`, which makes one row of each pair of rows. Four tiles of C stay in
// registers, two rows of them by two columns; two each hold A and B. Tiles are full but for the last rows and the end of
// the depth, for which they get other shapes. Each job begins and ends with full ones (pool.h): a shape takes as
// long as ten products.
#pragma once
#include "entries.h"

#if defined(__AMX_BF16__)
constexpr bool kTiles = true;
constexpr int64_t kTile = 16;    // rows; floats or pairs of a row

// Shapes of the eight registers: 0 to 3 are C, row by row, 4 and 5 A, 6 and 7 B.
class TileShapes {
  public:
    TileShapes() { set(kTile, kTile); }
    ~TileShapes() { asm volatile("tilerelease" ::: "memory"); }
    TileShapes(const TileShapes&) = delete;

    // Rows of A and of C, and the depth in pairs.
    static void set(int64_t rows, int64_t depth) {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; ++i) {
            shapes.row_bytes[i] = uint16_t(4 * (i == 4 || i == 5 ? depth : kTile));
            shapes.rows[i] = uint8_t(i < 6 ? rows : depth);
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
};

// why not the headers' intrinsics: GCC's do not tell the compiler that they read and write memory.
template <int tile, class T>
INLINE void load_tile(const T* from, int64_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step * 4), "i"(tile) : "memory");
}
template <int tile>
INLINE void store_tile(float* to, int64_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step * 4), "i"(tile) : "memory");
}
template <int tile>
INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int c, int a, int b>
INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

// At every 64th key: a product of whatever registers hold. why: after some 300 ns without one the unit sleeps, and the next
// takes 280 ns more. why not of triples: there a product among vector code costs more than that.
template <class Entry>
INLINE void stay_awake(int64_t key) {
    if constexpr (kRounds<Entry>)
        if (key % 64 == 0) multiply_tiles<0, 4, 6>();
}

// The m x n tiles of C: each with the place that it has in memory.
template <int m, int n, class What>
INLINE void each_of_c(float* c, int64_t step, What what) {
    what(Constant<0>(), c);
    if constexpr (n > 1) what(Constant<1>(), c + kTile);
    if constexpr (m > 1) what(Constant<2>(), c + kTile * step);
    if constexpr (m > 1 && n > 1) what(Constant<3>(), c + kTile * step + kTile);
}
template <int m, int n>
INLINE void load_c(float* c, int64_t step, bool add) {
    each_of_c<m, n>(c, step, [&](auto i, float* at) __attribute__((always_inline)) {
        if (add) load_tile<i.value>(at, step);
        else clear_tile<i.value>();
    });
}
template <int m, int n>
INLINE void store_c(float* c, int64_t step) {
    each_of_c<m, n>(c, step,
                    [&](auto i, float* at) __attribute__((always_inline)) { store_tile<i.value>(at, step); });
}

template <int m, int n>
INLINE void tiles(const Pair* a, int64_t step, const Pair* b, int64_t b_step, float* c, int64_t c_step,
                  int64_t steps, bool add) {
    load_c<m, n>(c, c_step, add);
    for (int64_t k = 0; k < steps; ++k, a += kTile, b += kTile * b_step) {
        load_tile<6>(b, b_step), load_tile<4>(a, step);
        multiply_tiles<0, 4, 6>();
        if constexpr (n > 1) load_tile<7>(b + kTile, b_step), multiply_tiles<1, 4, 7>();
        if constexpr (m > 1) load_tile<5>(a + kTile * step, step), multiply_tiles<2, 5, 6>();
        if constexpr (m > 1 && n > 1) multiply_tiles<3, 5, 7>();
    }
    store_c<m, n>(c, c_step);
}

// All rows; the depth is whole tiles, or less than one.
template <int n>
INLINE void tile_rows(const Pair* a, int64_t step, const Pair* b, int64_t b_step, float* c, int64_t c_step,
                      int64_t rows, int64_t depth, bool add) {
    int64_t of_tile = least(depth, kTile), steps = of_tile ? depth / of_tile : 0;
    if (of_tile % kTile) TileShapes::set(kTile, of_tile);
    for (; rows >= 2 * kTile; rows -= 2 * kTile, a += 2 * kTile * step, c += 2 * kTile * c_step)
        tiles<2, n>(a, step, b, b_step, c, c_step, steps, add);
    if (rows >= kTile) {
        tiles<1, n>(a, step, b, b_step, c, c_step, steps, add);
        rows -= kTile, a += kTile * step, c += kTile * c_step;
    }
    if (rows) {
        TileShapes::set(rows, of_tile ? of_tile : kTile);
        tiles<1, n>(a, step, b, b_step, c, c_step, steps, add);
    }
    if (rows || of_tile % kTile) TileShapes::set(kTile, kTile);
}
template <int n>
INLINE void strip_of_tiles(const Pair* a, int64_t step, const Pair* b, int64_t b_step, float* c,
                           int64_t c_step, int64_t rows, int64_t depth, bool add) {
    int64_t whole = depth / kTile * kTile;
    if (whole || depth == 0) tile_rows<n>(a, step, b, b_step, c, c_step, rows, whole, add);
    if (whole < depth)
        tile_rows<n>(a + whole, step, b + whole * b_step, b_step, c, c_step, rows, depth - whole,
                     add || whole);
}

// Rows of pairs that lie along the features become rows along the keys, `to_step` pairs apart: up(width, 2) of them.
inline __attribute__((noinline)) void transpose_pairs(const Pair* rows, int64_t step, int64_t count,
                                                      int64_t width, Pair* to, int64_t to_step) {
    alignas(64) static constexpr uint16_t low_halves[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                            22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                            44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i low = _mm512_load_si512(low_halves), high = _mm512_add_epi16(low, _mm512_set1_epi16(1));
    constexpr int w = W<float>;
    int64_t pairs = blocks_of(width, 2);
    for (int64_t j = 0; j < count; j += 2 * w)
        for (int64_t c = 0; c < pairs; c += w) {
            V<float> x[2][w];
            __mmask16 there = pairs - c >= w ? 0xffff : __mmask16((1u << (pairs - c)) - 1);
            for (int half = 0; half < 2; ++half) {
                for (int i = 0; i < w; ++i) {
                    int64_t key = j + half * w + i;
                    x[half][i] =
                        (V<float>)_mm512_maskz_loadu_epi32(key < count ? there : 0, rows + key * step + c);
                }
                transpose<float>(x[half]);
            }
            for (int64_t i = 0; i < least(w, pairs - c); ++i) {
                Pair* row = to + 2 * (c + i) * to_step + j / 2;
                __m512i first = (__m512i)x[0][i], second = (__m512i)x[1][i];
                _mm512_storeu_si512(row, _mm512_permutex2var_epi16(first, low, second));
                _mm512_storeu_si512(row + to_step, _mm512_permutex2var_epi16(first, high, second));
            }
        }
}
// Infinities and NaN become 0.
inline __attribute__((noinline)) void make_finite(Pair* x, int64_t count) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int64_t i = 0; i < count; i += kTile) {
        __m512i halves = _mm512_loadu_si512(x + i);
        __mmask32 finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(halves, exponent), exponent);
        _mm512_storeu_si512(x + i, _mm512_maskz_mov_epi16(finite, halves));
    }
}
#else
constexpr bool kTiles = false;
constexpr int64_t kTile = 1;
template <class Entry>
INLINE void stay_awake(int64_t) {}
struct TileShapes {
    TileShapes() {}    // why: then it is not an unused variable
};
#endif
