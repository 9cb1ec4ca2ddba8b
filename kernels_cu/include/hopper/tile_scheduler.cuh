// Which tiles of queries a thread block of a Hopper forward kernel works on, and in which order.
// Design note: docs/kernels/forward_sm90.md.
//
// Blocks are persistent: a block takes tiles until there are none left, the next one from a counter in global memory, or
// without one every gridDim.x-th. The scheduler works out what a tile is and publishes it in shared memory, one tile
// ahead of the producer; consumers read it there when the Q of the tile has come.
//
// K has to define
//   Storage    with work[2][stages of Q]; work_ring, if there is a scheduler thread
//   QRing      StageRing of the stages of Q; WorkRing: one stage, from the scheduler to the producer
//   KTile      its Element
//   kMask kBlockM kBlockN
#pragma once
#include "attention/mask.cuh"
#include "attention/reach.cuh"
#include "hopper/mask_kind.cuh"
#include "hopper/pipeline.cuh"

constexpr uint32_t kL2SectionBytes = 16 << 20;    // of K and V that should stay in L2
constexpr int32_t kNoTile = -1;                   // as WorkTile::blocks: there is none left

// Rows of a tile under GQA: row r is query r >> bits and head r % (1 << bits) of a group, the heads of q that share a
// head of k. With 0 bits a group is one head, and rows are queries.
struct PackGqa {
    int32_t bits = 0, heads = 1;    // heads of a group that exist, at most 1 << bits

    CF_DEVICE PackGqa() {}
    CF_DEVICE explicit PackGqa(const ForwardParams& call)
        : bits(call.head_bits), heads(bits ? call.shape.heads_q / call.shape.heads_k : 1) {}
    CF_DEVICE int32_t query(int32_t row) const { return row >> bits; }
    CF_DEVICE int32_t head(int32_t row) const { return row & ((1 << bits) - 1); }
    // Tiles of m rows of a group, and groups of a batch entry.
    CF_DEVICE int32_t tiles(int32_t seqlen_q, int m) const { return cdiv(seqlen_q << bits, m); }
    CF_DEVICE int32_t groups(const Shape& shape) const { return bits ? shape.heads_k : shape.heads_q; }
};

// A tile of queries, in shared memory. why: eight divisions are too many for every warp.
template <class K> struct WorkTile {
    PackGqa rows;
    Sequence sequence;
    int32_t group, kv_head, batch;
    int32_t first_row;
    // Blocks of keys from first_key on that hold a key for a query of the tile. Kind spans: first_key is 0, and these
    // blocks need not be consecutive.
    int32_t first_key, blocks;

    // why in place and field by field: the thread has registers for little more.
    CF_DEVICE void assign(const ForwardParams& call, const Sequence& of, const TileCoord& coord) {
        rows = PackGqa(call);
        group = coord.head, batch = of.batch;
        kv_head = rows.bits ? group : group / (call.shape.heads_q / call.shape.heads_k);
        first_row = coord.tile * K::kBlockM;
        sequence = of;
        if constexpr (K::kMask == Mask::spans) {
            const Reach* of_tile = reach(call);
            int32_t visible = 0;
#pragma unroll 4
            for (int32_t word = words(call.shape) - 1; word >= 0; word--)
                visible += __popc(of_tile[word].seen);
            first_key = 0, blocks = visible;
        } else {
            const Range keys =
                Band(call.score, sequence)
                    .keys_of(rows.query(first_row), rows.query(first_row + K::kBlockM - 1) + 1);
            first_key = keys.first / K::kBlockN * K::kBlockN;
            blocks = cdiv(keys.end - first_key, K::kBlockN);
        }
    }
    // Kind spans: which blocks of keys the tile visits, in words of 32.
    CF_DEVICE static int32_t words(const Shape& shape) { return cdiv(cdiv(shape.seqlen_k, K::kBlockN), 32); }
    CF_DEVICE const Reach* reach(const ForwardParams& call) const {
        return reach_of(call, batch, group, first_row / K::kBlockM);
    }
    // Where tensor maps of q and o have a row. why: packed tensors have one batch.
    CF_DEVICE int32_t row_of_q(int32_t row) const {
        return static_cast<int32_t>(sequence.first_q) + rows.query(row);
    }
    CF_DEVICE int32_t batch_of_rows(const Shape& shape) const { return shape.packed ? 0 : batch; }
    CF_DEVICE bool exists(int32_t row) const {
        return rows.query(row) < sequence.seqlen_q && rows.head(row) < rows.heads;
    }
    // The head of q of a row; rows of no head count as the group's last.
    CF_DEVICE int32_t head(int32_t row) const {
        return group * rows.heads + smaller(rows.head(row), rows.heads - 1);
    }
};

// One thread. why not the producer's, where another warp is idle: it takes as long as a block of keys, and K of the next
// tile would wait for it.
template <class K> struct TileScheduler {
    const ForwardParams& call;
    typename K::Storage& s;
    uint32_t tile = blockIdx.x, published = 0;
    // Packed sequences: the one of the last tile, and how many tiles come before it.
    int32_t batch = 0;
    uint32_t before = 0;

    CF_DEVICE TileScheduler(const ForwardParams& call, typename K::Storage& s) : call(call), s(s) {}
    // Of the number-th tile. It is free once the load of Q of the tile before was issued: the Q of two passes ago was
    // released before that.
    CF_DEVICE static WorkTile<K>& slot(typename K::Storage& s, uint32_t number) {
        const auto at = K::QRing::at(number);
        return s.work[at.phase][at.stage];
    }
    // Writes the next tile into its slot, kNoTile if there is none. Returns whether there is one.
    CF_DEVICE bool publish_next() {
        if (published > 0)
            tile = call.next_tile ? gridDim.x + atomicAdd(call.next_tile, 1u) : tile + gridDim.x;
        WorkTile<K>& work = slot(s, published++);
        const Shape& shape = call.shape;
        const PackGqa rows(call);
        const int32_t groups = rows.groups(shape);
        int32_t tiles = rows.tiles(shape.seqlen_q, K::kBlockM), batches = shape.batch;
        int32_t seqlen_k = shape.seqlen_k;
        // why one sequence after the other: most have fewer tiles than the longest, and a number without a tile would cost
        // as much.
        if (shape.packed) {
            for (;; batch++) {
                if (batch == shape.batch) break;
                const Sequence sequence = sequence_of(shape, batch);
                tiles = rows.tiles(sequence.seqlen_q, K::kBlockM), seqlen_k = sequence.seqlen_k;
                const uint32_t here = static_cast<uint32_t>(tiles) * static_cast<uint32_t>(groups);
                if (tile - before < here) break;
                before += here;
            }
            batches = batch < shape.batch;
        }
        if (tile - before >= static_cast<uint32_t>(tiles) * static_cast<uint32_t>(groups * batches)) {
            work.blocks = kNoTile;
            return false;
        }
        const TileCoord coord =
            lpt_query_tile(tile - before, tiles, shape, groups,
                           kL2SectionBytes / uint32_t(sizeof(typename K::KTile::Element)), batches, seqlen_k);
        work.assign(call, sequence_of(shape, batch + coord.batch), coord);
        return true;
    }
    // One tile ahead of the producer.
    CF_DEVICE void run() {
#pragma unroll 1
        for (bool more = true; more;) {
            const auto at = K::WorkRing::at(published);
            // sync: the producer has taken the tile before, and this one's slot is free.
            mbar_wait(s.work_ring.empty[0], at.phase ^ 1);
            more = publish_next();
            mbar_arrive(s.work_ring.full[0]);
        }
    }
};
