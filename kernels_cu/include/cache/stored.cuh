// What a cache stores that is not the element type of the queries: int8 and float8 e4m3, widened when they
// are read and rounded when they are appended.
// Design note: docs/kernels/decode.md.
#pragma once
#include "element.cuh"
#include "tile/tile.cuh"

// same: the element type of the queries. int4, nvfp4: codes, see cache/codes.cuh.
enum class Stored { same, int8, e4m3, int4, nvfp4 };
constexpr bool of_codes(Stored stored) { return stored == Stored::int4 || stored == Stored::nvfp4; }

// What a widened element has to be multiplied by: the caller does it once, with the scale.
template <Stored kStored, class Element>
inline constexpr float kUnit = kStored == Stored::nvfp4 ? (kSame<Element, __half> ? 16384.0f : 256.0f)
                               : kStored == Stored::e4m3 && kSame<Element, __half> ? 256.0f
                                                                                   : 1.0f;

// The lower or the upper two of four stored bytes as a pair of 16-bit elements in units of kUnit; exact.
//
// why: int8: with b = byte ^ 0x80, the half 0x6400 | b is 1024 + b, from which 1024 + 128 is taken. e4m3: its
// sign, exponent and mantissa moved to their places in a half (a bfloat16) are the value times 2^-8 (2^-120),
// subnormals included. Products of halves take that as it is; sums of values times 2^-120 would be lost. (The
// two encodings of NaN read as +-480: appending never stores them.)
template <Stored kStored, class Element>
CF_DEVICE uint32_t widen2(uint32_t x, bool upper) {
    constexpr bool kHalf = kSame<Element, __half>;
    if constexpr (kStored == Stored::int8) {
        const uint32_t bits = permute_bytes(x ^ 0x80808080u, 0x64646464u, upper ? 0x4342 : 0x4140);
        const __half2 raw = reinterpret_cast<const __half2&>(bits);
        const __half2 value = __hsub2(raw, __float2half2_rn(1152.0f));
        if constexpr (kHalf) return reinterpret_cast<const uint32_t&>(value);
        const float2 wide = __half22float2(value);
        return pack<__nv_bfloat16>(wide.x, wide.y);
    } else {
        const uint32_t high = permute_bytes(x, 0u, upper ? 0x3424 : 0x1404);
        const uint32_t size = high >> (kHalf ? 1 : 4) & (kHalf ? 0x3f803f80u : 0x07f007f0u);
        const uint32_t bits = (high & 0x80008000u) | size;
        if constexpr (kHalf) return bits;
        const __nv_bfloat162 value =
            __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), __float2bfloat162_rn(0x1p120f));
        return reinterpret_cast<const uint32_t&>(value);
    }
}

// One stored byte as its number.
template <Stored kStored> CF_DEVICE float widen_one(uint8_t x) {
    if constexpr (kStored == Stored::int8) return static_cast<int8_t>(x);
    // Exponent and mantissa in the places of a float, subnormals included: the value times 2^-120.
    const float size = __uint_as_float(uint32_t(x & 0x7f) << 20) * 0x1p120f;
    return x & 0x80 ? -size : size;
}

// A code of E2M1 as its number.
CF_DEVICE float widen_e2m1(uint32_t code) {
    const float size = __uint_as_float((code & 7u) << 22) * 0x1p126f;
    return code & 8u ? -size : size;
}

// Eight stored bytes as a chunk of 16-bit elements.
template <Stored kStored, class Element>
CF_DEVICE uint4 widen8(uint32_t x, uint32_t y) {
    return {widen2<kStored, Element>(x, false), widen2<kStored, Element>(x, true),
            widen2<kStored, Element>(y, false), widen2<kStored, Element>(y, true)};
}

// A thread widens a chunk of a tile of stored bytes into two of a tile of 16-bit elements.
//
// layout: 8 neighbouring lanes read 8 neighbouring chunks. Where they share a row, the second four write their odd
// chunk first, so that one store touches 8 different groups of banks.
template <Stored kStored, class From, class To>
CF_DEVICE void widen_chunk(uint32_t to_address, uint32_t from_address, int row, int chunk) {
    const bool odd_first = From::kChunks >= 8 && (chunk >> 2 & 1);
    const uint4 x = ld_shared<uint4>(from_address + From::offset(row, chunk));
    const int first = 2 * chunk + odd_first;
    using Element = typename To::Element;
    st_shared(to_address + To::offset(row, first),
              widen8<kStored, Element>(odd_first ? x.z : x.x, odd_first ? x.w : x.y));
    st_shared(to_address + To::offset(row, first ^ 1),
              widen8<kStored, Element>(odd_first ? x.x : x.z, odd_first ? x.y : x.w));
}

// A warp widens a tile.
template <Stored kStored, class From, class To>
CF_DEVICE void widen_tile(uint32_t to_address, uint32_t from_address) {
    constexpr int kCopies = From::kRows * From::kChunks / 32;
    CF_UNROLL
    for (int i = 0; i < kCopies; i++) {
        const int at = threadIdx.x % 32 + 32 * i;
        widen_chunk<kStored, From, To>(to_address, from_address, at / From::kChunks, at % From::kChunks);
    }
}

// Tiles of K and V as the products of a warp read them: their addresses are x and y.
template <Stored kStored, class From, class To>
struct Operands {
    To k_wide, v_wide;

    CF_DEVICE uint2 from(uint32_t k, uint32_t v) const {
        const uint2 to{smem_addr(k_wide.data), smem_addr(v_wide.data)};
        widen_tile<kStored, From, To>(to.x, k);
        widen_tile<kStored, From, To>(to.y, v);
        // sync: the lanes' parts of the widened tiles are visible to the warp.
        __syncwarp();
        return to;
    }
};
template <class From, class To>
struct Operands<Stored::same, From, To> {
    CF_DEVICE uint2 from(uint32_t k, uint32_t v) const { return {k, v}; }
};
template <class From, class To>
struct Operands<Stored::int4, From, To> : Operands<Stored::same, From, To> {};
template <class From, class To>
struct Operands<Stored::nvfp4, From, To> : Operands<Stored::same, From, To> {};

// The nearest stored value, ties to even; what is too large becomes the largest.
CF_DEVICE uint8_t narrow_int8(float x) {
    return static_cast<uint8_t>(static_cast<int32_t>(rintf(fminf(fmaxf(x, -127.0f), 127.0f))));
}
// why: cvt to e4m3 exists from sm_89 on, and appending is a few rows.
CF_DEVICE uint8_t narrow_e4m3(float x) {
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
    const float size = fminf(fabsf(x), 448.0f);
    if (size < 0.015625f) {
        // Below the smallest normal number steps are 2^-9; a value that rounds up to it has its encoding.
        return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(size * 512.0f)));
    }
    const uint32_t bits = __float_as_uint(size);
    const uint32_t rounded = bits + 0x7ffffu + (bits >> 20 & 1u);
    return static_cast<uint8_t>(sign | ((rounded >> 20) - ((127 - 7) << 3)));
}
// The place of the nearest size of E2M1: from 2 on its steps are 1, from 4 on 2, below 0.5.
CF_DEVICE uint32_t narrow_e2m1(float size) {
    const float code = size < 2   ? rintf(size * 2)
                       : size < 4 ? rintf(size) + 2
                                  : rintf(fminf(size, 6.0f) / 2) + 4;
    return static_cast<uint32_t>(code);
}
