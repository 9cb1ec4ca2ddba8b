// Rotates queries and new keys by their positions, and stores new keys and values in a cache.
//
// Source: Su et al., "RoFormer" (arXiv:2104.09864): a pair (x, y) of features at position m becomes
// (x cos - y sin, y cos + x sin) of the angle m theta of the pair.
//   [N1] new key t of a sequence stands at position keys_before + t, query i at length - seqlen_q + i
//   [N2] k = rotate(k) / k_scale and v / v_scale, rounded to what the cache holds
//   [N3] q = rotate(q), rounded to its type
//   [N4] keys in use after the call, for kernels that know no cache: none without a slot
//
// Grid:   x = rows / kWarps: batch * appended * heads_k rows of k, as many of v, and, with rotation, batch *
//         seqlen_q * heads_q of q; heads fastest. [N4] is block 0's, beside its rows.
// Block:  kWarps warps, a row each; a lane takes every 32nd feature.
//
// Any strides. New keys beyond the room of their sequence, or whose entry of the table is no slot, are
// dropped; positions outside the tables of cos and sin take their nearest row.
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

// A feature of a row, rotated if it is one of the first `rotated`.
CF_DEVICE Acc turned(const Rotary& rotary, const Element* row, int64_t step, int32_t column,
                     int32_t position) {
    const Acc x = widen(row[column * step]);
    if (!rotary.cos || column >= rotary.rotated) return x;
    const int32_t half = rotary.rotated / 2;
    const int32_t pair = rotary.interleaved ? column / 2 : column % half;
    const bool second = rotary.interleaved ? column % 2 : column >= half;
    const int32_t partner = rotary.interleaved ? column ^ 1 : (second ? column - half : column + half);
    const Acc y = widen(row[partner * step]);
    const int64_t m = smaller(larger(position, 0), rotary.positions - 1);
    const Acc cos =
        load_bias<Acc>(rotary.cos, m * rotary.cos_row + pair * rotary.cos_column, rotary.table_type);
    const Acc sin =
        load_bias<Acc>(rotary.sin, m * rotary.sin_row + pair * rotary.sin_column, rotary.table_type);
    return x * cos + (second ? y : -y) * sin;
}

// Puts a feature into the cache.
CF_DEVICE void store(void* data, int64_t index, Acc x, Acc scale) {
    if constexpr (kStored == Stored::same) static_cast<Element*>(data)[index] = narrow<Element>(x);
    else if constexpr (kStored == Stored::int8)
        static_cast<uint8_t*>(data)[index] = narrow_int8(static_cast<float>(x / scale));
    else static_cast<uint8_t*>(data)[index] = narrow_e4m3(static_cast<float>(x / scale));
}

CF_DEVICE void flash_append(const DecodeParams& p) {
    const int lane = threadIdx.x % 32;
    int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int32_t heads_k = p.shape.heads_k, appended = p.cache.appended;
    const int64_t of_keys = int64_t(p.shape.batch) * appended * heads_k;

    // [N4]
    if (p.used && blockIdx.x == 0)
        for (int32_t batch = threadIdx.x; batch < p.shape.batch; batch += kThreads) {
            const bool nowhere = p.cache.page_shift == 31 && slot_of(p.cache, batch, 0) < 0;
            p.used[batch] = nowhere ? 0 : sequence_in_cache(p.cache, p.shape, batch).seqlen_k;
        }

    // [N2]
    if (row < 2 * of_keys) {
        const bool is_value = row >= of_keys;
        if (is_value) row -= of_keys;
        const int32_t head = static_cast<int32_t>(row % heads_k);
        const int32_t token = static_cast<int32_t>(row / heads_k % appended);
        const int32_t batch = static_cast<int32_t>(row / heads_k / appended);
        // [N1]
        const int32_t before = keys_before(p.cache, batch);
        if (token >= p.cache.capacity - before) return;
        const int32_t position = before + token, slot = slot_of(p.cache, batch, position);
        if (slot < 0) return;
        const Tensor& from = is_value ? p.v_new : p.k_new;
        const Tensor& to = is_value ? p.cache.v : p.cache.k;
        const Acc scale =
            is_value ? v_scale_of<Acc>(p.cache, batch, head) : k_scale_of<Acc>(p.cache, batch, head);
        const Element* source = head_rows<const Element>(from, batch, head, token);
        const int64_t first = slot * to.batch + head * to.head + row_in_slot(p.cache, position) * to.row;
        const int32_t columns = is_value ? p.shape.head_dim_v : p.shape.head_dim;
        for (int32_t column = lane; column < columns; column += 32) {
            const Acc x = is_value ? widen(source[column * from.column])
                                   : turned(p.rotary, source, from.column, column, position);
            store(to.data, first + column * to.column, x, scale);
        }
        return;
    }

    // [N3]
    row -= 2 * of_keys;
    const int32_t heads_q = p.shape.heads_q, seqlen_q = p.shape.seqlen_q;
    if (!p.turned_q.data || row >= int64_t(p.shape.batch) * seqlen_q * heads_q) return;
    const int32_t head = static_cast<int32_t>(row % heads_q);
    const int32_t query = static_cast<int32_t>(row / heads_q % seqlen_q);
    const int32_t batch = static_cast<int32_t>(row / heads_q / seqlen_q);
    const Sequence sequence = sequence_in_cache(p.cache, p.shape, batch);
    const Element* source = head_rows<const Element>(p.q, batch, head, query);
    Element* to = head_rows<Element>(p.turned_q, batch, head, query);
    // why zeros to the end of the row, a multiple of 32 bytes: bulk copies take all of it.
    const int32_t columns = round_up(p.shape.head_dim, int32_t(32 / sizeof(Element)));
    for (int32_t column = lane; column < columns; column += 32)
        to[column] = column < p.shape.head_dim ? narrow<Element>(turned(p.rotary, source, p.q.column, column,
                                                                        sequence.seqlen_k - seqlen_q + query))
                                               : Element(0.0f);
}

CF_KERNEL(DecodeParams, kThreads, 1, flash_append)
