// Merges the splits of flash_decode: O and LSE from the O and LSE of each split.
// Design note: docs/kernels/decode.md.
//
// Source: "Flash-Decoding for long-context inference" (2023). O_s and LSE_s are attention over part s of the
// keys:
//   [C1] LSE = log(sum over s of e^(LSE_s)), with the sink as one more part without O
//   [C2] O = sum over s of e^(LSE_s - LSE) O_s, 0 in a row without keys
//
// Grid:   x = (batch * heads_q + head) * seqlen_q + query, a block per row.
// Block:  kWarps warps. Each takes every kWarps-th split, so that the loads of a row are under way together;
//         a lane takes 4 columns of every 128.
// Shared: a row of O for each warp.
//
// Assumes: head_dim_v at most kHeadDim; rows of o as flash_decode does.
#include "abi.cuh"
#include "attention/softmax.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 256
#define CF_THREADS 128
#define CF_SHARED_BYTES 4096
#endif
using Element = CF_ELEMENT;
constexpr int kHeadDim = CF_HEAD_DIM, kThreads = CF_THREADS, kWarps = kThreads / 32;
constexpr int kColumns = kHeadDim / 128;    // groups of 4 columns of a lane

struct SharedStorage {
    alignas(16) float o[kWarps][kHeadDim];
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

CF_DEVICE void flash_combine(const DecodeParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = blockIdx.x;
    const int64_t rows = int64_t(p.shape.batch) * p.shape.heads_q * p.shape.seqlen_q;
    const int32_t query = static_cast<int32_t>(row % p.shape.seqlen_q);
    const int32_t pair = static_cast<int32_t>(row / p.shape.seqlen_q);
    const int32_t head = pair % p.shape.heads_q, batch = pair / p.shape.heads_q;

    // [C1] in every warp
    const float sink =
        p.score.sinks ? static_cast<const float*>(p.score.sinks)[head * p.score.sinks_head] : -kInfinity;
    float highest = -kInfinity;
    for (int32_t split = lane; split < p.splits; split += 32)
        highest = fmaxf(highest, ld_global_nc(p.partial_lse + split * rows + row));
    highest = max_over_lanes<32>(highest);
    const float reference = highest == -kInfinity ? 0.0f : highest;
    float total = 0;
    for (int32_t split = lane; split < p.splits; split += 32)
        total += ex2((ld_global_nc(p.partial_lse + split * rows + row) - reference) * kLog2e);
    total = sum_over_lanes<32>(total);

    // [C2]
    float4 sum[kColumns] = {};
#pragma unroll 4
    for (int32_t split = warp; split < p.splits; split += kWarps) {
        const float lse = ld_global_nc(p.partial_lse + split * rows + row);
        if (lse == -kInfinity) continue;    // its O may never have been written
        const float weight = ex2((lse - reference) * kLog2e);
        const float* from = p.partial_o + (split * rows + row) * p.shape.head_dim_v;
        CF_UNROLL
        for (int c = 0; c < kColumns; c++) {
            const int column = 128 * c + 4 * lane;
            if (column >= p.shape.head_dim_v) continue;
            const float4 x = ld_global_nc(reinterpret_cast<const float4*>(from + column));
            sum[c].x = fmaf(weight, x.x, sum[c].x), sum[c].y = fmaf(weight, x.y, sum[c].y);
            sum[c].z = fmaf(weight, x.z, sum[c].z), sum[c].w = fmaf(weight, x.w, sum[c].w);
        }
    }
    CF_UNROLL
    for (int c = 0; c < kColumns; c++) st_shared(smem_addr(&s.o[warp][128 * c + 4 * lane]), sum[c]);
    // sync: the sums of every warp are visible to all.
    __syncthreads();

    const FinalRow<float> end = finalize_row(highest, total, sink);
    Element* gO = static_cast<Element*>(p.o.data) + batch * p.o.batch + head * p.o.head + query * p.o.row;
    for (int32_t column = threadIdx.x; column < p.shape.head_dim_v; column += kThreads) {
        float x = 0;
        CF_UNROLL
        for (int w = 0; w < kWarps; w++) x += s.o[w][column];
        gO[column] = narrow<Element>(x * end.normaliser);
    }
    if (threadIdx.x == 0 && p.lse.data) {
        float* gLse =
            static_cast<float*>(p.lse.data) + batch * p.lse.batch + head * p.lse.head + query * p.lse.row;
        st_global(gLse, end.lse);
    }
}

CF_KERNEL(DecodeParams, kThreads, 1, flash_combine)
