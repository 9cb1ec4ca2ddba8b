// Block sparsity of band, spans and block masks: two bits for each tile of queries and block of keys, whether any pair
// counts and whether some pairs are masked. Runs before the kernels of kind spans, which skip empty blocks and mask partial
// ones.
// Design note: docs/kernels/forward_sm90.md.
//
// Passes: of_queries, for flash_forward_sm90: each tile of queries has the bits of its blocks of keys; of_keys, for
// flash_backward_sm90: each block of keys has the bits of its tiles of queries.
//
//   [R.1]  for each tile of rows with intervals: the least and the greatest start and stop
//   [R.2]  a block is seen if the band reaches it, an interval may, and a block of the mask in it is not empty; it is
//          partial unless it lies in the band, in an interval of every row, and in full blocks of the mask
//
// The intervals of a tile are taken as one. So a block that counts as seen may have no pair; one that does not has none.
//
// Grid:   x = ((batch * heads_q + head) * ceil(tiles / 32) + 32 tiles of queries) * words + 32 blocks of keys. Blocks
//         whose (batch, head) is like another one's return.
// Block:  [R.1] a warp takes every kWarps-th of the 32 tiles of queries, or blocks of keys; [R.2] a warp takes every
//         kWarps-th tile of queries, a lane one block of keys, or the other way round.
// Shared: four bounds of two intervals of 32 tiles of rows.
//
// Assumes: blocks of the mask have 16 queries and keys or more.
#include "attention/mask.cuh"
#include "attention/reach.cuh"

// ---- Config
#if !defined(CF_BLOCK_M)
#define CF_BLOCK_M 128
#define CF_BLOCK_N 128
#define CF_THREADS 256
#define CF_SHARED_BYTES 1024
#endif
#if !defined(CF_PASS)
#define CF_PASS of_queries
#endif
enum class Pass { of_queries, of_keys };
constexpr bool kOfKeys = Pass::CF_PASS == Pass::of_keys;
template <bool> struct CallOf {
    using Params = ForwardParams;
};
template <> struct CallOf<true> {
    using Params = BackwardParams;
};
using Params = CallOf<kOfKeys>::Params;
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kWarps = kThreads / 32;

// Of one interval of each row of a tile. An empty one ends before it starts, and holds nothing.
struct Bounds {
    int32_t first_start, last_start, first_stop, last_stop;

    CF_DEVICE bool may_meet(Range along) const { return first_start < along.end && along.first < last_stop; }
    CF_DEVICE bool hold(Range along) const { return last_start <= along.first && along.end <= first_stop; }
};
struct SharedStorage {
    Bounds bounds[32][2];
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Rows of tile `number`, for tiles of `size` rows; none past the last row.
CF_DEVICE Range rows_of_tile(int32_t number, int32_t size, int32_t rows) {
    return {smaller(number * size, rows), smaller(number * size + size, rows)};
}

constexpr int32_t kOpenRow = 1 << 30;    // beyond every row

// [R.1] of interval n of rows. All lanes of a warp call.
CF_DEVICE Bounds bounds_of(const HeadSpans& spans, Range rows, int n) {
    Bounds all{kOpenRow, -kOpenRow, kOpenRow, -kOpenRow};
    for (int32_t r = rows.first + static_cast<int32_t>(threadIdx.x % 32); r < rows.end; r += 32) {
        const int32_t* at = spans.bounds + r * spans.row + 2 * n * spans.column;
        const int32_t start = at[0], stop = at[spans.column];
        const bool empty = start >= stop;
        all.first_start = smaller(all.first_start, empty ? kOpenRow : start);
        all.last_stop = larger(all.last_stop, empty ? -kOpenRow : stop);
        all.last_start = larger(all.last_start, empty ? kOpenRow : start);
        all.first_stop = smaller(all.first_stop, empty ? -kOpenRow : stop);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        const auto other = [=](int32_t x) { return __shfl_xor_sync(0xffffffffu, x, distance); };
        all = {smaller(all.first_start, other(all.first_start)),
               larger(all.last_start, other(all.last_start)), smaller(all.first_stop, other(all.first_stop)),
               larger(all.last_stop, other(all.last_stop))};
    }
    return all;
}

CF_DEVICE void flash_reach(const Params& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const Shape& shape = p.shape;
    const int32_t tiles = cdiv(shape.seqlen_q, kBlockM), words = cdiv(cdiv(shape.seqlen_k, kBlockN), 32);
    const uint32_t of_head = static_cast<uint32_t>(cdiv(tiles, 32) * words);
    const TileCoord work = tile_coord(blockIdx.x, static_cast<int32_t>(of_head), shape.heads_q);
    if (reach_of(p, work.batch, work.head, 0) !=
        static_cast<const void*>(head_rows<uint32_t>(p.reach, work.batch, work.head, 0)))
        return;
    const int32_t word = work.tile % words, first_tile = work.tile / words * 32;
    const Sequence sequence = sequence_of(shape, work.batch);
    const Band band(p.score, sequence);
    const HeadSpans spans(p.score, sequence, work.head);
    const HeadBlocks blocks(p.score, sequence, work.head);
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32,
                  lane = static_cast<int32_t>(threadIdx.x) % 32;

    // [R.1]
    if (spans.bounds)
        for (int32_t i = warp; i < 32; i += kWarps) {
            const Range rows = spans.by_query ? rows_of_tile(first_tile + i, kBlockM, sequence.seqlen_q)
                                              : rows_of_tile(word * 32 + i, kBlockN, sequence.seqlen_k);
            for (int n = 0; n < spans.intervals; n++) {
                const Bounds found = bounds_of(spans, rows, n);
                if (lane == 0) s.bounds[i][n] = found;
            }
        }
    // sync: all bounds are visible.
    __syncthreads();

    // [R.2]
    const int32_t blocks_of_keys = cdiv(shape.seqlen_k, kBlockN), first_block = word * 32;
    const int32_t all_rows = kOfKeys ? blocks_of_keys - first_block : tiles - first_tile;
    for (int32_t i = warp; i < 32 && i < all_rows; i += kWarps) {
        const int32_t m = kOfKeys ? lane : i, n = kOfKeys ? i : lane;
        const Range queries = rows_of_tile(first_tile + m, kBlockM, sequence.seqlen_q);
        const Range keys = rows_of_tile(first_block + n, kBlockN, sequence.seqlen_k);
        const Range in_band = band.keys_of(queries.first, queries.end);
        bool seen = larger(keys.first, in_band.first) < smaller(keys.end, in_band.end);
        bool whole = band.keeps_all(queries.first, queries.end, keys.first, keys.first + kBlockN);
        if (seen && spans.bounds) {
            const Bounds* of = s.bounds[spans.by_query ? m : n];
            const Range along = spans.by_query ? keys : queries;
            const bool second = spans.intervals > 1;
            seen = of[0].may_meet(along) || (second && of[1].may_meet(along));
            whole = whole && (of[0].hold(along) || (second && of[1].hold(along)));
        }
        if (seen && blocks.table) {
            const int32_t log_q = p.score.block_log_queries, log_k = p.score.block_log_keys;
            seen = false;
            for (int32_t a = queries.first >> log_q; a <= (queries.end - 1) >> log_q; a++)
                for (int32_t b = keys.first >> log_k; b <= (keys.end - 1) >> log_k; b++) {
                    const int32_t code = blocks.code(a, b);
                    seen = seen || code != 0, whole = whole && code == 1;
                }
        }
        const uint32_t all_seen = __ballot_sync(0xffffffffu, seen);
        const uint32_t partial = __ballot_sync(0xffffffffu, seen && !whole);
        const Reach found{all_seen, partial};
        if (lane != 0) continue;
        if constexpr (kOfKeys) reach_of(p, work.batch, work.head, first_block + i)[first_tile / 32] = found;
        else reach_of(p, work.batch, work.head, first_tile + i)[word] = found;
    }
}

CF_KERNEL(Params, kThreads, 1, flash_reach)
