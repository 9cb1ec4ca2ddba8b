// Splits float32 q, k and v into pairs of halves for flash_forward_f16x3_sm90, and in pass of_gradients also dO for
// flash_backward_f16x3_sm90: see hopper/halves.cuh. Runs before them.
// Design note: docs/kernels/float32.md.
//
//   [S.1]  the largest finite element of a tile
//   [S.2]  s, a power of two; h0 = half(x s), h1 = half(x s - h0), and 1 / s
// why a kernel of its own: the attention kernel would split K and V again for each tile of queries. That moves 256 KB through
// shared memory for 64 keys of head dim 128, as much as the products read.
//
// Grid:   x: the tiles of q, 64 rows of a group each; the same of dO; of k, kBlockN keys of a head each; of v, the same. Of packed
//         sequences as if all were the longest: blocks past the end of a sequence return.
// Block:  a thread takes 8 elements of a row at a time, and keeps them from [S.1] to [S.2].
// Shared: the largest of each warp.
//
// Assumes: rows contiguous, on 16-byte boundaries.
#include "attention/softmax.cuh"
#include "hopper/halves.cuh"
#include "hopper/tile_scheduler.cuh"

// ---- Config
#if !defined(CF_BLOCK_M)
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_BLOCK_M 128
#define CF_BLOCK_N 80
#define CF_THREADS 256
#define CF_SHARED_BYTES 32
#endif
#if !defined(CF_PASS)
#define CF_PASS of_output
#endif
enum class Pass { of_output, of_gradients };
constexpr bool kGradients = Pass::CF_PASS == Pass::of_gradients;
// A tensor with a row for each query.
struct OfQueries {
    const Tensor& from;
    void* halves;
    int32_t columns;
};
template <bool> struct CallOf {
    using Params = F16x3ForwardParams;
    static constexpr int kOfQueries = 1;
    CF_DEVICE static PackGqa rows(const Params& p) { return PackGqa(p.call); }
    CF_DEVICE static OfQueries tensor(const Params& p, uint32_t) {
        return {p.call.q, p.q_halves, p.call.shape.head_dim};
    }
};
template <> struct CallOf<true> {
    using Params = F16x3BackwardParams;
    static constexpr int kOfQueries = 2;
    static_assert(CF_HEAD_DIM == CF_HEAD_DIM_V, "one size of records for q and dO");
    CF_DEVICE static PackGqa rows(const Params&) { return {}; }
    CF_DEVICE static OfQueries tensor(const Params& p, uint32_t number) {
        if (number == 1) return {p.call.d_o, p.do_halves, p.call.shape.head_dim_v};
        return {p.call.q, p.q_halves, p.call.shape.head_dim};
    }
};
using Call = CallOf<kGradients>;
using Params = Call::Params;
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kWarps = kThreads / 32;

struct SharedStorage {
    uint32_t highest[kWarps];    // bits of floats above 0, which are in the order of the floats
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// 8 elements from `column` on of a row, zeros beyond `columns`.
CF_DEVICE void load_eight(float (&x)[8], const float* row, int32_t column, int32_t columns) {
    if (column + 8 <= columns) {
        const float4 low = ld_global_nc(reinterpret_cast<const float4*>(row + column));
        const float4 high = ld_global_nc(reinterpret_cast<const float4*>(row + column + 4));
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
        CF_UNROLL
        for (int i = 0; i < 8; i++) x[i] = column + i < columns ? row[column + i] : 0.0f;
    }
}

// One tile of type T. row_of(row): where a row begins, or null.
template <class T, class RowOf>
CF_DEVICE void split_tile(SharedStorage& s, void* records, int64_t record, int32_t columns, RowOf row_of) {
    constexpr int kChunks = T::kColumns / 8, kEach = T::kRows * kChunks / kThreads;
    static_assert(T::kRows * kChunks % kThreads == 0);
    const int thread = static_cast<int>(threadIdx.x);
    float x[kEach][8];
    // [S.1]
    uint32_t highest = 0;
    CF_UNROLL
    for (int n = 0; n < kEach; n++) {
        const int place = n * kThreads + thread;
        const float* row = row_of(place / kChunks);
        load_eight(x[n], row, place % kChunks * 8, row ? columns : 0);
        CF_UNROLL
        for (int i = 0; i < 8; i++) highest = larger_size(highest, x[n][i]);
    }
    highest = max_over_lanes<32>(highest);
    if (thread % 32 == 0) s.highest[thread / 32] = highest;
    // sync: the largest of every warp is visible.
    __syncthreads();
    CF_UNROLL
    for (int warp = 0; warp < kWarps; warp++) highest = larger(highest, s.highest[warp]);
    // [S.2] s = 2^(14 - exponent of the largest)
    const HalvesScale scale(highest);
    uint8_t* to = static_cast<uint8_t*>(records) + record * T::kRecord;
    CF_UNROLL
    for (int n = 0; n < kEach; n++) {
        const int place = n * kThreads + thread;
        uint32_t first[4], second[4];
        CF_UNROLL
        for (int i = 0; i < 4; i++)
            split_pair(x[n][2 * i] * scale.factor, x[n][2 * i + 1] * scale.factor, first[i], second[i]);
        const int offset = T::Part::offset(place / kChunks, place % kChunks);
        st_global(reinterpret_cast<uint4*>(to + offset), uint4{first[0], first[1], first[2], first[3]});
        st_global(reinterpret_cast<uint4*>(to + T::Part::kBytes + offset),
                  uint4{second[0], second[1], second[2], second[3]});
    }
    const float unit = scale.unit;
    if (thread == 0) st_global(reinterpret_cast<float4*>(to + T::kBytes), float4{unit, unit, unit, unit});
}

CF_DEVICE void flash_split(const Params& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const Shape& shape = p.call.shape;
    const PackGqa rows = Call::rows(p);
    const int32_t tiles = rows.tiles(shape.seqlen_q, kBlockM) * (kBlockM / 64), groups = rows.groups(shape);
    const uint32_t each = static_cast<uint32_t>(tiles) * static_cast<uint32_t>(groups * shape.batch);
    const uint32_t of_q = Call::kOfQueries * each;
    const int32_t blocks = cdiv(shape.seqlen_k, kBlockN);
    const uint32_t of_k = static_cast<uint32_t>(blocks) * static_cast<uint32_t>(shape.heads_k * shape.batch);
    if (blockIdx.x < of_q) {
        const uint32_t number = blockIdx.x < each ? 0 : 1;
        const OfQueries tensor = Call::tensor(p, number);
        const TileCoord work = tile_coord(blockIdx.x - number * each, tiles, groups);
        const Sequence sequence = sequence_of(shape, work.batch);
        const int32_t first = 64 * work.tile;
        // why the whole tile of kBlockM rows: the attention kernel reads all of it.
        if (work.tile / (kBlockM / 64) >= rows.tiles(sequence.seqlen_q, kBlockM)) return;
        const int64_t record =
            record_of_q(shape, rows, sequence, work.head, work.tile / (kBlockM / 64), kBlockM) +
            work.tile % (kBlockM / 64);
        split_tile<Halves<64, CF_HEAD_DIM>>(
            s, tensor.halves, record, tensor.columns, [&](int i) -> const float* {
                const int32_t query = rows.query(first + i), head = rows.head(first + i);
                if (query >= sequence.seqlen_q || head >= rows.heads) return nullptr;
                return head_rows<const float>(tensor.from, work.batch, work.head * rows.heads + head,
                                              sequence.first_q + query);
            });
        return;
    }
    const bool values = blockIdx.x - of_q >= of_k;
    const TileCoord work = tile_coord(blockIdx.x - of_q - (values ? of_k : 0), blocks, shape.heads_k);
    const Sequence sequence = sequence_of(shape, work.batch);
    const int32_t first = kBlockN * work.tile;
    if (first >= sequence.seqlen_k) return;
    const int64_t record = record_of_k(shape, sequence, work.head, work.tile, kBlockN);
    const Tensor& from = values ? p.call.v : p.call.k;
    const auto row_of = [&](int i) -> const float* {
        if (first + i >= sequence.seqlen_k) return nullptr;
        return head_rows<const float>(from, work.batch, work.head, sequence.first_k + first + i);
    };
    if (values) split_tile<Halves<kBlockN, CF_HEAD_DIM_V>>(s, p.v_halves, record, shape.head_dim_v, row_of);
    else split_tile<Halves<kBlockN, CF_HEAD_DIM>>(s, p.k_halves, record, shape.head_dim, row_of);
}

CF_KERNEL(Params, kThreads, 2, flash_split)
