// Gathers the keys and values of a cache, each sequence contiguous and in the type of the queries, for kernels that
// read neither pages nor scales.
// Design note: docs/kernels/decode.md.
//
//   [G1] key j of a sequence lies in row j % page of slot table[j / page]
//   [G2] k = stored k * k_scale, of 4-bit codes plus the zero of their group, rotated by j where the cache holds keys that are not, v = stored v * v_scale,
//        rounded to Element
//   [G3] a key whose entry of the table is no slot is zero, and not kept; nor is one of padding on the left
//
// Grid:   x = ceil(batch * heads_k * capacity / kWarps), keys fastest, then heads. It depends on the capacity
//         of the cache, not on the lengths in it.
// Block:  kWarps warps, each a row of K and the same row of V.
//
// Any strides of the cache; rows of the results start on 16-byte boundaries. Rows at or past the end of a
// sequence are left as they are.
#include "cache/codes.cuh"
#include "cache/rotary.cuh"
#include "cache/slots.cuh"
#include "cache/stored.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_THREADS 128
#define CF_SHARED_BYTES 0
#endif
#if !defined(CF_PASS)
#define CF_PASS same
#endif
using Element = CF_ELEMENT;
using Acc = Accumulator<Element>;
constexpr Stored kStored = Stored::CF_PASS;    // what the cache holds
constexpr int kThreads = CF_THREADS, kWarps = kThreads / 32, kChunk = 16 / int(sizeof(Element));

// An element of the cache.
CF_DEVICE Acc element_at(const void* data, int64_t index, Acc scale) {
    if constexpr (kStored == Stored::same) return widen(static_cast<const Element*>(data)[index]);
    else return widen_one<kStored>(static_cast<const uint8_t*>(data)[index]) * scale;
}

// A row of a slot, or zeros if there is no slot, by one warp.
CF_DEVICE void gather_row(Element* to, const Tensor& cache, const Units& units, int32_t slot, int32_t head,
                          int32_t row, int32_t columns, Acc scale, const Rotary* rotary, int64_t position) {
    const int lane = threadIdx.x % 32;
    const int64_t first = larger(slot, 0) * cache.batch + head * cache.head + row * cache.row;
    if constexpr (kStored == Stored::same) {
        // why: 16 bytes a lane move a row in an eighth of the instructions.
        const Element* from = static_cast<const Element*>(cache.data) + first;
        if (!rotary && cache.column == 1 && columns % kChunk == 0 &&
            reinterpret_cast<uint64_t>(from) % 16 == 0) {
            for (int32_t chunk = lane; chunk < columns / kChunk; chunk += 32) {
                const uint4 none{};
                st_global(reinterpret_cast<uint4*>(to) + chunk,
                          slot < 0 ? none : ld_global_nc(reinterpret_cast<const uint4*>(from) + chunk));
            }
            return;
        }
    }
    auto at = [&](int32_t column) {
        if constexpr (of_codes(kStored)) {
            const Acc x = CodedRow<kStored, Acc>(cache, units, larger(slot, 0), head, row).at(column);
            return kStored == Stored::nvfp4 ? x * scale : x;
        } else return element_at(cache.data, first + column * cache.column, scale);
    };
    for (int32_t column = lane; column < columns; column += 32) {
        const Acc x = slot < 0 ? Acc(0)
                      : rotary ? rotated_feature(*rotary, column, position, at)
                               : at(column);
        to[column] = narrow<Element>(x);
    }
}

CF_DEVICE void flash_gather(const DecodeParams& p) {
    const int32_t capacity = p.cache.capacity, heads_k = p.shape.heads_k;
    const int64_t of_key = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int64_t pair = of_key / capacity;
    const int32_t key = static_cast<int32_t>(of_key - pair * capacity);
    const int32_t head = static_cast<int32_t>(pair % heads_k);
    if (pair >= int64_t(p.shape.batch) * heads_k) return;
    const int32_t batch = static_cast<int32_t>(pair / heads_k);
    if (key >= sequence_in_cache(p.cache, p.shape, batch).seqlen_k) return;

    // [G1]
    const int32_t slot = slot_of<true>(p.cache, batch, key), row = row_in_slot<true>(p.cache, key);
    // [G3]
    if (p.kept && head == 0 && threadIdx.x % 32 == 0) {
        const bool padding = p.cache.leftpad && key < p.cache.leftpad[batch];
        p.kept[int64_t(batch) * capacity + key] = slot >= 0 && !padding;
    }
    // [G2]
    const int64_t to = key + (p.shape.packed ? int64_t(batch) * capacity : 0);
    gather_row(head_rows<Element>(p.k_gathered, batch, head, to), p.cache.k, p.cache.k_units, slot, head, row,
               p.shape.head_dim, k_scale_of<Acc>(p.cache, batch, head),
               p.rotary.on_read ? &p.rotary : nullptr, key);
    gather_row(head_rows<Element>(p.v_gathered, batch, head, to), p.cache.v, p.cache.v_units, slot, head, row,
               p.shape.head_dim_v, v_scale_of<Acc>(p.cache, batch, head), nullptr, key);
}

CF_KERNEL(DecodeParams, kThreads, 1, flash_gather)
