// V^T of 8-bit elements in shared memory, made from V as bulk copies bring it.
// why: products of 8 bits read both operands along k, which for O = P V is along keys; the copy engine has no
// transpose, and ldmatrix has one of 16-bit elements only.
// Design note: docs/kernels/float8.md.
//
// layout: the keys of V^T stand in the order in which to_e4m3_fragments has weights: of each 32 keys, slots 4t
// .. 4t + 3 are keys 2t, 2t + 1, 8 + 2t, 9 + 2t, and slots 16 + 4t .. 19 + 4t those 16 further.
#pragma once
#include "hopper/swizzled_tile.cuh"

// By `warps` warps of which this is number `warp`, in units of kAtOnce matrices of 32 keys by 16 features, next to each
// other along keys. As ordinary writes: fence_proxy_async by each lane, then a barrier, before a product reads them.
//
// layout: ldmatrix takes two neighbouring features as one element, and gives lane 4g + t keys 2t and 2t + 1 of
// features 2g and 2g + 1. Bytes of two matrices, 8 keys apart, are then four keys of one feature, and four
// lanes have a row of 16 of them.
// why lanes from 16 on swap their features: a store writes eight rows, and rows 0, 2, 4, 6, 9, 11, 13, 15 (1,
// 3, 5, 7, 8, 10, 12, 14) lie in different groups of banks, where the even ones would meet in pairs.
template <int kAtOnce, class From, class To>
CF_DEVICE void transpose_values(To& to, const From& from, int warp, int warps) {
    static_assert(From::kItem == 1 && To::kItem == 1 && From::kRows % (32 * kAtOnce) == 0);
    static_assert(To::kRows == From::kColumns && To::kColumns == From::kRows);
    static_assert(To::kSwizzle % (32 * kAtOnce) == 0, "keys of a unit are in one block of columns of V^T");
    constexpr int kUnits = From::kRows / (32 * kAtOnce) * From::kChunks;
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const uint32_t first = lane < 16 ? 0x6420 : 0x7531, second = first ^ (0x6420 ^ 0x7531);
    const int feature = 2 * row + ((row >= 4) ^ (matrix & 1));
    const uint32_t from_address = smem_addr(from.data), to_address = smem_addr(to.data);
#pragma unroll 1
    for (int unit = warp; unit < kUnits; unit += warps) {
        const int keys = unit / From::kChunks * kAtOnce, chunk = unit % From::kChunks;
        uint32_t r[kAtOnce][4];
        const uint32_t from_unit = from_address + From::offset(32 * keys + lane, chunk);
        CF_UNROLL
        for (int i = 0; i < kAtOnce; i++) ldmatrix_x4_trans(r[i], from_unit + i * (32 * From::kSwizzle));
        const uint32_t to_unit = to_address + To::offset(16 * chunk + feature, 2 * keys + matrix / 2);
        CF_UNROLL
        for (int i = 0; i < kAtOnce; i++) {
            const uint32_t transposed[4] = {
                permute_bytes(r[i][0], r[i][1], first), permute_bytes(r[i][0], r[i][1], second),
                permute_bytes(r[i][2], r[i][3], first), permute_bytes(r[i][2], r[i][3], second)};
            // layout: chunks 2 further are bit 5 of an address, 4 further bit 6, whatever the swizzle.
            stmatrix_x4(to_unit ^ (32 * i), transposed);
        }
    }
}
