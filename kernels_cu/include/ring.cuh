// The stream of K and V tiles through shared memory: a ring of slots that is filled ahead of the products
// that read it.
//
// Tiles come alternately, K of one block of keys, V of the same block, K of the block before it, and so on:
// blocks go from the last key to the first. Step s reads slot s % kSlots while the copies of the kSlots - 1
// tiles after it are under way.
#pragma once
#include "tile.cuh"

enum class Stream { key, value };

// kSlots tiles of the larger of both types. kRegisters: no cp.async; a tile waits in registers for one step
// (kSlots is 2).
template <class KTile, class VTile, int kThreads, int kSlots, bool kRegisters>
struct KeyValueRing {
    static constexpr int kSlotBytes = KTile::kBytes > VTile::kBytes ? KTile::kBytes : VTile::kBytes;
    static constexpr int kAhead = kSlots - 1;
    static_assert(kSlots >= 2 && (!kRegisters || kSlots == 2), "one tile is read while another one comes");
    using KLoader = TileLoader<KTile, kThreads>;
    using VLoader = TileLoader<VTile, kThreads>;

    struct Storage {
        alignas(128) unsigned char slots[kSlots][kSlotBytes];
    };

    KLoader k;
    VLoader v;
    uint32_t base;        // shared address of slot 0
    uint32_t slot = 0;    // byte offset of the slot to be read next
    uint4
        waiting[kRegisters ? (KLoader::kCopies > VLoader::kCopies ? KLoader::kCopies : VLoader::kCopies) : 1];

    template <class Element>
    CF_DEVICE KeyValueRing(const GlobalRows<Element>& gK, const GlobalRows<Element>& gV,
                           const Storage& storage)
        : k(gK), v(gV), base(smem_addr(storage.slots)) {
        k.agree(v);
    }

    // Starts the first tiles; `block` is the last block of keys, the only one whose rows may end early.
    CF_DEVICE void begin(int block, int first_block) {
        if constexpr (kRegisters) {
            fetch<Stream::key>(block, first_block);
        } else {
        CF_UNROLL
            for (int step = 0; step < kAhead; step++) {
                if (step % 2 == 0) start<Stream::key>(block - step / 2, first_block, step * kSlotBytes);
                else start<Stream::value>(block - step / 2, first_block, step * kSlotBytes);
            }
        }
    }
    // Waits for the tile of the next step, K or V of `block`, and sends for the tile kAhead steps later.
    // Returns the shared address of the tile, which may be read until the next call.
    template <Stream kNow>
    CF_DEVICE uint32_t next(int block, int first_block) {
        const uint32_t now = kSlots == 2 ? uint32_t(kNow == Stream::key ? 0 : kSlotBytes) : slot;
        const uint32_t before =
            kSlots == 2 ? kSlotBytes - now : (now == 0 ? kAhead * kSlotBytes : now - kSlotBytes);
        slot = now == kAhead * kSlotBytes ? 0 : now + kSlotBytes;
        constexpr Stream kOther = kNow == Stream::key ? Stream::value : Stream::key;
        constexpr Stream kLater = kAhead % 2 == 0 ? kNow : kOther;
        constexpr int kBlocksLater = (kAhead + (kNow == Stream::value)) / 2;
        if constexpr (kRegisters) {
            if constexpr (kNow == Stream::key) k.store(waiting, base + now);
            else v.store(waiting, base + now);
            // sync: the tile just stored is visible to all; and all are done with the other slot, which they
            // read two calls ago.
            __syncthreads();
            fetch<kLater>(block - kBlocksLater, first_block);
        } else {
            cp_async_wait<kAhead - 1>();
            // sync: every thread has waited for its own copies of this tile, so now the tile is visible to
            // all; and all are done with the tile of the step before, whose slot is filled next.
            __syncthreads();
            start<kLater>(block - kBlocksLater, first_block, before);
        }
        return base + now;
    }

  private:
    // why: a group is committed even when there is nothing left to copy, so that "all but the newest" counts
    // steps.
    template <Stream kWhat>
    CF_DEVICE void start(int block, int first_block, uint32_t to) {
        if (block >= first_block) {
            if constexpr (kWhat == Stream::key) k.start(base + to, block * KTile::kRows);
            else v.start(base + to, block * VTile::kRows);
        }
        cp_async_commit();
    }
    template <Stream kWhat>
    CF_DEVICE void fetch(int block, int first_block) {
        if (block < first_block) return;
        if constexpr (kWhat == Stream::key) k.fetch(waiting, block * KTile::kRows);
        else v.fetch(waiting, block * VTile::kRows);
    }
};
