// Tiles of matrices in shared memory as bulk copies write and wgmma reads them.
// Design note: docs/kernels/forward_sm90.md.
//
// layout: a tile is cut into blocks of columns, kSwizzle bytes wide, one after the other; a block is kRows rows
// of kSwizzle bytes. Within its row of a block chunk c (16 bytes) stands at c ^ (row % 8) where kSwizzle is 128, at
// c ^ (row / 2 % 4) where it is 64: the swizzle of tensor maps and of matrix descriptors.
//   kSwizzle 128   where a row is a multiple of 128 bytes
//   kSwizzle 64    where it is an odd multiple of 64 (head dim 96 of 16-bit elements, 64 of 8-bit ones), and for
//                  tiles that ask for it, because products begin at any 64 bytes
// One layout serves as A or B of any product, see warpgroup.cuh.
#pragma once
#include "prim.cuh"

template <class Element_, int kRows_, int kColumns_,
          int kSwizzle_ = kColumns_ * int(sizeof(Element_)) % 128 == 0 ? 128 : 64>
struct SwizzledTile {
    using Element = Element_;
    static constexpr int kRows = kRows_, kColumns = kColumns_, kSwizzle = kSwizzle_;
    static constexpr int kItem = int(sizeof(Element));
    static constexpr int kBlockColumns = kSwizzle / kItem, kBlocks = kColumns / kBlockColumns;
    static constexpr int kChunks = kColumns * kItem / 16;    // of a row
    static constexpr int kBlockBytes = kRows * kSwizzle, kBytes = kBlocks * kBlockBytes;
    static_assert(kItem <= 2 && kColumns * kItem % kSwizzle == 0 && kRows % 16 == 0 && kRows <= 256,
                  "a block is one box of a tensor map");
    static_assert(kSwizzle == 128 || kSwizzle == 64);

    alignas(1024) Element data[kRows * kColumns];

    // Bytes from the start of the tile to chunk `chunk` of row `row`.
    CF_DEVICE static constexpr int offset(int row, int chunk) {
        constexpr int kPerBlock = kSwizzle / 16;
        const int swizzle = kSwizzle == 128 ? row & 7 : row >> 1 & 3;
        return chunk / kPerBlock * kBlockBytes + row * kSwizzle + ((chunk % kPerBlock) ^ swizzle) * 16;
    }
};

// Starts the copy of rows row .. row + kRows - 1 of one head into a tile, T::kBytes in all, zeros where the
// tensor ends. By one thread. The map is (columns, rows, heads, batches) with boxes of (T::kBlockColumns,
// T::kRows, 1, 1) and a swizzle of T::kSwizzle bytes.
template <class T>
CF_DEVICE void load_tile(T& tile, const TensorMap& map, uint64_t& bar, int row, int head, int batch) {
    CF_UNROLL
    for (int block = 0; block < T::kBlocks; block++)
        tma_load(tile.data + block * (T::kRows * T::kBlockColumns), map, bar, block * T::kBlockColumns, row,
                 head, batch);
}

// The same of a tile whose rows are (row, head of a group), heads fastest, from one such head on. The map is
// (columns, heads of a group, rows, groups, batches) with boxes of T::kRows rows.
template <class T>
CF_DEVICE void load_tile(T& tile, const TensorMap& map, uint64_t& bar, int head, int row, int group,
                         int batch) {
    CF_UNROLL
    for (int block = 0; block < T::kBlocks; block++)
        tma_load(tile.data + block * (T::kRows * T::kBlockColumns), map, bar, block * T::kBlockColumns, head,
                 row, group, batch);
}

// The other way, from column first_column on, for what a fence_proxy_async and a barrier have made visible; what is
// out of the tensor is dropped. By one thread, then tma_store_commit and tma_store_wait_read<0> before it reuses the
// tile or exits.
template <class T>
CF_DEVICE void store_tile(const TensorMap& map, const T& tile, int first_column, int head, int row, int group,
                          int batch) {
    CF_UNROLL
    for (int block = 0; block < T::kBlocks; block++)
        tma_store(map, tile.data + block * (T::kRows * T::kBlockColumns),
                  first_column + block * T::kBlockColumns, head, row, group, batch);
}

// Sets rows first_row .. kRows - 1 to zero, shared out over `threads` threads of which this is `thread`. As
// ordinary writes: fence_proxy_async by each, then a barrier, before a product reads them.
template <class T> CF_DEVICE void clear_rows(T& tile, int first_row, int thread, int threads) {
    constexpr int kChunks = T::kChunks;
    const uint32_t base = smem_addr(tile.data);
#pragma unroll 1
    for (int i = first_row * kChunks + thread; i < T::kRows * kChunks; i += threads)
        st_shared(base + T::offset(i / kChunks, i % kChunks), uint4{0, 0, 0, 0});
}

// The first rows of a tile to rows in global memory, 16 bytes per lane; by a warp, which has synchronised on
// what is in the tile. Rows are a multiple of 8 elements wide. place(row): where a row goes, or null.
template <class T, class Place>
CF_DEVICE void copy_rows(Place place, const T& tile, int rows, int columns) {
    constexpr int kChunks = T::kChunks;
    const uint32_t base = smem_addr(tile.data);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < rows * kChunks; i += 32) {
        const int row = i / kChunks, chunk = i % kChunks;
        auto* to = place(row);
        if (to && 8 * chunk < columns)
            st_global(reinterpret_cast<uint4*>(to + 8 * chunk),
                      ld_shared<uint4>(base + T::offset(row, chunk)));
    }
}
