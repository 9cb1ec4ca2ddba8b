// The macros of a variant of a simple kernel: element type, head dims, tile.
// Design note: docs/kernels/simple.md.
#pragma once
#include "attention/seqlen.cuh"
#include "simple/simt.cuh"

#if !defined(CF_ELEMENT)
#define CF_ELEMENT float
#define CF_HEAD_DIM 64
#define CF_BLOCK_M 64
#define CF_BLOCK_N 64
#define CF_THREADS 256
#define CF_SHARED_BYTES 35840
#endif
using Element = CF_ELEMENT;
using Acc = Accumulator<Element>;
constexpr int kHeadDim = CF_HEAD_DIM;    // the largest head dim, of q and k and of v
static_assert(CF_THREADS == kThreads, "the thread layout of simt.cuh is 16 x 16");

// why a template: passes are templates too, so that only the one of a compilation, whose tiles suit it, is
// instantiated.
template <class Storage> CF_DEVICE Storage& storage_of_pass() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "the catalog and the kernel disagree on shared memory");
    return shared_memory<Storage>();
}

// Writes factor * sums to the rows of a block from `first` on, as elements; those of 16 bits as float if so asked.
template <class Tiles, class Sums>
CF_DEVICE void store_result(bool as_float, const Sums& sums, Acc factor, const Tensor& to,
                            const TileCoord& work, int64_t first, int32_t rows, int32_t columns) {
    const auto store_as = [&](auto* data) { Tiles::store_rows(sums, factor, to, data, rows, columns); };
    if constexpr (sizeof(Element) == 2) {
        if (as_float) return store_as(head_rows<float>(to, work.batch, work.head, first));
    }
    store_as(head_rows<Element>(to, work.batch, work.head, first));
}
