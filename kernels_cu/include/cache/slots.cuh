// Keys and values in a cache: how long sequences are, where a key is stored, and how a warp copies and widens them.
// Design note: docs/kernels/decode.md.
//
// A cache is slots of keys. In a paged one a sequence is a row of a table of slots, each with 1 << page_shift
// keys; otherwise it is one slot, and page_shift is 31 so that every key belongs to entry 0. Lengths and
// tables are read from global memory, and whatever they hold, only keys of the cache are touched: lengths are
// cut to [0, capacity], and an entry outside [0, slots) has no keys.
#pragma once
#include "attention/mask.cuh"
#include "tile/tile.cuh"

constexpr int kStepKeys = 16;    // why: a page holds a multiple of this, so a step of a warp lies in one page

CF_DEVICE int32_t keys_before(const Cache& cache, int32_t batch) {
    const int32_t given = cache.lengths ? ld_global_nc(cache.lengths + batch * cache.lengths_batch)
                                        : static_cast<int32_t>(cache.length);
    return smaller(larger(given, 0), cache.capacity);
}
// New keys of a sequence.
CF_DEVICE int32_t keys_added(const Cache& cache, int32_t batch) {
    if (!cache.new_starts) return cache.appended;
    return larger(ld_global_nc(cache.new_starts + batch + 1) - ld_global_nc(cache.new_starts + batch), 0);
}
CF_DEVICE Sequence sequence_in_cache(const Cache& cache, const Shape& shape, int32_t batch) {
    const int32_t before = keys_before(cache, batch);
    const int32_t length = before + smaller(keys_added(cache, batch), cache.capacity - before);
    return {batch, 0, 0, shape.seqlen_q, length, length};
}
// The packed sequence that a row belongs to, or `batch` if it is none's: starts are (batch + 1) and never fall.
CF_DEVICE int32_t sequence_at(const int32_t* starts, int32_t batch, int64_t row) {
    int32_t low = 0, high = batch;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (ld_global_nc(starts + middle + 1) <= row) low = middle + 1;
        else high = middle;
    }
    return low;
}
// The slot that holds a key below the capacity, or -1; kAnyPage: pages may be no power of two.
template <bool kAnyPage = false>
CF_DEVICE int32_t slot_of(const Cache& cache, int32_t batch, int32_t key) {
    if (!cache.table) return batch;
    const int64_t page = kAnyPage && cache.page_shift < 0 ? key / cache.page : key >> cache.page_shift;
    const int32_t slot = ld_global_nc(cache.table + batch * cache.table_batch + page * cache.table_page);
    return static_cast<uint32_t>(slot) < static_cast<uint32_t>(cache.slots) ? slot : -1;
}
template <bool kAnyPage = false>
CF_DEVICE int32_t row_in_slot(const Cache& cache, int32_t key) {
    if (kAnyPage && cache.page_shift < 0) return key % cache.page;
    return key & static_cast<int32_t>((1u << cache.page_shift) - 1);
}
// What keys or values of a head are their stored numbers times.
template <class Acc>
CF_DEVICE Acc scale_of(const void* scale, int64_t batch_stride, int64_t head_stride, int32_t batch,
                       int32_t head) {
    return scale ? static_cast<const Acc*>(scale)[batch * batch_stride + head * head_stride] : Acc(1);
}
template <class Acc> CF_DEVICE Acc k_scale_of(const Cache& cache, int32_t batch, int32_t head) {
    return scale_of<Acc>(cache.k_scale, cache.k_scale_batch, cache.k_scale_head, batch, head);
}
template <class Acc> CF_DEVICE Acc v_scale_of(const Cache& cache, int32_t batch, int32_t head) {
    return scale_of<Acc>(cache.v_scale, cache.v_scale_batch, cache.v_scale_head, batch, head);
}

// Chunk `chunk` of a row in global memory with `columns` elements; what does not exist is zero.
template <class Element>
CF_DEVICE uint4 read_chunk(const Element* row, int chunk, int columns) {
    constexpr int kChunkElements = 16 / int(sizeof(Element));
    const int left = columns - chunk * kChunkElements;
    const Element* from = row + chunk * kChunkElements;
    if (left >= kChunkElements) return ld_global_nc(reinterpret_cast<const uint4*>(from));
    alignas(16) Element part[kChunkElements];
    CF_UNROLL
    for (int i = 0; i < kChunkElements; i++) part[i] = i < left ? from[i] : Element(0.0f);
    return reinterpret_cast<const uint4&>(part);
}

// Copies kStepKeys rows of one slot and head into a tile by one warp; rows and columns that do not exist
// become zeros.
//
// layout: kLane neighbouring lanes copy neighbouring chunks of one row, and the warp kPassRows rows at a
// time. Where rows have 8 swizzles, each pass of 4 rows flips the bits of swizzle(4) of the chunk.
template <class T, bool kRegisters>
struct WarpLoader {
    static constexpr int kLane = T::kSwizzledChunks, kPassRows = 32 / kLane;
    static constexpr int kPasses = T::kRows / kPassRows, kRowCopies = T::kChunks / kLane;
    static constexpr int kCopies = kPasses * kRowCopies;    // of one lane per tile
    static_assert(T::kRows == kStepKeys, "a tile is the keys of a step");

    int64_t first;         // address of this lane's first chunk in row 0 of slot 0
    int64_t slot_bytes;    // from slot to slot
    int32_t row_bytes, columns_bytes;
    uint32_t shared_offset;

    CF_DEVICE WarpLoader(const Tensor& cache, int32_t head, int32_t columns) {
        constexpr int kSize = sizeof(typename T::Element);
        const int lane = threadIdx.x % 32;
        row_bytes = static_cast<int32_t>(cache.row * kSize);
        slot_bytes = cache.batch * kSize;
        columns_bytes = columns * kSize;
        first = reinterpret_cast<int64_t>(cache.data) + head * cache.head * kSize +
                int64_t(lane / kLane) * row_bytes + lane % kLane * 16;
        shared_offset = T::offset(lane / kLane, lane % kLane);
    }
    // Rows row .. row + 15 of a slot, the first `rows` of which exist. With kRegisters the tile is written
    // when this returns; without, the caller commits and waits.
    CF_DEVICE void copy(uint32_t tile_address, int32_t slot, int32_t row, int32_t rows) const {
        const int64_t from = mad_wide(row, row_bytes, first + static_cast<uint32_t>(slot) * slot_bytes);
        const uint32_t to = tile_address + shared_offset;
        const bool whole = rows >= kStepKeys && columns_bytes == T::kPitch;
        if constexpr (kRegisters) {
            uint4 waiting[kCopies];
            CF_UNROLL
            for (int i = 0; i < kCopies; i++)
                waiting[i] = load_part(source(from, i), whole ? 16 : bytes_of(i, rows));
            CF_UNROLL
            for (int i = 0; i < kCopies; i++) st_shared(target(to, i), waiting[i]);
        } else if (whole) {
            CF_UNROLL
            for (int i = 0; i < kCopies; i++)
                cp_async16(target(to, i), reinterpret_cast<const void*>(source(from, i)));
        } else {
#pragma unroll 1
            for (int i = 0; i < kCopies; i++)
                cp_async16_part(target(to, i), reinterpret_cast<const void*>(source(from, i)),
                                bytes_of(i, rows));
        }
    }

  private:
    CF_DEVICE int64_t source(int64_t from, int copy) const {
        return mad_wide(copy / kRowCopies * kPassRows, row_bytes, from) + copy % kRowCopies * kLane * 16;
    }
    CF_DEVICE static uint32_t target(uint32_t to, int copy) {
        const int pass = copy / kRowCopies;
        const uint32_t flip = kLane == 8 ? pass % 2 * T::swizzle(4) * 16 : 0;
        return (to ^ flip) + pass * kPassRows * T::kPitch + copy % kRowCopies * kLane * 16;
    }
    // How much of a chunk exists, 0 to 16 bytes.
    CF_DEVICE int bytes_of(int copy, int32_t rows) const {
        const int lane = threadIdx.x % 32;
        const int left = columns_bytes - (lane % kLane + copy % kRowCopies * kLane) * 16;
        const bool exists = lane / kLane + copy / kRowCopies * kPassRows < rows && left > 0;
        return exists ? smaller(16, left) : 0;
    }
    CF_DEVICE static uint4 load_part(int64_t from, int bytes) {
        if (bytes == 16) return ld_global_nc(reinterpret_cast<const uint4*>(from));
        alignas(16) unsigned char part[16];
        CF_UNROLL
        for (int i = 0; i < 16; i++)
            part[i] = i < bytes ? reinterpret_cast<const unsigned char*>(from)[i] : 0;
        return reinterpret_cast<const uint4&>(part);
    }
};
