// Rotates queries and new keys by their positions, and stores new keys and values in a cache.
// Design note: docs/kernels/decode.md.
//
// Source: Su et al., "RoFormer" (arXiv:2104.09864): a pair (x, y) of features at position m becomes
// (x cos - y sin, y cos + x sin) of the angle m theta of the pair.
//   [N1] new key t of a sequence stands at position keys_before + t, query i at length - seqlen_q + i; both are
//        rotated by these positions, or by first + t and first + i
//   [N2] k = rotate(k) / k_scale and v / v_scale, rounded to what the cache holds; 4-bit codes, scales and zeros
//        of groups of features
//        Of latents, whose values are columns of their keys, keys alone
//   [N3] q = rotate(q), rounded to its type
//   [N4] keys in use after the call, for kernels that know no cache: none without a slot; and, for packed queries,
//        where the keys of a sequence are gathered
//
// Grid:   x = rows / kWarps: batch * appended * heads_k rows of k, as many of v, and, with rotation, batch *
//         seqlen_q * heads_q of q; heads fastest. Of packed rows those of all sequences, and a row finds its
//         sequence by halving. [N4] is block 0's, beside its rows.
// Block:  kWarps warps, a row each; a lane takes every 32nd feature, two of which share a byte of 4-bit codes.
//
// Any strides. New keys beyond the capacity of their sequence, or whose entry of the table is no slot, are
// dropped; positions outside the tables of cos and sin take their nearest row.
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
constexpr Stored kStored = Stored::CF_PASS;
constexpr int kThreads = CF_THREADS, kWarps = kThreads / 32;

// Puts a feature into the cache.
CF_DEVICE void store(void* data, int64_t index, Acc x, Acc scale) {
    if constexpr (kStored == Stored::same) static_cast<Element*>(data)[index] = narrow<Element>(x);
    else if constexpr (kStored == Stored::int8)
        static_cast<uint8_t*>(data)[index] = narrow_int8(static_cast<float>(x / scale));
    else if constexpr (kStored == Stored::e4m3)
        static_cast<uint8_t*>(data)[index] = narrow_e4m3(static_cast<float>(x / scale));
}

CF_DEVICE void flash_append(const DecodeParams& p) {
    const int lane = threadIdx.x % 32;
    int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int32_t heads_k = p.shape.heads_k, appended = p.cache.appended;
    const int32_t* new_starts = p.cache.new_starts;
    const int64_t of_keys = int64_t(new_starts ? 1 : p.shape.batch) * appended * heads_k;

    // [N4]
    if (p.used && blockIdx.x == 0)
        for (int32_t batch = threadIdx.x; batch < p.shape.batch; batch += kThreads) {
            const bool nowhere = p.cache.page_shift == 31 && slot_of(p.cache, batch, 0) < 0;
            p.used[batch] = nowhere ? 0 : sequence_in_cache(p.cache, p.shape, batch).seqlen_k;
        }
    if (p.starts && blockIdx.x == 0)
        for (int32_t batch = threadIdx.x; batch <= p.shape.batch; batch += kThreads)
            p.starts[batch] = batch * p.cache.capacity;

    // [N2]
    if (row < 2 * of_keys) {
        const bool is_value = row >= of_keys;
        // why: of a latent, a key whose first columns are the value, both would write the same memory.
        if (is_value && p.cache.v.data == p.cache.k.data) return;
        if (is_value) row -= of_keys;
        const int32_t head = static_cast<int32_t>(row % heads_k);
        const int32_t new_row = static_cast<int32_t>(row / heads_k % appended);
        const int32_t batch = new_starts ? sequence_at(new_starts, p.shape.batch, new_row)
                                         : static_cast<int32_t>(row / heads_k / appended);
        if (batch >= p.shape.batch) return;
        const int32_t token = new_row - (new_starts ? new_starts[batch] : 0);
        // [N1]
        const int32_t before = keys_before(p.cache, batch);
        if (token < 0 || token >= p.cache.capacity - before) return;
        const int32_t place = before + token, slot = slot_of<true>(p.cache, batch, place);
        if (slot < 0) return;
        const int64_t position = p.rotary.first ? int64_t(p.rotary.first[batch]) + token : place;
        const Tensor& from = is_value ? p.v_new : p.k_new;
        const Tensor& to = is_value ? p.cache.v : p.cache.k;
        const Acc scale =
            is_value ? v_scale_of<Acc>(p.cache, batch, head) : k_scale_of<Acc>(p.cache, batch, head);
        const Element* source = head_rows<const Element>(from, new_starts ? 0 : batch, head, new_row);
        const int64_t first = slot * to.batch + head * to.head + row_in_slot<true>(p.cache, place) * to.row;
        const int32_t columns = is_value ? p.shape.head_dim_v : p.shape.head_dim;
        auto at = [&](int32_t c) { return widen(source[c * from.column]); };
        auto stored = [&](int32_t column) {
            return is_value || p.rotary.on_read ? at(column)
                                                : rotated_feature(p.rotary, column, position, at);
        };
        if constexpr (of_codes(kStored)) {
            store_codes<kStored, Acc>(to, is_value ? p.cache.v_units : p.cache.k_units, slot, head,
                                      row_in_slot<true>(p.cache, place), columns, [&](int32_t column) {
                                          const Acc x = stored(column);
                                          return kStored == Stored::nvfp4 ? x / scale : x;
                                      });
        } else {
            for (int32_t column = lane; column < columns; column += 32)
                store(to.data, first + column * to.column, stored(column), scale);
        }
        return;
    }

    // [N3]
    row -= 2 * of_keys;
    const int32_t heads_q = p.shape.heads_q;
    if (!p.rotated_q.data) return;
    const int32_t head = static_cast<int32_t>(row % heads_q);
    const int32_t* starts = p.shape.packed ? p.shape.cu_seqlens_q : nullptr;
    const int64_t of_head = row / heads_q;
    const int32_t batch = starts ? sequence_at(starts, p.shape.batch, of_head)
                                 : static_cast<int32_t>(of_head / p.shape.seqlen_q);
    if (batch >= p.shape.batch) return;
    const int64_t start = starts ? starts[batch] : int64_t(batch) * p.shape.seqlen_q;
    const int32_t queries = starts ? static_cast<int32_t>(starts[batch + 1] - start) : p.shape.seqlen_q;
    const int32_t query = static_cast<int32_t>(of_head - start);
    const int64_t query_row = starts ? of_head : query;
    const int64_t first = p.rotary.first ? p.rotary.first[batch]
                                         : sequence_in_cache(p.cache, p.shape, batch).seqlen_k - queries;
    const int64_t position = first + query;
    const Element* source = head_rows<const Element>(p.q, starts ? 0 : batch, head, query_row);
    Element* to = head_rows<Element>(p.rotated_q, starts ? 0 : batch, head, query_row);
    // why zeros to the end of the row, a multiple of 32 bytes: bulk copies take all of it.
    const int32_t columns = round_up(p.shape.head_dim, int32_t(32 / sizeof(Element)));
    auto at = [&](int32_t c) { return widen(source[c * p.q.column]); };
    for (int32_t column = lane; column < columns; column += 32)
        to[column] = column < p.shape.head_dim
                         ? narrow<Element>(rotated_feature(p.rotary, column, position, at))
                         : Element(0.0f);
}

CF_KERNEL(DecodeParams, kThreads, 1, flash_append)
