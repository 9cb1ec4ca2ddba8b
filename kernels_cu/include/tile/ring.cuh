// The stream of K and V tiles through shared memory: a ring of slots that is filled ahead of the products
// that read it.
// Design note: docs/kernels/forward.md.
//
// Tiles come alternately, K of one block of keys, V of the same block, K of the next, and so on. Steps count
// blocks down to 0; place(step) is the block of a step, in any order. The n-th tile lies in slot n % kSlots; while
// it is read, the copies of the kSlots - 1 tiles after it are under way.
#pragma once
#include "tile/tile.cuh"

enum class Stream { key, value };

// kSlots tiles of the larger of both types. kRegisters: no cp.async; a tile waits in registers for one step
// (kSlots is 2).
template <class KTile, class VTile, int kThreads, int kSlots, bool kRegisters>
struct KeyValueRing {
    enum : int { kSlotBytes = larger<int>(KTile::kBytes, VTile::kBytes), kAhead = kSlots - 1 };
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
    uint4 waiting[kRegisters ? larger<int>(KLoader::kCopies, VLoader::kCopies) : 1];

    // Rows: what the loaders of both tiles take.
    template <class Rows>
    CF_DEVICE KeyValueRing(const Rows& gK, const Rows& gV, const Storage& storage)
        : k(gK), v(gV), base(smem_addr(storage.slots)) {
        k.agree(v);
    }

    // Starts the first tiles, from those of `step` on.
    template <class Place>
    CF_DEVICE void begin(int step, Place place) {
        if constexpr (kRegisters) {
            fetch<Stream::key>(step, place);
        } else {
            CF_UNROLL
            for (int tile = 0; tile < kAhead; tile++) {
                if (tile % 2 == 0) start<Stream::key>(step - tile / 2, place, tile * kSlotBytes);
                else start<Stream::value>(step - tile / 2, place, tile * kSlotBytes);
            }
        }
    }
    // Waits for the next tile, K or V of `step`, and sends for the tile kAhead later. Returns the shared address
    // of the tile, which may be read until the next call.
    template <Stream kNow, class Place>
    CF_DEVICE uint32_t next(int step, Place place) {
        const uint32_t now = kSlots == 2 ? uint32_t(kNow == Stream::key ? 0 : kSlotBytes) : slot;
        const uint32_t before =
            kSlots == 2 ? kSlotBytes - now : (now == 0 ? kAhead * kSlotBytes : now - kSlotBytes);
        slot = now == kAhead * kSlotBytes ? 0 : now + kSlotBytes;
        constexpr Stream kOther = kNow == Stream::key ? Stream::value : Stream::key;
        constexpr Stream kLater = kAhead % 2 == 0 ? kNow : kOther;
        constexpr int kStepsLater = (kAhead + (kNow == Stream::value)) / 2;
        if constexpr (kRegisters) {
            if constexpr (kNow == Stream::key) k.store(waiting, base + now);
            else v.store(waiting, base + now);
            // sync: the tile just stored is visible to all; and all are done with the other slot, which they
            // read two calls ago.
            __syncthreads();
            fetch<kLater>(step - kStepsLater, place);
        } else {
            cp_async_wait<kAhead - 1>();
            // sync: every thread has waited for its own copies of this tile, so now the tile is visible to
            // all; and all are done with the tile before, whose slot is filled next.
            __syncthreads();
            start<kLater>(step - kStepsLater, place, before);
        }
        return base + now;
    }

  private:
    // why: a group is committed even when there is nothing left to copy, so that "all but the newest" counts
    // tiles.
    template <Stream kWhat, class Place>
    CF_DEVICE void start(int step, Place place, uint32_t to) {
        if (step >= 0) {
            if constexpr (kWhat == Stream::key) k.start(base + to, place(step) * KTile::kRows);
            else v.start(base + to, place(step) * VTile::kRows);
        }
        cp_async_commit();
    }
    template <Stream kWhat, class Place>
    CF_DEVICE void fetch(int step, Place place) {
        if (step < 0) return;
        if constexpr (kWhat == Stream::key) k.fetch(waiting, place(step) * KTile::kRows);
        else v.fetch(waiting, place(step) * VTile::kRows);
    }
};
