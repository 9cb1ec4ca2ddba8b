// A float as the sum of two halves: x s = h0 + h1, h0 = half(x s), h1 = half(x s - h0), s a power of two. Products of halves run at
// twice the rate of tf32 ones, and a b = a0 b0 + (a0 b1 + a1 b0) up to 3 * 2^-22 of it.
// Design note: docs/kernels/float32.md.
//
// The halves of q, k and v are in the workspace, in records: a tile as shared memory has it, h0, then h1, then 1 / s.
// So one bulk copy brings a tile, whatever its strides: rows and columns that do not exist are zeros in it.
//
// s brings the largest finite element of a tile to [2^14, 2^15), but is at most 2^100. With m that element, x is off by
// at most 2^-22 |x|, or 2^-39 m where that is more (a half has no bits below 2^-24); or 2^-125 if m is below 2^-86.
#pragma once
#include "attention/seqlen.cuh"
#include "hopper/swizzled_tile.cuh"

template <int kRows_, int kColumns_> struct Halves {
    static constexpr int kRows = kRows_, kColumns = kColumns_;
    using Part = SwizzledTile<__half, kRows, kColumns>;
    Part part[2];

    enum : int { kBytes = 2 * Part::kBytes, kRecord = kBytes + 128 };
};

// x and y in two registers, their first and their second halves.
// why infinities become NaN: their rests are; so they do in tf32x3.
CF_DEVICE void split_pair(float x, float y, uint32_t& first, uint32_t& second) {
    first = pack<__half>(x, y);
    const float2 wide = __half22float2(reinterpret_cast<const __half2&>(first));
    second = pack<__half>(x - wide.x, y - wide.y);
}

// s and 1 / s for numbers of which `highest` has the bits of the largest one's size.
struct HalvesScale {
    float factor, unit;

    CF_DEVICE explicit HalvesScale(uint32_t highest) {
        const int exponent = smaller(14 - (static_cast<int>(highest >> 23) - 127), 100);
        factor = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
        unit = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    }
};
// The larger one of `highest` and the bits of the size of x, if that is finite.
CF_DEVICE uint32_t larger_size(uint32_t highest, float x) {
    const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? larger(highest, bits) : highest;
}

// 2^-n of a product of two factors 1 / s. why bounds: beyond them scores are infinite, or below 2^-88.
CF_DEVICE float unit_of_product(float x, float y) {
    return fmaxf(fminf(x * y, 1.7014118e38f), 1.1754944e-38f);    // 2^127, 2^-126
}

// The same for sums that are no scores: down to 0, where what it stands for is below 2^-114.
CF_DEVICE float unit_of_sum(float x, float y) { return fminf(x * y, 1.7014118e38f); }

// The order of tiles: those of a sequence follow each other, and for each tile come all heads. Packed sequences may have one tile more than their rows fill.
CF_DEVICE int64_t first_tile_of(const Shape& shape, int32_t batch, int64_t first_row, int32_t rows,
                                int size) {
    return shape.packed ? first_row / size + batch : int64_t(batch) * cdiv(rows, size);
}

// Which records a tile of queries is of the group `group`; each has as many as it has 64 rows. rows: a PackGqa.
template <class Packed>
CF_DEVICE int64_t record_of_q(const Shape& shape, const Packed& rows, const Sequence& of, int32_t group,
                              int32_t tile, int size) {
    const int64_t first =
        first_tile_of(shape, of.batch, of.first_q << rows.bits, shape.seqlen_q << rows.bits, size);
    return ((first + tile) * rows.groups(shape) + group) * (size / 64);
}
CF_DEVICE int64_t record_of_k(const Shape& shape, const Sequence& of, int32_t head, int32_t block, int size) {
    return (first_tile_of(shape, of.batch, of.first_k, shape.seqlen_k, size) + block) * shape.heads_k + head;
}
