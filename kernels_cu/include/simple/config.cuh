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
CF_DEVICE void store_result(bool as_float, Sums& sums, Acc factor, const Tensor& to, const TileCoord& work,
                            int64_t first, int32_t rows, int32_t columns) {
    Element* data = head_rows<Element>(to, work.batch, work.head, first);
    float* floats = head_rows<float>(to, work.batch, work.head, first);
    Tiles::store_rows(sums, to, rows, columns, [&](int64_t place, Acc sum) {
        if (sizeof(Element) == 2 && as_float) floats[place] = factor * sum;
        else data[place] = narrow<Element>(factor * sum);
    });
}
