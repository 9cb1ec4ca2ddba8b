// The stream of Q and dO tiles through shared memory, for blocks that own keys; with each LSE and delta of its rows.
#pragma once
#include "attention/seqlen.cuh"
#include "tile/tile.cuh"

// How the slots of Q and dO are used. two: the next pair of tiles comes while one is read. one: Q has two
// slots, dO one, which is refilled as soon as dV has read it. registers: one slot each, the next pair waits
// in registers (Turing has no cp.async).
enum class Slots { registers, one, two };

// LSE and delta of the rows of each slot of Q; of rows past the end 0. None without slots: then whoever needs
// them loads them.
template <int kRows, int kSlots>
struct NumberSlots {
    float numbers[kSlots][2][kRows];
    CF_DEVICE uint32_t address() const { return smem_addr(numbers); }
};
template <int kRows>
struct NumberSlots<kRows, 0> {
    CF_DEVICE uint32_t address() const { return 0; }
};

// Tiles of Q and dO of the heads that share a key block: head after head, in each the tiles [first, end).
//
// A step calls next() before it reads Q, fill_q() after the first barrier of the block past the last step's reads of
// Q, and complete() after its last read of dO; with one slot of dO also d_o_arrived() before the first.
template <class QTile, class DOTile, int kThreads, Slots kSlots>
struct QueryRing {
    enum : int {
        kQSlots = kSlots == Slots::registers ? 1 : 2,
        kDOSlots = kSlots == Slots::two ? 2 : 1,
        kRows = QTile::kRows
    };
    static_assert(2 * kRows <= kThreads, "a thread copies one number");
    using QLoader = TileLoader<QTile, kThreads>;
    using DOLoader = TileLoader<DOTile, kThreads>;
    struct Storage : NumberSlots<kRows, kSlots == Slots::registers ? 0 : kQSlots> {
        QTile q[kQSlots];
        DOTile d_o[kDOSlots];
    };

    QLoader q;
    DOLoader d_o;
    uint32_t q_slots, d_o_slots, number_slots;    // shared addresses
    int64_t q_head, d_o_head;                     // elements from head to head
    const float* numbers;                         // that this thread copies, in row 0
    const Rows &lse_rows, &delta_rows;
    int32_t seqlen_q, first, end, tile, heads_left;    // the tile that is sent for next
    uint32_t parity = 1;                               // of the tile that is read
    uint4 q_waiting[kSlots == Slots::registers ? QLoader::kCopies : 1];
    uint4 d_o_waiting[kSlots == Slots::registers ? DOLoader::kCopies : 1];

    template <class Element>
    CF_DEVICE QueryRing(const GlobalRows<Element>& gQ, const GlobalRows<Element>& gDO, int64_t q_head_,
                        int64_t d_o_head_, const Rows& lse, const Rows& delta, const Sequence& sequence,
                        int32_t head, Range tiles, int32_t heads, const Storage& storage)
        : q(gQ), d_o(gDO), q_slots(smem_addr(storage.q)), d_o_slots(smem_addr(storage.d_o)),
          number_slots(storage.address()), q_head(q_head_), d_o_head(d_o_head_), lse_rows(lse),
          delta_rows(delta), seqlen_q(sequence.seqlen_q), first(tiles.first), end(tiles.end),
          tile(tiles.first), heads_left(heads) {
        const Rows& of = threadIdx.x / kRows % 2 ? delta : lse;
        numbers = head_rows<float>(of, sequence.batch, head, sequence.first_q + threadIdx.x % kRows);
        if constexpr (kSlots == Slots::registers) {
            fetch();
        } else {
            send_q(0);
            send_d_o(0);
            advance();
            arrive();
        }
    }
    CF_DEVICE uint32_t q_tile() const { return q_slots + (kQSlots == 2 ? parity * QTile::kBytes : 0); }
    CF_DEVICE uint32_t d_o_tile() const { return d_o_slots + (kDOSlots == 2 ? parity * DOTile::kBytes : 0); }
    // Of row `row` of the tile.
    CF_DEVICE uint32_t lse(int row) const { return number_slots + parity * (8 * kRows) + 4 * row; }
    CF_DEVICE uint32_t delta(int row) const { return lse(row) + 4 * kRows; }

    // The next pair of tiles.
    CF_DEVICE void next() {
        parity ^= 1;
        if constexpr (kSlots == Slots::registers) {
            // sync: all are done with the pair before, whose slots are filled now, and with its P and dS.
            __syncthreads();
            q.store(q_waiting, q_slots);
            d_o.store(d_o_waiting, d_o_slots);
            // sync: the pair is visible to all.
            __syncthreads();
            fetch();
        } else if constexpr (kSlots == Slots::two) {
            // why without a barrier: the step before has passed one since it last read dO of this slot.
            send_d_o(parity ^ 1);
        }
    }
    CF_DEVICE void d_o_arrived() {
        if constexpr (kSlots == Slots::one) arrive();
    }
    // All warps are done with Q of the step before.
    CF_DEVICE void fill_q() {
        if constexpr (kSlots != Slots::registers) send_q(parity ^ 1);
        if constexpr (kSlots == Slots::two) advance();
    }
    // All that the next step reads first is there, and all warps are done with dO.
    CF_DEVICE void complete() {
        if constexpr (kSlots != Slots::registers) arrive();
        if constexpr (kSlots == Slots::one) {
            send_d_o(0);
            advance();
        }
    }

  private:
    CF_DEVICE static void arrive() {
        cp_async_wait<0>();
        // sync: every thread has its own copies in shared memory, so now all of them are visible to all. In a step, too:
        // dS is complete, and all are done with P and dO.
        __syncthreads();
    }
    // why: a group is committed even when there is nothing left to copy, as in ring.cuh.
    CF_DEVICE void send_q(uint32_t slot) {
        if (heads_left > 0) {
            const int32_t row = tile * kRows;
            q.start(q_slots + slot * QTile::kBytes, row);
            if (threadIdx.x < 2 * kRows)
                cp_async4(number_slots + slot * (8 * kRows) + 4 * threadIdx.x,
                          numbers + row * number_step().row, row + int32_t(threadIdx.x) % kRows < seqlen_q);
        }
        cp_async_commit();
    }
    CF_DEVICE void send_d_o(uint32_t slot) {
        if (heads_left > 0) d_o.start(d_o_slots + slot * DOTile::kBytes, tile * kRows);
        cp_async_commit();
    }
    CF_DEVICE void fetch() {
        if (heads_left == 0) return;
        const int32_t row = tile * kRows;
        q.fetch(q_waiting, row);
        d_o.fetch(d_o_waiting, row);
        advance();
    }
    CF_DEVICE void advance() {
        if (++tile < end) return;
        tile = first;
        heads_left--;
        q.advance(q_head);
        d_o.advance(d_o_head);
        numbers += number_step().head;
    }
    // why: found out anew each time, strides take no registers.
    CF_DEVICE const Rows& number_step() const {
        return opaque(threadIdx.x) / kRows % 2 ? delta_rows : lse_rows;
    }
};
