// The producer of the Hopper forward kernels: one thread that loads Q, K and V by TMA into rings of stages in shared
// memory, as consumers free them.
// Design note: docs/kernels/forward_sm90.md.
//
// K has to define
//   Params                   with q_map k_map v_map o_map call
//   Storage                  with k v q_ring k_ring v_ring; q_tile(stage, warpgroup); of kind spans
//                            sparse_blocks[2][stages of K]; work_ring, if there is a scheduler thread
//   QTile KTile VTile        SwizzledTile: what it fills
//   QRing KRing VRing WorkRing    StageRing of the rings; every warp of the consumers frees a stage of Q
//   kMask kBlockN kConsumers kSchedulerThread
// [A2.p] is the tag of FlashAttention-3's Algorithm 2, see flash_forward_sm90.cu.
#pragma once
#include "hopper/sparse_blocks.cuh"
#include "hopper/swizzled_tile.cuh"
#include "hopper/tile_scheduler.cuh"

template <class K> struct Producer {
    using QTile = typename K::QTile;
    using KTile = typename K::KTile;
    using VTile = typename K::VTile;
    // Blocks of keys before the end of a tile at which the next tile is requested. why not earlier: a block that has
    // claimed a tile may still be at a long one when other blocks have nothing left to do.
    static constexpr int32_t kAhead = 3;
    const typename K::Params& p;
    typename K::Storage& s;
    // why counts: a cursor is two registers, of the 24 that a producer has.
    uint32_t tiles = 0, blocks = 0;    // loads issued
    TileScheduler<K> scheduler;        // where it has no thread of its own

    CF_DEVICE Producer(const typename K::Params& p, typename K::Storage& s)
        : p(p), s(s), scheduler(p.call, s) {}
    // By a thread, at the start: so the first copies do not wait for their descriptors.
    CF_DEVICE static void prefetch(const typename K::Params& p) {
        tma_prefetch(p.k_map), tma_prefetch(p.q_map), tma_prefetch(p.v_map), tma_prefetch(p.o_map);
    }
    CF_DEVICE int32_t batch(const WorkTile<K>& work) const { return work.batch_of_rows(p.call.shape); }
    CF_DEVICE int32_t key_row(const WorkTile<K>& work, int32_t block) const {
        return static_cast<int32_t>(work.sequence.first_k) + work.first_key + block * K::kBlockN;
    }
    // The tile to load next.
    CF_DEVICE const WorkTile<K>& get_next_work() {
        // sync: the scheduler has published it.
        if constexpr (K::kSchedulerThread) mbar_wait(s.work_ring.full[0], K::WorkRing::at(tiles).phase);
        else scheduler.publish_next();
        return TileScheduler<K>::slot(s, tiles);
    }
    // Lets the scheduler publish the next tile. Once per tile, after its load_q.
    CF_DEVICE void request_next_work() {
        if constexpr (K::kSchedulerThread) mbar_arrive(s.work_ring.empty[0]);
    }
    CF_DEVICE void load_q(const WorkTile<K>& work) {
        // sync: every warp has stored the O of the tile before, which lies in the shared memory of Q.
        const auto at = K::QRing::at(tiles);
        s.q_ring.acquire(at, K::kConsumers * QTile::kBytes);
        CF_UNROLL
        for (int i = 0; i < K::kConsumers; i++) {
            const int32_t row = work.first_row + 64 * i;
            load_tile(s.q_tile(at.stage, i), p.q_map, s.q_ring.full[at.stage], work.rows.head(row),
                      work.row_of_q(row), work.group, batch(work));
        }
        tiles++;
    }
    template <class T>
    CF_DEVICE void load(T& tile, const TensorMap& map, uint64_t& full, const WorkTile<K>& work,
                        int32_t block) {
        load_tile(tile, map, full, key_row(work, block), work.kv_head, batch(work));
    }
    CF_DEVICE void load_k(const WorkTile<K>& work, int32_t block) {
        const auto at = K::KRing::at(blocks);
        s.k_ring.acquire(at, KTile::kBytes);
        load(s.k[at.stage], p.k_map, s.k_ring.full[at.stage], work, block);
    }
    CF_DEVICE void load_v(const WorkTile<K>& work, int32_t block) {
        const auto at = K::VRing::at(blocks);
        s.v_ring.acquire(at, VTile::kBytes);
        load(s.v[at.stage], p.v_map, s.v_ring.full[at.stage], work, block);
        blocks++;
    }
    // Kind spans: Q, and K and V of the blocks that the tile visits. A block is published before its K is announced, in a
    // slot that no consumer reads any more: each reads it before its O += P V of that block, whose V is free before this K
    // is loaded.
    CF_DEVICE void load_sparse(const WorkTile<K>& work) {
        SparseBlocks visible{work.reach(p.call), WorkTile<K>::words(p.call.shape)};
        const auto published = [&](uint32_t number) -> SparseBlock& {
            const auto at = K::KRing::at(number);
            return s.sparse_blocks[at.phase][at.stage];
        };
        if (work.blocks > 0) load_k(work, (published(blocks) = visible.next()).number());
        load_q(work);
        if (work.blocks <= kAhead) request_next_work();
#pragma unroll 1
        for (int32_t left = work.blocks - 1; left >= 0; left--) {
            if (left == kAhead) request_next_work();
            load_v(work, published(blocks).number());
            if (left > 0) load_k(work, (published(blocks) = visible.next()).number());
        }
    }
    // [A2.p]
    CF_DEVICE void run() {
#pragma unroll 1
        for (;;) {
            const WorkTile<K>& work = get_next_work();
            if (work.blocks == kNoTile) break;
            if constexpr (K::kMask == Mask::spans) {
                load_sparse(work);
            } else {
                // why K before Q: its stages are free while consumers still write the O of the tile before.
                if (work.blocks > 0) load_k(work, work.blocks - 1);
                load_q(work);
                if (work.blocks <= kAhead) request_next_work();
#pragma unroll 1
                for (int32_t block = work.blocks - 1; block >= 0; block--) {
                    if (block == kAhead) request_next_work();
                    load_v(work, block);
                    if (block > 0) load_k(work, block - 1);
                }
            }
        }
        s.q_ring.acquire(K::QRing::at(tiles), 0);
    }
};
