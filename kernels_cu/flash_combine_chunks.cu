// Merges the chunks of keys of flash_forward, where each was a block's: O and LSE from partial O, row_max and row_sum.
// Design note: docs/kernels/forward.md.
//
//   [D4]    row_max, row_sum and O of a row over its chunks, merged from left to right
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   x = (batch * heads_q + head) * seqlen_q + query, a block per row.
// Block:  a thread takes every kThreads-th column of O.
// Shared: none.
//
// Assumes: not packed.
#include "tile/chunk.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 256
#define CF_THREADS 128
#define CF_SHARED_BYTES 0
#endif
using Element = CF_ELEMENT;
constexpr int kThreads = CF_THREADS, kColumns = CF_HEAD_DIM / kThreads;    // of a thread

CF_DEVICE void flash_combine_chunks(const ForwardParams& p) {
    const int64_t row = blockIdx.x;
    const int32_t query = static_cast<int32_t>(row % p.shape.seqlen_q);
    const int32_t pair = static_cast<int32_t>(row / p.shape.seqlen_q);
    const int32_t head = pair % p.shape.heads_q, batch = pair / p.shape.heads_q;

    // [D4]
    SoftmaxState all;
    float o[kColumns] = {};
    for (int32_t chunk = 0; chunk < p.chunks; chunk++) {
        const int32_t of_chunk = chunk * p.shape.batch + batch;
        const float2 sums = ld_global_nc(
            reinterpret_cast<const float2*>(head_rows<float>(p.chunk_rows, of_chunk, head, query)));
        if (sums.y == 0) continue;    // nothing seen, and O not written
        const float* from = head_rows<float>(p.chunk_o, of_chunk, head, query);
        const MergeFactors by = merge(all, {sums.x, sums.y});
        CF_UNROLL
        for (int c = 0; c < kColumns; c++) {
            const int column = c * kThreads + threadIdx.x;
            if (column < p.shape.head_dim_v) o[c] = by(o[c], ld_global_nc(from + column));
        }
    }

    // [A1.12] [A1.13]
    const float sink =
        p.score.sinks ? static_cast<const float*>(p.score.sinks)[head * p.score.sinks_head] : -kInfinity;
    const FinalRow<float> end = finalize_row(all.row_max, all.row_sum, sink);
    Element* gO = head_rows<Element>(p.o, batch, head, query);
    float* floats = head_rows<float>(p.o, batch, head, query);
    CF_UNROLL
    for (int c = 0; c < kColumns; c++) {
        const int column = c * kThreads + threadIdx.x;
        // why + 0: see flash_forward.
        if (column >= p.shape.head_dim_v) continue;
        const float x = (o[c] + 0.0f) * end.normaliser;
        if (sizeof(Element) == 2 && p.float_o) floats[column] = x;
        else gO[column] = narrow<Element>(x);
    }
    if (threadIdx.x == 0 && p.lse.data) st_global(head_rows<float>(p.lse, batch, head, query), end.lse);
}

CF_KERNEL(ForwardParams, kThreads, 1, flash_combine_chunks)
