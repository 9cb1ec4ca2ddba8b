// What a cache stores that is not the element type of the queries: int8 and float8 e4m3, widened when they
// are read and rounded when they are appended.
#pragma once
#include "element.cuh"
#include "tile.cuh"

// same: the element type of the queries.
enum class Stored { same, int8, e4m3 };

// The halves of four stored bytes, in their order; exact.
// why: int8: a byte b of x ^ 0x80 under the exponent of 1024 is the half 1024 + b, from which 1024 + 128 is
// taken. e4m3: its bits moved to the exponent and mantissa of a half are the value times 2^-8, subnormals
// included. (The two encodings of NaN read as +-480: appending never stores them.)
template <Stored kStored>
CF_DEVICE void widen4(__half2 (&to)[2], uint32_t x) {
    uint32_t bits[2];
    if constexpr (kStored == Stored::int8) {
        const uint32_t shifted = x ^ 0x80808080u;
        bits[0] = (shifted & 0xff) | (shifted << 8 & 0xff0000) | 0x64006400u;
        bits[1] = (shifted >> 16 & 0xff) | (shifted >> 8 & 0xff0000) | 0x64006400u;
    } else {
        const uint32_t low = (x & 0xff) << 8 | (x & 0xff00) << 16;
        const uint32_t high = (x & 0xff0000) >> 8 | (x & 0xff000000u);
        bits[0] = (low & 0x80008000u) | (low & 0x7f007f00u) >> 1;
        bits[1] = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
    }
    CF_UNROLL
    for (int i = 0; i < 2; i++) {
        const __half2 raw = reinterpret_cast<const __half2&>(bits[i]);
        if constexpr (kStored == Stored::int8) to[i] = __hsub2(raw, __float2half2_rn(1152.0f));
        else to[i] = __hmul2(raw, __float2half2_rn(256.0f));
    }
}

// Sixteen stored bytes as two chunks of 16-bit elements.
template <Stored kStored, class Element>
CF_DEVICE void widen16(uint4 (&to)[2], const uint4& from) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
    uint32_t elements[8];
    CF_UNROLL
    for (int i = 0; i < 4; i++) {
        __half2 halves[2];
        widen4<kStored>(halves, words[i]);
        CF_UNROLL
        for (int j = 0; j < 2; j++) {
            if constexpr (kSame<Element, __half>) {
                elements[2 * i + j] = reinterpret_cast<const uint32_t&>(halves[j]);
            } else {
                const float2 wide = __half22float2(halves[j]);
                elements[2 * i + j] = pack<Element>(wide.x, wide.y);
            }
        }
    }
    to[0] = uint4{elements[0], elements[1], elements[2], elements[3]};
    to[1] = uint4{elements[4], elements[5], elements[6], elements[7]};
}

// A warp widens a tile of stored bytes into a tile of 16-bit elements.
//
// layout: 8 neighbouring lanes read 8 neighbouring chunks, and write two chunks each. Where they share a row,
// the second four write their odd chunk first, so that one store touches 8 different groups of banks.
template <Stored kStored, class From, class To>
CF_DEVICE void widen_tile(uint32_t to_address, uint32_t from_address) {
    constexpr int kCopies = From::kRows * From::kChunks / 32;
    CF_UNROLL
    for (int i = 0; i < kCopies; i++) {
        const int at = threadIdx.x % 32 + 32 * i, row = at / From::kChunks, chunk = at % From::kChunks;
        const bool odd_first = From::kChunks >= 8 && (chunk >> 2 & 1);
        uint4 wide[2];
        widen16<kStored, typename To::Element>(wide,
                                               ld_shared<uint4>(from_address + From::offset(row, chunk)));
        const int first = 2 * chunk + odd_first;
        st_shared(to_address + To::offset(row, first), odd_first ? wide[1] : wide[0]);
        st_shared(to_address + To::offset(row, first ^ 1), odd_first ? wide[0] : wide[1]);
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
