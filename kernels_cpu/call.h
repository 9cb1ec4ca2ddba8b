// The params of every entry: one struct, written by cupy_flash/cpu/core.py, which a test compares with it.
#pragma once
#include <stdint.h>
#include "system.h"

// why numbers: they are the indices of a table in core.py.
enum Type : int32_t { kF32, kF16, kBf16, kF64, kE4m3, kInt8, kBool, kCodes };

// Strides in elements, any sign, 0 where an axis is broadcast. data is null if the call has no such array.
struct Tensor {
    void* data;
    int64_t batch, head, row, column;
    Type type;
    int32_t unused;
};

// Scales of 4-bit codes, (slot, head, key, group of features). Integers: a value is code * `scale` + `zero`. E2M1: groups
// of 16, `scale` is the bits of a float8 e4m3, and zero.data is null.
struct Codes {
    Tensor scale, zero;
    int64_t group;    // features of a group
};

// Intervals, `start, stop` each, of the queries that see a key, or of the keys that a query sees; column is the bound.
struct Spans {
    const int32_t* data;    // null if the call has none
    int64_t batch, head, row, column;
    int32_t intervals, by_query;
};
struct SpanLimits;    // spans.h
struct Function;      // function.h

// A block mask. Entries of the table: 0 empty, 1 full, n + 2 partial with the n-th block of bits, which has a row per
// query and a bit per key.
struct Blocks {
    const int32_t* table;    // null if the call has none; strides of (batch, heads_q, block, block)
    int64_t batch, head, row, column;
    const uint8_t* bits;
    int32_t log_queries, log_keys;    // of a block
};

// Why an entry returned. A caller in another thread may write kStop into a call that is running.
enum State : int32_t { kFine, kStop, kNoMemory, kOutside };

struct Call {
    Tensor q, k, v, o, d_o;              // (batch, heads, row, feature)
    Tensor dq, dk, dv;                   // the same; backward
    Tensor lse, dlse;                    // (batch, heads_q, row); Real
    Tensor mask, bias, dbias;            // (batch, heads_q, query, key)
    Tensor alibi_slopes;                 // (batch, heads_q); Real
    Tensor sinks, dsinks;                // (heads_q,); Real
    Tensor q_scale, k_scale, v_scale;    // (batch, heads_k); float
    Tensor new_k, new_v;                 // decode: (batch, heads_k, row, feature), appended to k and v
    Tensor rotary_cos, rotary_sin;       // decode: (position, feature / 2), strides row and column
    Codes k_codes, v_codes;              // decode: of a cache of kCodes, two features to a byte
    Spans spans;                         // (batch, heads_q, key or query, bound)
    SpanLimits* span_limits;             // an entry's own
    void* lse_unit;                      // an entry's own, of the strides of lse; or null
    Blocks blocks;
    Function* function;        // of scores; or null
    void* parallel;            // GOMP_parallel of the OpenMP whose threads compute; null: the pool's
    int64_t function_reals;    // behind a tile, for it; 0 without one
    int64_t dbias_shape[4];    // of dbias: 1 where it is a sum
    const int32_t *starts_q, *starts_k;    // packed: (batch + 1), rows where sequences begin; else null
    const int32_t* used_q;                 // packed: (batch,), queries in use; or null
    const int32_t* starts_mask;            // (batch + 1), where masks (queries, keys) in a row begin; or null
    const int32_t* used_k;                 // (batch,), keys in use, of a cache those before new ones; or null
    int64_t used_step;                     // its stride
    const int32_t* pages;                  // cache: (batch, page_row), slot of each page of keys; or null
    int64_t page_row, page_column, page;    // strides of `pages`; keys of a page
    int64_t slots;                          // of the cache
    int64_t appended;                       // new keys of each sequence
    const int32_t* starts_new;              // (batch + 1), rows where new keys of sequences begin; or null
    const int32_t* rotary_starts;    // (batch,), rotation: position of the first query and new key; or null
    const int32_t* leftpad;          // (batch,), keys of a cache that nobody sees before the first; or null
    int64_t batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v;
    int64_t offset, left, right;                 // keeps i + offset - left <= j <= i + offset + right
    int64_t rotary, first_rotated, positions;    // rotated features, the first of them; rows of the tables
    uint64_t seed;
    double scale, softcap, dropout_scale;    // softcap: 0 for none; 1 / (1 - dropout)
    uint32_t dropout_threshold;              // random words below it are dropped; 0: no dropout
    int32_t offset_from_end;                 // to offset keys - queries are added, of each sequence
    int32_t interleaved;                     // rotation pairs 2i and 2i + 1
    int32_t rotate_cache;                    // keys of the cache are rotated when they are read
    int32_t spans_at_end;    // spans by key are of the last keys, one for each query; earlier ones all see
    int32_t reproducible;    // a row is summed as if it were alone
    int32_t wide;            // Real is double
    int32_t threads;
    State state;
    int64_t jobs, done;    // of the first loop of an entry, which takes by far the longest; for who looks on
};

extern "C" {
// Each returns the state of the call when it is done.
EXPORTED int32_t cupy_flash_forward(Call*);
EXPORTED int32_t cupy_flash_backward(Call*);
EXPORTED int32_t cupy_flash_backward_dbias(Call*);
EXPORTED int32_t cupy_flash_decode(Call*);
}
