// The parameter structs of every kernel, passed by value. cupy_flash/device/abi.py mirrors them field by field;
// tests/cpu/test_abi.py compares every offset with the ones g++ computes.
//
// layout: all strides are in elements and 64-bit; a broadcast axis has stride 0. "may be null" marks what a problem may lack.
#pragma once
#include "base.cuh"

// (batch, head, row, column) of q, k, v, o and their gradients; of mask, bias and dbias, where column is the key.
struct Tensor {
    void* data;
    int64_t batch, head, row, column;
};

// (batch, head, query): float, or double for double inputs.
struct Rows {
    void* data;
    int64_t batch, head, row;
};

struct Shape {
    int32_t batch, heads_q, heads_k;    // heads_q is a multiple of heads_k
    int32_t seqlen_q, seqlen_k;         // the longest, when packed
    int32_t head_dim, head_dim_v;
    int32_t packed;                 // 1: rows of all sequences follow each other, the batch strides are 0
    const int32_t* cu_seqlens_q;    // (batch + 1), null unless packed
    const int32_t* cu_seqlens_k;    // (batch + 1), null unless packed
    const int32_t* seqused_k;       // (batch), may be null: keys in use of each sequence
};

// The element type of a bias or dbias, decided at run time.
enum BiasType : int32_t { kBiasF16 = 0, kBiasBF16 = 1, kBiasF32 = 2, kBiasF64 = 3 };

#if defined(CF_FUNCTION)
// An array that a score function reads.
struct FunctionArray {
    const void* data;
    int64_t stride[4], extent[4];    // of its axes, as many as it has
};
#endif

// Everything between q k^T and the softmax, in the order in which it applies, and the dropout after it.
struct Score {
    double scale;                // factor on q k^T
    double softcap;              // 0: none; otherwise s -> softcap * tanh(s / softcap)
    Tensor bias;                 // data may be null; added
    const void* alibi_slopes;    // (heads_q) or (batch, heads_q) of float, double for double inputs, or null
    int64_t alibi_batch, alibi_head;    // its strides; 0 along a batch axis that it has not
    const void* sinks;                  // (heads_q) of float (double for double inputs), may be null
    int64_t sinks_head;                 // its stride
    Tensor mask;                        // bool, true = may attend; data may be null
    Tensor spans;               // int32 bounds, (batch, heads_q, key or query, bound); data may be null
    int64_t offset;             // query i stands at key position i + offset
    int64_t left, right;        // keeps i + offset - left <= j <= i + offset + right; kOpen = no bound
    int32_t offset_from_end;    // 1: seqlen_k - seqlen_q of each sequence is added to offset (bottom-right)
    int32_t bias_type;          // BiasType
    int32_t span_intervals;     // 1 or 2
    int32_t spans_by_query;    // 1: intervals of the keys that a query sees; 0: of the queries that see a key
    uint64_t dropout_seed;
    double dropout_scale;          // 1 / (1 - dropout), on what is kept
    uint32_t dropout_threshold;    // 0: no dropout; a weight is kept if its Philox word >= threshold
    int32_t block_count;           // different blocks that are seen in part
    Tensor blocks;    // int32, (batch, heads_q, block of queries, block of keys); data may be null
    const uint8_t* block_bits;    // (block_count, queries of a block, keys of a block / 8), lowest bit first
    int32_t block_log_queries, block_log_keys;    // logarithms of the sizes of a block
#if defined(CF_FUNCTION)
    FunctionArray
        arrays[CF_FUNCTION];    // what the score function reads, in kernels that are compiled for one
#endif
};
constexpr int64_t kOpen = int64_t(1) << 62;

struct ForwardParams {
    Tensor q;    // (batch, heads_q, seqlen_q, head_dim)
    Tensor k;    // (batch, heads_k, seqlen_k, head_dim)
    Tensor v;    // (batch, heads_k, seqlen_k, head_dim_v)
    Tensor o;    // (batch, heads_q, seqlen_q, head_dim_v)
    Rows lse;    // (batch, heads_q, seqlen_q), data may be null
    Shape shape;
    Score score;
    uint32_t* next_tile;    // tiles given out beside each block's first, 0 at launch; may be null
    // Only where q has a tensor map. A tile's row r is query r >> head_bits and head r % (1 << head_bits) of a
    // group, those from heads_q / heads_k on are none; 0: a tile is of one head.
    int32_t head_bits;
    // Only of reproducible flash_forward: keys come in chunks, see tile/chunk.cuh. 1: a block has all of its rows,
    // which lie in chunk_o in between; more: each is a block's, and flash_combine_chunks merges them.
    int32_t chunks;
    // (chunks * batch, heads_q, seqlen_q, class of head_dim_v) of float; data null: there are no chunks.
    Tensor chunk_o;
    Tensor chunk_rows;    // (chunks * batch, heads_q, seqlen_q, 2) of float, the same: maximum, sum
    // (batch, heads_q, tile of queries, 2 for 32 blocks of keys) of uint32: written by flash_reach, see
    // attention/reach.cuh; data null: no kernel of the call asks.
    Tensor reach;
    int32_t float_o;    // 1: o is float though q has 16 bits, for a part that is merged with others
    int32_t reserved;
};

// What the Hopper kernel takes: how bulk copies see q, k, v and o, with boxes of the kernel's tiles, and the
// same call. k and v are (dim, row, head, batch); q and o are (dim, head of a group, row, group, batch), where
// a group is one head unless head_bits is above 0. Packed tensors have one batch.
struct HopperForwardParams {
    TensorMap q_map, k_map, v_map, o_map;
    ForwardParams call;
};

// Factors on stored numbers, (1 or batch, heads_k): a value is the stored number times its factor.
struct Scales {
    const float* data;    // may be null: 1
    int64_t batch, head;
};

// A forward pass of q, k and v of float8 e4m3.
struct Fp8ForwardParams {
    ForwardParams call;
    Scales q_scale, k_scale, v_scale;
    int32_t o_type;    // BiasType, kBiasF16 or kBiasBF16
    int32_t reserved;
};

// What the Hopper kernel takes of the same.
struct HopperFp8ForwardParams {
    TensorMap q_map, k_map, v_map, o_map;
    ForwardParams call;
    Scales q_scale, k_scale, v_scale;
    int32_t o_type;    // BiasType, kBiasF16 or kBiasBF16
    int32_t reserved;
};

// A forward pass of floats as halves, in records of tiles, see hopper/halves.cuh: flash_split_f16 writes them.
struct F16x3ForwardParams {
    ForwardParams call;
    void *q_halves, *k_halves, *v_halves;
};

struct BackwardParams {
    Tensor q, k, v, o;    // as in the forward pass
    Tensor d_o;           // like o
    Tensor dq, dk, dv;    // like q, k, v
    Tensor dbias;    // the broadcast shape of the bias, its strides 0 on broadcast axes; data may be null
    Rows lse;        // (batch, heads_q, seqlen_q)
    Rows dlse;       // like lse, data may be null
    Rows delta;      // like lse: rowsum(dO * O) - dLSE, written by the delta pass, read by the others
    void* dq_accumulator;    // sums of dQ, float, as GradientSums lays them out; null if a block owns dQ
    // Blocks that have added to each tile of sums, 0 at launch: the first stores. Null: in any order, to sums of 0.
    uint32_t* dq_turns;
    uint32_t* next_block;    // blocks that have started, 0 at launch; null if dq_turns is
    // Blocks of a head that take turns in an order of their own, see hopper/dq_order.cuh: each tile has two sums and
    // two counters then, one behind the other. 0: one. Of masks without a left limit only, and with dq_turns.
    int32_t dq_wave;
    int32_t float_gradients;    // 1: dq, dk and dv are float though q has 16 bits, shares of a sum
    void* dsinks;               // (heads_q) of float (double for double inputs), may be null
    // (batch, heads_q, block of keys, 2 for 32 tiles of queries) of uint32: written by flash_reach_of_keys, see
    // attention/reach.cuh; data null: no kernel of the call asks.
    Tensor reach;
    // Extents of the axes of bias and dbias, 1 where broadcast.
    int32_t bias_batch, bias_heads, bias_rows, bias_columns;
    Shape shape;
    Score score;
};

// Where the gradient of an argument of a score function goes.
struct ArgumentGradient {
    void* data;              // null: not wanted
    int64_t stride[4];       // of its axes
    int64_t first, count;    // which of the elements of a slice are its own, in the order of C
    int32_t type;            // BiasType
    int32_t reserved;
};

// What simple_backward_args takes.
struct ArgumentParams {
    BackwardParams call;
    double* sums;        // (slices, elements), 0 at launch
    int64_t elements;    // of all gradients that are wanted
    int64_t slices;
    ArgumentGradient gradients[16];
};

// What second order takes: the call whose passes are differentiated, in one direction. A tangent that is null is 0.
struct SecondOrderParams {
    Tensor q_dot, k_dot, v_dot, bias_dot;    // tangents, like their arrays
    Tensor o_dot;                            // like o: written by jvp, read by hvp
    Rows lse_dot;                            // like lse, the same
    Rows delta_dot;            // like delta: rowsum(dO * dotO), written by the first pass of hvp
    const void* sinks_dot;     // (heads_q) of float (double for double inputs)
    int64_t sinks_dot_head;    // its stride
    // d_o, dlse, delta and what begins with d: of hvp only, derivatives. Last, as the arrays of a score function are
    // its end, which kernels without one do not read.
    BackwardParams call;
};

// What attention_statistics takes: sums over the weights of a call, of which q, k, lse, shape and score are read.
struct StatisticsParams {
    Rows key_sum, key_max;    // (batch, heads_q, seqlen_k), packed like rows of k; data may be null
    Rows entropy;             // like lse
    BackwardParams call;
};

// The same for the backward pass: boxes of its tiles of q, k, v and dO.
struct HopperBackwardParams {
    TensorMap q_map, k_map, v_map, do_map;
    BackwardParams call;
};
struct F16x3BackwardParams {
    BackwardParams call;
    void *q_halves, *k_halves, *v_halves, *do_halves;
};

// Keys and values of sequences are in slots of a cache, one for a sequence or one for each of its pages.
// Scales of 4-bit codes: feature f of a key is scale[f / group] * code + zero[f / group], for E2M1
// scale[f / 16] * code times the scale of its head. (slots, heads_k, keys of a slot, groups), groups contiguous.
struct Units {
    void* scale;                // of half, of E2M1 e4m3; null: no codes
    void* zero;                 // of half; null: E2M1
    int64_t slot, head, row;    // strides, of both
    int32_t group_bits;         // features of a group: 16, 32, 64 or 128 are 4, 5, 6 or 7
    int32_t reserved;
};

struct Cache {
    Tensor k, v;             // (slots, heads_k, keys of a slot, head_dim); the stride `batch` is a slot's
    const int32_t* table;    // (batch, pages of a sequence): their slots; null: its own number
    int64_t table_batch, table_page;    // its strides
    const int32_t* lengths;             // (batch): keys in use before the call; may be null
    int64_t lengths_batch;              // its stride
    int64_t length;                     // those of every sequence if `lengths` is null
    const void* k_scale;    // (1 or batch, heads_k) of float, of double for double queries; may be null:
                            // a key is its stored value times this
    int64_t k_scale_batch, k_scale_head;
    const void* v_scale;    // the same of values
    int64_t v_scale_batch, v_scale_head;
    const int32_t* new_starts;    // (batch + 1): rows of new keys where those of sequences begin; may be null
    const int32_t* leftpad;       // (batch): masked keys before the first; may be null
    int32_t slots;
    int32_t page;          // keys of a slot, 0: a whole sequence
    int32_t page_shift;    // its logarithm; 31: a whole sequence, -1: it is no power of two
    int32_t capacity;      // keys that a sequence has room for
    int32_t appended;      // new keys of each sequence, of all with new_starts
    int32_t reserved;
    Units k_units, v_units;    // of 4-bit codes, two of which are an element of k and v
};

// Rotation of `rotated` features by position, from first_rotated on.
struct Rotary {
    const void* cos;    // (positions, rotated / 2), may be null: no rotation
    const void* sin;
    const int32_t* first;    // (batch): positions of the first query and new key; null: where they stand
    int64_t cos_row, cos_column, sin_row, sin_column;    // strides
    int32_t positions, rotated;
    int32_t interleaved;    // 1: of these features 2i and 2i + 1 are a pair, 0: i and i + rotated / 2
    int32_t table_type;     // BiasType of cos and sin
    int32_t on_read;        // 1: keys are stored as they come, and rotated when they are gathered
    int32_t first_rotated;
};

// What flash_append, flash_gather, flash_decode and flash_combine take.
struct DecodeParams {
    Tensor q;               // (batch, heads_q, seqlen_q, head_dim)
    Tensor rotated_q;       // the same, rotated: written by flash_append; data null without rotation
    Tensor k_new, v_new;    // (batch, heads_k, appended, head_dim), data may be null
    Tensor o;               // (batch, heads_q, seqlen_q, head_dim_v)
    Rows lse;               // (batch, heads_q, seqlen_q), data may be null
    float* partial_o;       // (splits, batch, heads_q, seqlen_q, head_dim_v), null if splits is 1
    float* partial_lse;     // (splits, batch, heads_q, seqlen_q), the same. In order: chunk_o, chunk_rows
    Tensor k_gathered;    // (batch, heads_k, capacity, head_dim): written by flash_gather; data may be null.
                          // Of packed queries (1, heads_k, batch * capacity, head_dim)
    Tensor v_gathered;    // (batch, heads_k, capacity, head_dim_v), the same
    uint8_t* kept;        // (batch, capacity) bool: keys whose page lies in the cache, the same; may be null
    int32_t* used;        // (batch): keys in use, written by flash_append; may be null
    int32_t* starts;      // (batch + 1): packed queries: rows of k_gathered where sequences begin; or null
    int32_t splits;       // parts that the keys of a sequence are cut into
    int32_t reserved;
    Cache cache;
    Rotary rotary;
    Shape shape;    // seqlen_k is the capacity of the cache
    Score score;
};

// What the Hopper kernel takes: how bulk copies see the cache of keys, as (dim, key of a slot, head, slot).
struct HopperDecodeParams {
    TensorMap k_map;
    DecodeParams call;
};
