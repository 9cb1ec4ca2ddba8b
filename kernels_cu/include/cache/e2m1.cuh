// Codes of NVFP4 as operands of products: elements of Q's type in units of kUnit, exact.
// Design note: docs/kernels/decode.md.
//
// layout: words of units lie as [segment][key], two scales each: the lower half is that of features 0 to 15 of the segment.
#pragma once
#include "cache/codes.cuh"

// Nibble j of both halves of a register as a pair of elements, times the scales of the key that both are of, or of
// two keys.
//
// why: a sign, two bits of exponent and one of mantissa moved to their places in a half (a bfloat16) are the value
// times 2^-14 (2^-126), 0.5 included. A half holds 2^-14 times every product with a scale, whose last bit is
// 2^-10; a bfloat16 holds it by a scale times 2^118.
template <class Element> struct E2m1Pairs {
    static constexpr bool kHalf = kSame<Element, __half>;
    uint32_t scale;

    CF_DEVICE static E2m1Pairs of_key(uint32_t word) {
        return {permute_bytes(word, 0, threadIdx.x % 4 < 2 ? 0x1010 : 0x3232)};
    }
    CF_DEVICE static E2m1Pairs of_keys(uint2 words) {
        return {permute_bytes(words.x, words.y, threadIdx.x % 32 < 16 ? 0x5410 : 0x7632)};
    }
    CF_DEVICE uint32_t at(uint32_t x, int j) const {
        if constexpr (kHalf) {
            // why every other nibble: then those beside it are 0 wherever the mask looks.
            const uint32_t of = x & (j % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
            const uint32_t sizes = j < 3 ? of << (9 - 4 * j) : of >> 3;
            const uint32_t bits = (of << (12 - 4 * j) | sizes) & 0x8e008e00u;
            const __half2 value =
                __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(scale));
            return reinterpret_cast<const uint32_t&>(value);
        } else {
            // why a product: sign and size go to places of their own, in one operation.
            const uint32_t of = (j < 2 ? x : x >> 8) & (j % 2 ? 0x00f000f0u : 0x000f000fu);
            const uint32_t bits = of * (j % 2 ? 0x104u : 0x1040u) & 0x81c081c0u;
            const __nv_bfloat162 value = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits),
                                                 reinterpret_cast<const __nv_bfloat162&>(scale));
            return reinterpret_cast<const uint32_t&>(value);
        }
    }
    // Of two stored scales, the lower in the lower byte, a word of units.
    CF_DEVICE static uint32_t word(uint32_t bytes) {
        const uint32_t bits = widen2<Stored::e4m3, Element>(bytes, false);
        if constexpr (kHalf) {
            const __half2 value = __hmul2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(256.0f));
            return reinterpret_cast<const uint32_t&>(value);
        } else {
            const __nv_bfloat162 value =
                __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), __float2bfloat162_rn(0x1p118f));
            return reinterpret_cast<const uint32_t&>(value);
        }
    }
};

// Scales of a step on their way to shared memory; of K, or of V.
//
// why registers: a row may have one scale, a byte, and cp.async copies 4 that are aligned. They are loaded with
// the codes of their step, and stored when the next step's are loaded.
// layout: lane l has key l % 16 of segments l / 16 + 2i.
template <class Element, int kSegments> struct E2m1Units {
    enum : int { kPairs = kSegments / 2, kBytes = 4 * kSegments * kStepKeys };
    static constexpr bool kAddressesInRegisters = addresses_in_registers(kSegments);
    int64_t first;    // address of the first scale of this lane's key in row 0 of slot 0
    uint8_t lower[kPairs], upper[kPairs];

    CF_DEVICE E2m1Units(const Units& units, int32_t head, int32_t) {
        first = kAddressesInRegisters ? of_head(units, head) : 0;
    }
    CF_DEVICE static int64_t of_head(const Units& units, int32_t head) {
        const int32_t key = threadIdx.x % 16, segment = threadIdx.x % 32 / 16;
        return reinterpret_cast<int64_t>(units.scale) + (head * units.head + key * units.row + 2 * segment);
    }
    CF_DEVICE void load(const Units& units, int32_t slot, int32_t head, int32_t row, int32_t rows,
                        int32_t columns) {
        const int32_t key = threadIdx.x % 16, segment = threadIdx.x % 32 / 16;
        const int64_t at =
            (kAddressesInRegisters ? first : of_head(units, head)) + (slot * units.slot + row * units.row);
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const int32_t feature = (segment + 2 * i) * kSegment;
            const bool exists = key < rows && feature < columns;
            const bool both = exists && feature + kSegment / 2 < columns;
            lower[i] = exists ? ld_global_nc(reinterpret_cast<const uint8_t*>(at + 4 * i)) : 0;
            upper[i] = both ? ld_global_nc(reinterpret_cast<const uint8_t*>(at + 4 * i + 1)) : 0;
        }
    }
    CF_DEVICE static bool drops_factor(int32_t) { return false; }
    CF_DEVICE void store(uint32_t to, int32_t) const {
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const uint32_t both = uint32_t(lower[i]) | uint32_t(upper[i]) << 8;
            st_shared(to + 4 * (threadIdx.x % 32 + 32 * i), E2m1Pairs<Element>::word(both));
        }
    }
};

// Tiles of codes of 16 keys as B, for a warp. Codes is the tile as it is stored.
template <class Math, class Codes> struct E2m1Tiles {
    enum : int { kSegments = Codes::kPitch / 16 };
    using Pairs = E2m1Pairs<typename Math::Element>;
    using KeyUnits = E2m1Units<typename Math::Element, kSegments>;
    using ValueUnits = KeyUnits;
    enum : int { kKeptBytes = 0 };

    template <class RowsA> CF_DEVICE E2m1Tiles(RowsA, uint32_t) {}
    // d += A B^T over the whole row of a tile: S = Q K^T; as multiply_by_rows.
    template <class RowsA>
    CF_DEVICE void multiply_by_rows(float (&d)[1][2][4], RowsA a, uint32_t codes, uint32_t units) const {
        const BlockReader<Codes, Order::chunks_first> b(codes);
        const uint32_t unit = units + threadIdx.x % 32 / 4 * 4;    // of key g
        CF_UNROLL
        for (int block = 0; block < kSegments / 2; block++) {
            uint32_t words[4];    // segments 2 block and 2 block + 1 of keys 0 to 7, then of 8 to 15
            b.load(words, 0, block);
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                const int segment = 2 * block + i;
                uint32_t value[2][4];
                CF_UNROLL
                for (int n = 0; n < 2; n++) {
                    const auto of =
                        Pairs::of_key(ld_shared<uint32_t>(unit + segment * 4 * kStepKeys + n * 32));
                    CF_UNROLL
                    for (int j = 0; j < 4; j++) value[n][j] = of.at(words[2 * n + i], j);
                }
                CF_UNROLL
                for (int s = 0; s < 2; s++) {
                    uint32_t a_block[4];
                    a.load(a_block, 0, 2 * segment + s);
                    const auto a_step = Math::prepare(a_block);
                    const typename Math::Fragment b_step = {
                        {{value[0][2 * s], value[0][2 * s + 1], value[1][2 * s], value[1][2 * s + 1]}}};
                    Math::multiply(d[0][0], a_step, b_step, 0);
                    Math::multiply(d[0][1], a_step, b_step, 1);
                }
            }
        }
    }

    // d += A B over the 16 rows of a tile, with A the accumulator of an earlier product: O += P V; as
    // multiply_by_columns.
    template <int kN>
    CF_DEVICE void multiply_by_columns(float (&d)[1][kN][4], const float (&a)[1][2][4], uint32_t codes,
                                       uint32_t units) const {
        const BlockReader<Codes, Order::rows_first> b(codes);
        const auto a_step = Math::from_accumulator(a[0], 0);
        const uint32_t unit = units + threadIdx.x % 4 * 8;    // of keys 2t and 2t + 1
        CF_UNROLL
        for (int block = 0; block < kSegments / 2; block++) {
            uint32_t words[4];    // of segment 2 block keys 0 to 7 and 8 to 15, then of 2 block + 1
            ldmatrix_x4_trans(words, b.address(0, block));
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                const int segment = 2 * block + i;
                uint32_t value[2][4];
                CF_UNROLL
                for (int half = 0; half < 2; half++) {
                    const auto of =
                        Pairs::of_keys(ld_shared<uint2>(unit + segment * 4 * kStepKeys + half * 32));
                    CF_UNROLL
                    for (int j = 0; j < 4; j++) value[half][j] = of.at(words[2 * i + half], j);
                }
                CF_UNROLL
                for (int j = 0; j < 4; j++) {
                    const typename Math::Fragment b_step = {{{value[0][j], value[1][j], 0, 0}}};
                    Math::multiply(d[0][4 * segment + j], a_step, b_step, 0);
                }
            }
        }
    }
    // Sums are O as they are, but for the maxima of rows.
    template <int kN> CF_DEVICE static void finalize(float (&)[1][kN][4], const ValueUnits&, int32_t) {}
    template <int kN> CF_DEVICE static void rescale_o(float (&d)[1][kN][4], const float (&rescale)[2], bool) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int e = 0; e < 4; e++) d[0][n][e] *= rescale[e / 2];
        }
    }
};
