// The stream of Q and dO tiles through shared memory, for blocks that own keys.
#pragma once
#include "attention/seqlen.cuh"
#include "tile/tile.cuh"

// How the slots of Q and dO are used. two: the next pair of tiles comes while one is read. one: Q has two
// slots, dO one, which is refilled as soon as dV has read it. registers: one slot each, the next pair waits
// in registers (Turing has no cp.async).
enum class Slots { registers, one, two };

// Tiles of Q and dO of the heads that share a key block: head after head, in each the tiles [first, end).
template <class QTile, class DOTile, int kThreads, Slots kSlots>
struct QueryRing {
    enum : int { kQSlots = kSlots == Slots::registers ? 1 : 2, kDOSlots = kSlots == Slots::two ? 2 : 1 };
    using QLoader = TileLoader<QTile, kThreads>;
    using DOLoader = TileLoader<DOTile, kThreads>;
    struct Storage {
        QTile q[kQSlots];
        DOTile d_o[kDOSlots];
    };

    QLoader q;
    DOLoader d_o;
    uint32_t q_slots, d_o_slots;             // shared addresses
    int64_t q_head, d_o_head;                // elements from head to head
    int32_t first, end, tile, heads_left;    // the tile that is sent for next
    uint32_t parity = 1;                     // of the tile that is read
    uint4 q_waiting[kSlots == Slots::registers ? QLoader::kCopies : 1];
    uint4 d_o_waiting[kSlots == Slots::registers ? DOLoader::kCopies : 1];

    template <class Element>
    CF_DEVICE QueryRing(const GlobalRows<Element>& gQ, const GlobalRows<Element>& gDO, int64_t q_head_,
                        int64_t d_o_head_, Range tiles, int32_t heads, const Storage& storage)
        : q(gQ), d_o(gDO), q_slots(smem_addr(storage.q)), d_o_slots(smem_addr(storage.d_o)), q_head(q_head_),
          d_o_head(d_o_head_), first(tiles.first), end(tiles.end), tile(tiles.first), heads_left(heads) {
        send(0);
        if constexpr (kSlots == Slots::one) send_d_o();
    }
    CF_DEVICE uint32_t q_tile() const { return q_slots + (kQSlots == 2 ? parity * QTile::kBytes : 0); }
    CF_DEVICE uint32_t d_o_tile() const { return d_o_slots + (kDOSlots == 2 ? parity * DOTile::kBytes : 0); }

    // Waits for the next pair of tiles and sends for the one after it.
    CF_DEVICE void next() {
        parity ^= 1;
        if constexpr (kSlots == Slots::registers) {
            // sync: all are done with the pair before, whose slots are filled now.
            __syncthreads();
            q.store(q_waiting, q_slots);
            d_o.store(d_o_waiting, d_o_slots);
        } else {
            cp_async_wait<0>();
        }
        // sync: every thread has its own copies of the pair in shared memory, so now all of it is visible to
        // all; and all are done with the step before: its slots, P and dS may be overwritten.
        __syncthreads();
        send(parity ^ 1);
    }
    // All warps have multiplied by dO for the last time.
    CF_DEVICE void release_d_o() {
        if constexpr (kSlots == Slots::one) {
            // sync: all are done with the slot of dO, which is filled next.
            __syncthreads();
            send_d_o();
        }
    }

  private:
    CF_DEVICE void send(uint32_t slot) {
        if (heads_left == 0) return;
        const int32_t row = tile * QTile::kRows;
        if constexpr (kSlots == Slots::registers) {
            q.fetch(q_waiting, row);
            d_o.fetch(d_o_waiting, row);
        } else {
            q.start(q_slots + slot * QTile::kBytes, row);
            if constexpr (kSlots == Slots::two) d_o.start(d_o_slots + slot * DOTile::kBytes, row);
            cp_async_commit();
        }
        if constexpr (kSlots != Slots::one) advance();
    }
    // why: with one slot dO follows Q by half a step, and the pair is complete when dO has been sent for.
    CF_DEVICE void send_d_o() {
        if (heads_left == 0) return;
        d_o.start(d_o_slots, tile * DOTile::kRows);
        cp_async_commit();
        advance();
    }
    CF_DEVICE void advance() {
        if (++tile < end) return;
        tile = first;
        heads_left--;
        q.advance(q_head);
        d_o.advance(d_o_head);
    }
};
