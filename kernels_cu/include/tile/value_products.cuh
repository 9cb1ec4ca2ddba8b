// O += P V of 8-bit floats (e4m3) by mma.sync, with V in shared memory in the layout of global memory.
// Design note: docs/kernels/float8.md.
//
// layout: products of 8 bits read both operands along k, which for P V is along keys, and ldmatrix transposes
// 16-bit elements only. It takes two neighbouring features as one, and gives lane 4g + t keys 2t and 2t + 1 of
// features 2g and 2g + 1. Bytes of two matrices, 8 keys apart, are then four keys of one feature, a register of
// B: of each 32 keys, slots 4t .. 4t + 3 of k are keys 2t, 2t + 1, 8 + 2t, 9 + 2t, and slots 16 + 4t .. 19 + 4t
// those 16 further. Weights have that order in an accumulator anyway (Math::from_accumulator), and a sum does not
// care. Of 16 features the even ones are columns of one n8 product and the odd ones of the next, so that a lane's
// sums are those of features 4t .. 4t + 3: see store_value_rows.
#pragma once
#include "tile/epilogue.cuh"
#include "tile/mma.cuh"

// Reads 32 keys x 16 features of V, a tile of 8-bit elements, as the B operands of two n8 products.
template <class T>
struct ValueReader {
    uint32_t lane_address;

    CF_DEVICE explicit ValueReader(uint32_t tile_address) {
        static_assert(sizeof(typename T::Element) == 1 && T::kRows % 32 == 0);
        lane_address = opaque(tile_address + T::offset(static_cast<int>(threadIdx.x) % 32, 0));
    }
    // `key` is a multiple of 32; registers 0 and 1 of b are even features, 2 and 3 odd ones.
    CF_DEVICE void load(uint32_t (&b)[4], int key, int chunk) const {
        uint32_t r[4];
        ldmatrix_x4_trans(r, (lane_address ^ (chunk % T::kSwizzledChunks * 16)) +
                                 (key * T::kPitch + chunk / T::kSwizzledChunks * T::kSwizzledChunks * 16));
        b[0] = permute_bytes(r[0], r[1], 0x6420), b[1] = permute_bytes(r[2], r[3], 0x6420);
        b[2] = permute_bytes(r[0], r[1], 0x7531), b[3] = permute_bytes(r[2], r[3], 0x7531);
    }
};

// o = rescale o + P V, where P has a column for each row of V, and rescale is [m][half] of a row.
// why a sum over the tile alone, and then one in float: the tensor cores sum products of 8 bits with 14 bits or so,
// too few for a whole row of keys. It costs nothing: one multiply-add per element of O, where the rescaling alone
// is a multiplication; and 8 kM registers, since columns take turns.
template <class Math, class TileV, int kM, int kN, int kKeys>
CF_DEVICE void add_values(float (&o)[kM][kN][4], const float (&p)[kM][kKeys][4],
                          const float (&rescale)[kM][2], uint32_t v_address) {
    static_assert(TileV::kRows == 8 * kKeys && TileV::kColumns == 8 * kN);
    constexpr int kSteps = TileV::kRows / Math::kDepth;
    typename Math::Fragment a[kSteps][kM];
    CF_UNROLL
    for (int step = 0; step < kSteps; step++) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) a[step][m] = Math::from_accumulator(p[m], step);
    }
    constexpr int kTogether = 4 / kM;    // pairs of n8 columns
    const ValueReader<TileV> v(v_address);
    CF_UNROLL
    for (int pair = 0; pair < kN / 2; pair++) {
        // why: ptxas would begin so many columns at once that sums of O spill, and those of two row blocks already
        // under the exponentials.
        if (pair % kTogether == 0 && (kM > 1 || pair > 0)) pin_schedule(v.lane_address);
        float sums[kM][2][4] = {};
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            typename Math::Fragment b;
            v.load(b.part[0], Math::kDepth * step, pair);
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                Math::multiply(sums[m][0], a[step][m], b, 0);
                Math::multiply(sums[m][1], a[step][m], b, 1);
            }
        }
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) {
                    float& x = o[m][2 * pair + i][e];
                    x = fmaf(x, rescale[m][e / 2], sums[m][i][e]);
                }
            }
        }
    }
}

// The rows of a warp that add_values has summed, o[m][n][e] * factor[m][e / 2], to `global`; see store_warp_rows.
//
// layout: elements e of columns n and n + 1, n even, are two neighbouring features, and e + 1 the next two: words
// 2t and 2t + 1 of the 8 of 16 features.
// why lanes of odd g store the second word first: rows g and g + 1 have the same two chunks, in places exchanged by
// the swizzle; so one row takes the even banks and the other the odd ones.
template <class Output, int kM, int kN>
CF_DEVICE void store_value_rows(const float (&o)[kM][kN][4], const float (&factor)[kM][2],
                                const GlobalRows<Output>& global, uint32_t staging) {
    using Staging = Tile<Output, 16 * kM, 8 * kN>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const float unit = factor[m][half];
            CF_UNROLL
            for (int n = 0; n < kN; n += 2) {
                const float (&even)[4] = o[m][n], (&odd)[4] = o[m][n + 1];
                const uint32_t low = pack<Output>(even[2 * half] * unit, odd[2 * half] * unit);
                const uint32_t high = pack<Output>(even[2 * half + 1] * unit, odd[2 * half + 1] * unit);
                const uint32_t to = staging + Staging::offset(16 * m + 8 * half + g, n + t / 2) + 8 * (t % 2);
                st_shared(to + 4 * (g % 2), g % 2 ? high : low);
                st_shared(to + 4 * (1 - g % 2), g % 2 ? low : high);
            }
        }
    }
    // sync: every lane's part of the rows is in shared memory before other lanes read it.
    __syncwarp();
    copy_staged_rows<Staging>(staging, global);
}
