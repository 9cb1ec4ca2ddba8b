// Keys by chunks, counted from key 0 of a sequence. The softmax of a row begins anew with each, and those of its chunks
// are merged from left to right, by one function. So a chunk may be another thread's, and a row has the same bits
// whether it is part of a prompt or a token of its own.
#pragma once
#include "spans.h"

// why: half a megabyte of keys and values of 128 floats, 50 us of a core; merging takes a prompt 1/300 of its products.
constexpr int64_t kChunkKeys = 4 * kSpanKeys;

// Of a vector of rows: maximum, and sum of weights.
template <class Real>
struct Rows {
    V<Real> row_max, row_sum;
};

// Merges a chunk into the rows of unnormalised O over all chunks before it, `count` vectors that are `step` apart. A
// chunk in which a row sees nothing leaves the row unchanged, except for the sign of 0.
// why noinline: inlined twice, the sums of two products might be rounded in two ways.
template <class Real>
__attribute__((noinline)) void merge(Rows<Real>& all, Real* o, const Rows<Real>& chunk, const Real* o_chunk,
                                     int64_t count, int64_t step) {
    V<Real> top = bigger(chunk.row_max, all.row_max);
    V<Real> finite = top == splat<Real>(-kInfinity<Real>) ? zero<Real>() : top;
    V<Real> left = exp_<Real>(all.row_max - finite), right = exp_<Real>(chunk.row_max - finite);
    all = {top, all.row_sum * left + chunk.row_sum * right};
    for (int64_t i = 0; i < count; ++i)
        store(o + i * step, load(o + i * step) * left + load(o_chunk + i * step) * right);
}
