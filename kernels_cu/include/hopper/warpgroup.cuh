// Products of tiles by warpgroups: d (64 rows of the warpgroup by 2 n columns) = or += a b, asynchronously.
// Design note: docs/kernels/forward_sm90.md.
//
// An operand is a tile read in one of two ways:
//   ByRows<T>      its rows are rows of A, or columns of B (that is A = tile, B = tile^T); k runs along a row
//   ByColumns<T>   its columns, or every other block of them, are (A = tile^T, B = tile); k runs down the
//                  rows
//   registers      a[k / kDepth][4], A only: fragments of an accumulator of an earlier product
// 16-bit elements, kDepth 16, both ways; 8-bit ones (e4m3), kDepth 32, by rows only.
// Q K^T: a ByRows, b ByRows. P V: a in registers, b ByColumns. dS^T Q: registers, ByColumns. dS K from dS^T
// in shared memory: a ByColumns, b ByColumns.
//
// The caller brackets products: wgmma_fence_operand(d); wgmma_fence(); multiply(...) ...; wgmma_commit(); until
// wgmma_wait<n>() and wgmma_fence_operand(d) neither d nor fragments are touched.
// layout: of d and fragments as in prim/wgmma.cuh: d is float[1][2 n / 8][4] of mma.cuh with the warp's 16
// rows, so all that works on scores there works on them (as_tile).
#pragma once
#include "hopper/swizzled_tile.cuh"

// x, which is the same in all lanes. why the shuffle: ptxas then knows that, and keeps what follows from it in uniform
// registers, where wgmma reads descriptors, instead of moving it there each time; nor does it compute x again in a
// loop.
template <class T> CF_DEVICE T warp_uniform(T x) { return __shfl_sync(0xffffffffu, x, 0); }
// Whether setmaxnreg can give these registers to each thread of the consumer warpgroups and of the producer.
constexpr bool fit_registers(int consumers, int of_consumer, int of_producer) {
    return 128 * (consumers * of_consumer + of_producer) <= 65536;
}
CF_DEVICE int warpgroup_index() { return warp_uniform(static_cast<int>(threadIdx.x) / 128); }

// Where an operand begins, a descriptor. why only its lower half moves: the upper one is a constant, and nothing
// carries into it.
struct Operand {
    uint64_t descriptor;

    CF_DEVICE explicit Operand(uint64_t descriptor) : descriptor(descriptor) {}
    // Of a tile that is this many further in an array, each of kBytes.
    template <int kBytes> CF_DEVICE uint64_t after(int index) const {
        return with(static_cast<uint32_t>(descriptor) + uint32_t(index) * (kBytes / 16));
    }
    // From here on ptxas does not know where it begins, and adds to it instead of computing it again for each tile.
    CF_DEVICE void hold() { descriptor = with(warp_uniform(static_cast<uint32_t>(descriptor))); }

  private:
    CF_DEVICE uint64_t with(uint32_t lower) const { return (descriptor & 0xffffffff00000000u) | lower; }
};

template <class T> struct ByRows : Operand {
    using Element = typename T::Element;
    static constexpr bool kTrans = false;
    static constexpr int kDepth = 32 / T::kItem;    // of one product
    static constexpr int kExtent = T::kRows, kSteps = T::kColumns / kDepth;

    // From a row of the tile on, a multiple of 8.
    CF_DEVICE explicit ByRows(const T& tile, int first_row = 0)
        : Operand(matrix_descriptor(smem_addr(tile.data) + first_row * T::kSwizzle, 0, 8 * T::kSwizzle,
                                    T::kSwizzle)) {}
    // layout: kDepth columns are 32 bytes within the block, then comes the next block.
    CF_DEVICE uint64_t step(int k) const {
        constexpr int kPerBlock = T::kSwizzle / 32;
        return descriptor + (k / kPerBlock * T::kBlockBytes + k % kPerBlock * 32) / 16;
    }
    // A copy whose value the compiler cannot see, so that it derives descriptors from it where they are used.
    CF_DEVICE ByRows opaque_copy() const {
        ByRows other = *this;
        other.descriptor = (descriptor & 0xffffffff00000000u) | opaque(static_cast<uint32_t>(descriptor));
        return other;
    }
    // The same of a tile that is this many further in an array.
    CF_DEVICE ByRows of_tile(int index) const {
        ByRows other = *this;
        other.descriptor = this->template after<int(sizeof(T))>(index);
        return other;
    }
};

// Of the blocks of columns every kEvery-th.
template <class T, int kEvery = 1> struct ByColumns : Operand {
    using Element = typename T::Element;
    static_assert(T::kItem == 2, "8-bit operands are read along k only");
    static constexpr bool kTrans = true;
    static constexpr int kExtent = T::kColumns / kEvery, kSteps = T::kRows / 16;

    // From a column of the tile on, a multiple of T::kBlockColumns.
    CF_DEVICE explicit ByColumns(const T& tile, int first_column = 0)
        : Operand(matrix_descriptor(smem_addr(tile.data) + first_column / T::kBlockColumns * T::kBlockBytes,
                                    kEvery * T::kBlockBytes, 8 * T::kSwizzle, T::kSwizzle)) {}
    CF_DEVICE uint64_t step(int k) const { return descriptor + k * (16 * T::kSwizzle / 16); }
    CF_DEVICE ByColumns of_tile(int index) const {
        ByColumns other = *this;
        other.descriptor = this->template after<int(sizeof(T))>(index);
        return other;
    }
};

// d += a b, or = if not `accumulate`, over all of k.
template <class A, class B, int n>
CF_DEVICE void multiply(float (&d)[n], const A& a, const B& b, bool accumulate) {
    static_assert(A::kSteps == B::kSteps && kSame<typename A::Element, typename B::Element>);
    static_assert(2 * n <= B::kExtent);
    CF_UNROLL
    for (int k = 0; k < A::kSteps; k++) {
        if constexpr (sizeof(typename A::Element) == 1)
            wgmma_m64k32_e4m3(d, a.step(k), b.step(k), accumulate || k > 0);
        else
            wgmma_m64k16<typename A::Element, A::kTrans, B::kTrans>(d, a.step(k), b.step(k),
                                                                    accumulate || k > 0);
    }
}
template <class B, int kSteps, int n>
CF_DEVICE void multiply(float (&d)[n], const uint32_t (&a)[kSteps][4], const B& b, bool accumulate) {
    static_assert(kSteps == B::kSteps && 2 * n <= B::kExtent);
    CF_UNROLL
    for (int k = 0; k < kSteps; k++) {
        if constexpr (sizeof(typename B::Element) == 1)
            wgmma_m64k32_e4m3(d, a[k], b.step(k), accumulate || k > 0);
        else wgmma_m64k16<typename B::Element, B::kTrans>(d, a[k], b.step(k), accumulate || k > 0);
    }
}

// An accumulator rounded to the A operand of a product over its columns.
template <class Element, int kSteps, int n>
CF_DEVICE void to_fragments(uint32_t (&a)[kSteps][4], const float (&d)[n]) {
    static_assert(8 * kSteps == n);
    CF_UNROLL
    for (int k = 0; k < kSteps; k++) {
        CF_UNROLL
        for (int i = 0; i < 4; i++) a[k][i] = pack<Element>(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
    }
}

// The same to e4m3, of 32 columns at a time.
//
// layout: byte i of registers 0 and 1 of lane t is k = 4t + i, of registers 2 and 3 k = 16 + 4t + i. An
// accumulator has columns 2t, 2t + 1, 8 + 2t, 9 + 2t there, so k = 4t .. 4t + 3 stands for these columns, and
// the other operand of the product has to have its k in the same order: see transposed_values.cuh.
template <int kSteps, int n> CF_DEVICE void to_e4m3_fragments(uint32_t (&a)[kSteps][4], const float (&d)[n]) {
    static_assert(16 * kSteps == n);
    CF_UNROLL
    for (int k = 0; k < kSteps; k++) {
        CF_UNROLL
        for (int i = 0; i < 4; i++) {
            const float* x = d + 16 * k + 8 * (i / 2) + 2 * (i % 2);
            a[k][i] = pack_e4m3(x[0], x[1]) | uint32_t(pack_e4m3(x[4], x[5])) << 16;
        }
    }
}

// An accumulator as the fragments of mma.cuh: 16 rows of a warp by n / 4 groups of 8 columns.
template <int n> CF_DEVICE float (&as_tile(float (&d)[n]))[1][n / 4][4] {
    return reinterpret_cast<float (&)[1][n / 4][4]>(d);
}

// The 16 rows of a warp, fragments of to_fragments, into rows first_row .. and columns first_column .. of a
// tile; the latter a multiple of 16. Then fence_proxy_async and a barrier, before a product or a bulk copy
// reads them.
template <class T, int kSteps>
CF_DEVICE void store_warp_fragments(T& tile, int first_row, int first_column,
                                    const uint32_t (&a)[kSteps][4]) {
    const int lane = threadIdx.x % 32, row = first_row + lane % 16;
    CF_UNROLL
    for (int k = 0; k < kSteps; k++)
        stmatrix_x4(smem_addr(tile.data) + T::offset(row, first_column / 8 + 2 * k + lane / 16), a[k]);
}
// The 64 rows of a warpgroup.
template <class T, int kSteps>
CF_DEVICE void store_fragments(T& tile, int first_row, int first_column, const uint32_t (&a)[kSteps][4]) {
    store_warp_fragments(tile, first_row + 16 * (static_cast<int>(threadIdx.x) / 32 % 4), first_column, a);
}
