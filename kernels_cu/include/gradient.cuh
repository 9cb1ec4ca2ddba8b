// What the passes of the backward pass share: the stream of Q and dO tiles, from scores to P and dS, where dQ
// is accumulated.
#pragma once
#include "epilogue.cuh"
#include "gradient_sums.cuh"
#include "operand.cuh"
#include "score_tile.cuh"

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

// From S and dP of one head to P and dS, for the rows of a warp: float x[kM][kN][4] as in mma.cuh, rows are
// queries. kAny: everything that a score can meet, asked for at run time; otherwise scale > 0 and the band
// only. kOfProduct: the gradient of scale * q k^T; otherwise that of the score, after the softcap.
template <class Math, bool kAny, int kM, bool kOfProduct = true>
struct ScoreGradient {
    TileScore<Math> score;
    Dropout dropout;
    NarrowBand band;
    const float *gLse, *gDelta;
    int64_t lse_row, delta_row;
    int32_t first_q, seqlen_q;
    float unit_log2, dropout_scale;
    float lse_log2[kM][2], delta[kM][2];    // of this thread's rows

    CF_DEVICE ScoreGradient(const BackwardParams& p, const Sequence& sequence, const Band& of_band,
                            int32_t head)
        : score(p.score, sequence, head), dropout(p.score, sequence.batch, head), band(of_band),
          gLse(head_rows<float>(p.lse, sequence.batch, head, 0)),
          gDelta(head_rows<float>(p.delta, sequence.batch, head, 0)), lse_row(p.lse.row),
          delta_row(p.delta.row), first_q(static_cast<int32_t>(sequence.first_q)),
          seqlen_q(sequence.seqlen_q),
          unit_log2(kAny ? kLog2e : static_cast<float>(p.score.scale * 1.4426950408889634)),
          dropout_scale(dropout.active() ? static_cast<float>(p.score.dropout_scale) : 1.0f) {}

    // LSE of the rows from row_first on.
    // why: rows without keys have an LSE of -inf, rows past the end none; +inf gives both P = 0, with no test
    // per element.
    CF_DEVICE void load_lse(int32_t row_first) {
        each_row([&](int m, int half) {
            const int32_t query = row_first + 16 * m + 8 * half + threadIdx.x % 32 / 4;
            const float lse = query < seqlen_q ? ld_global(gLse + (first_q + query) * lse_row) : kInfinity;
            lse_log2[m][half] = lse == -kInfinity ? kInfinity : lse * kLog2e;
        });
    }
    CF_DEVICE void load_delta(int32_t row_first) {
        each_row([&](int m, int half) {
            const int32_t query = row_first + 16 * m + 8 * half + threadIdx.x % 32 / 4;
            delta[m][half] = query < seqlen_q ? ld_global(gDelta + (first_q + query) * delta_row) : 0.0f;
        });
    }
    // s becomes P, times what softcap makes of a gradient, negative where dropout drops it. put(x, n) gets
    // what of P multiplies dO, n8 columns from n on; dropout_scale is left to the sum.
    template <int kN, class Put>
    CF_DEVICE void weigh(float (&s)[kM][kN][4], const Positions<false>& at, bool whole, Put put) const {
        if constexpr (!kAny) {
            if (!whole) mask_band(s, at, band);
            each<kN>([&](int m, int n, int e) { s[m][n][e] = exponential(s[m][n][e], m, e); });
            put(s, 0);
        } else {
            in_turns(s, [&](auto& x, int n) {
                const Positions<false> here = at.of_column(n);
                float slope[kM][1][4], kept[kM][1][4];
                score.cap(x);
                each<1>([&](int m, int, int e) {
                    slope[m][0][e] = kOfProduct ? score.head.cap_slope(x[m][0][e]) : 1.0f;
                });
                score.add(x, here);
                mask_band(x, here, band);
                each<1>(
                    [&](int m, int, int e) { kept[m][0][e] = x[m][0][e] = exponential(x[m][0][e], m, e); });
                if (dropout.active()) drop_weights(kept, here, dropout);
                put(kept, n);
                each<1>([&](int m, int, int e) {
                    x[m][0][e] *= kept[m][0][e] == 0.0f ? -slope[m][0][e] : slope[m][0][e];
                });
            });
        }
    }
    // dp becomes dS.
    template <int kN>
    CF_DEVICE void differentiate(float (&dp)[kM][kN][4], const float (&p)[kM][kN][4]) const {
        each<kN>([&](int m, int n, int e) {
            const float weight = p[m][n][e], row_delta = delta[m][e / 2];
            if constexpr (kAny) {
                const bool dropped = __float_as_uint(weight) >> 31;
                dp[m][n][e] = fabsf(weight) * ((dropped ? 0.0f : dropout_scale * dp[m][n][e]) - row_delta);
            } else {
                dp[m][n][e] = weight * (dp[m][n][e] - row_delta);
            }
        });
    }

  private:
    CF_DEVICE float exponential(float s, int m, int e) const {
        return ex2(fmaf(s, unit_log2, -lse_log2[m][e / 2]));
    }
    template <class Act>
    CF_DEVICE static void each_row(Act act) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) act(m, half);
        }
    }
    template <int kN, class Act>
    CF_DEVICE static void each(Act act) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) act(m, n, e);
            }
        }
    }
};

// The same for S and dP, whose columns may also be cut into single n8 ones where there are few.
constexpr int score_groups(int rows, int columns, int warps) {
    const int groups = row_groups(rows, columns, warps);
    return 16 * groups <= rows ? groups : row_groups(rows, columns, warps, 8);
}

// A block's sum of rows of dK or dV leaves through a tile: x * factor, 16-row blocks row_group, row_group +
// kRowGroups, ... and columns as in Columns.
template <class T, int kRowGroups, int kColumnGroups, int kM, int kN>
CF_DEVICE void stage_gradient(uint32_t tile_address, const float (&x)[kM][kN][4], float factor, int row_group,
                              int column_group) {
    using Element = typename T::Element;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = 16 * (m * kRowGroups + row_group) + 8 * half + g;
                const int column = grouped_column<kColumnGroups>(n, column_group) + 2 * t;
                const int byte = column * int(sizeof(Element));
                const uint32_t to = tile_address + T::offset(row, byte / 16) + byte % 16;
                const float left = x[m][n][2 * half] * factor, right = x[m][n][2 * half + 1] * factor;
                if constexpr (sizeof(Element) == 4) st_shared(to, float2{left, right});
                else st_shared(to, pack<Element>(left, right));
            }
        }
    }
}
template <class T, int kThreads>
CF_DEVICE void store_tile(const GlobalRows<typename T::Element>& to, uint32_t tile_address) {
#pragma unroll 1
    for (int i = threadIdx.x; i < T::kRows * T::kChunks; i += kThreads) {
        const int row = i / T::kChunks, chunk = i % T::kChunks;
        if (row < to.rows && chunk * T::kChunkElements < to.columns)
            store_chunk(to.row(row), chunk, to.columns,
                        ld_shared<uint4>(tile_address + T::offset(row, chunk)));
    }
}
