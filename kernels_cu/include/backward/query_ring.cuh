// The stream of Q and dO tiles through shared memory, for blocks that own keys.
// Design note: docs/kernels/backward.md.
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
    int32_t first, end, tile, heads_left;    // tile: whose copy starts next
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

// The same with two slots each, and with LSE and delta of the rows, whose tiles come at different times. A step is
//   next(), reads of Q, of dO; a barrier of the block; fill_q(); the last reads of dO; complete(); more of Q.
// why: a step then has two barriers for everything in shared memory, copies included. The second stands behind the
// products of dV, under which dS is computed.
template <class QTile, class DOTile, int kThreads>
struct StaggeredQueryRing {
    enum : int { kRows = QTile::kRows };
    static_assert(2 * kRows <= kThreads, "a thread copies one number");
    struct Storage {
        QTile q[2];
        DOTile d_o[2];
        float numbers[2][2][kRows];    // LSE, delta; of rows past the end 0
    };

    TileLoader<QTile, kThreads> q;
    TileLoader<DOTile, kThreads> d_o;
    uint32_t q_slots, d_o_slots, number_slots;    // shared addresses
    int64_t q_head, d_o_head;                     // elements from head to head
    const float* numbers;                         // that this thread copies, in row 0
    const Rows &lse_rows, &delta_rows;
    int32_t seqlen_q, first, end, tile, heads_left;    // the tile that is sent for next
    uint32_t parity = 1;                               // of the tile that is read

    template <class Element>
    CF_DEVICE StaggeredQueryRing(const GlobalRows<Element>& gQ, const GlobalRows<Element>& gDO,
                                 const BackwardParams& p, const Sequence& sequence, int32_t head, Range tiles,
                                 int32_t heads, const Storage& storage)
        : q(gQ), d_o(gDO), q_slots(smem_addr(storage.q)), d_o_slots(smem_addr(storage.d_o)),
          number_slots(smem_addr(storage.numbers)), q_head(p.q.head), d_o_head(p.d_o.head), lse_rows(p.lse),
          delta_rows(p.delta), seqlen_q(sequence.seqlen_q), first(tiles.first), end(tiles.end),
          tile(tiles.first), heads_left(heads) {
        numbers =
            head_rows<float>(number_rows(), sequence.batch, head, sequence.first_q + threadIdx.x % kRows);
        send_d_o(0);
        load_q(0);
        complete();
    }
    CF_DEVICE uint32_t q_tile() const { return q_slots + parity * QTile::kBytes; }
    CF_DEVICE uint32_t d_o_tile() const { return d_o_slots + parity * DOTile::kBytes; }
    // Of row `row` of the tile.
    CF_DEVICE uint32_t lse(int row) const { return number_slots + parity * (8 * kRows) + 4 * row; }
    CF_DEVICE uint32_t delta(int row) const { return lse(row) + 4 * kRows; }

    // Goes on to the pair of tiles that complete() has waited for, and sends for the next dO.
    // why without a barrier: the step before has passed one since it last read dO of this slot.
    CF_DEVICE void next() {
        parity ^= 1;
        send_d_o(parity ^ 1);
    }
    // All warps are done with Q of the step before, in whose slot the next one comes.
    CF_DEVICE void fill_q() { load_q(parity ^ 1); }
    CF_DEVICE void complete() {
        cp_async_wait<0>();
        // sync: every thread has its own copies in shared memory, so now all of them are visible to all. In a step, too:
        // dS is complete, and all are done with P and dO.
        __syncthreads();
    }

  private:
    CF_DEVICE void send_d_o(uint32_t slot) {
        if (heads_left > 0) d_o.start(d_o_slots + slot * DOTile::kBytes, tile * kRows);
    }
    // why committed even when there is nothing left to copy: as in ring.cuh.
    CF_DEVICE void load_q(uint32_t slot) {
        if (heads_left > 0) {
            const int32_t row = tile * kRows;
            q.start(q_slots + slot * QTile::kBytes, row);
            if (threadIdx.x < 2 * kRows)
                cp_async4(number_slots + slot * (8 * kRows) + 4 * threadIdx.x,
                          numbers + row * number_rows().row, row + int32_t(threadIdx.x) % kRows < seqlen_q);
        }
        cp_async_commit();
        if (++tile < end) return;
        tile = first;
        heads_left--;
        q.advance(q_head);
        d_o.advance(d_o_head);
        numbers += number_rows().head;
    }
    // why: selected each time, strides take no registers.
    CF_DEVICE const Rows& number_rows() const {
        return opaque(threadIdx.x) / kRows % 2 ? delta_rows : lse_rows;
    }
};
