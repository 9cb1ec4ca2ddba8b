// Masks the pairs of a block of keys that spans and blocks exclude for the rows of a warp, where flash_reach calls it partial.
// Design note: docs/kernels/forward_sm90.md.
//
// layout: scores as in mma.cuh; a lane has rows g = lane / 4 and g + 8 of its warp's 16, and of the 8 columns of each n
// columns 2 t, t = lane % 4, and one more. What it sees of a row is a word: bits 2 n and 2 n + 1, in the order of keys.
// why words: two registers hold what 4 kKeys / 8 comparisons would take, and all that is looked up comes before scores are
// touched.
#pragma once
#include "attention/mask.cuh"

template <int kKeys> struct MaskedPairs {
    static_assert(kKeys <= 128 && kKeys % 16 == 0, "a word has a bit for each column of a lane");
    const Score& rule;
    const Sequence& sequence;
    int32_t head;
    int32_t first_query;    // of the warp, a multiple of 16
    int32_t first_key;      // of the block, a multiple of 16

    // -inf where a pair is masked. All lanes of a warp call.
    CF_DEVICE void apply(float (&s)[1][kKeys / 8][4]) const {
        uint32_t kept[2] = {~0u, ~0u};
        if (rule.spans.data) {
            if (rule.spans_by_query) keep_keys(kept);
            else keep_queries(kept);
        }
        if (rule.blocks.data) keep_blocks(kept);
        // why: of the block's pairs some are masked, but often from other warps.
        constexpr uint32_t kAll = ~0u >> (32 - kKeys / 4);
        if (__all_sync(0xffffffffu, (kept[0] & kept[1] & kAll) == kAll)) return;
        CF_UNROLL
        for (int n = 0; n < kKeys / 8; n++) {
            CF_UNROLL
            for (int i = 0; i < 4; i++) {
                const int e = i / 2 + i % 2 * 2;
                s[0][n][e] = kept[e / 2] >> (2 * n + e % 2) & 1 ? s[0][n][e] : -kInfinity;
            }
        }
    }

  private:
    // why opaque: what lanes and parameters alone say would wait in registers and predicates that whole blocks do not have.
    CF_DEVICE static int32_t again(int32_t x) {
        return static_cast<int32_t>(opaque(static_cast<uint32_t>(x)));
    }
    CF_DEVICE static int32_t lane() { return static_cast<int32_t>(opaque(threadIdx.x) % 32); }
    // The first interval of row 0, or key 0.
    // why not HeadSpans: numbers of heads and rows have no sign, which makes products of three instructions two.
    CF_DEVICE const int32_t* intervals() const {
        return static_cast<const int32_t*>(rule.spans.data) +
               static_cast<uint32_t>(sequence.batch) * static_cast<uint64_t>(rule.spans.batch) +
               static_cast<uint32_t>(head) * static_cast<uint64_t>(rule.spans.head);
    }
    // What a row or a key sees: of each of its intervals all from the start on and before the stop. from(bound): a word of
    // all that are not before it.
    template <class From> CF_DEVICE uint32_t seen_of(const int32_t* intervals, int32_t row, From from) const {
        const int32_t* at = intervals + static_cast<uint32_t>(row) * static_cast<uint64_t>(rule.spans.row);
        uint32_t seen = from(at[0]) & ~from(at[rule.spans.column]);
        const auto next = [&] {
            at += 2 * rule.spans.column;
            seen |= from(at[0]) & ~from(at[rule.spans.column]);
        };
        // why a loop: two intervals are seldom, and ptxas would not branch around them.
        if constexpr (kKeys < 128) {
#pragma unroll 1
            for (int32_t n = again(rule.span_intervals); n > 1; n--) next();
        } else if (again(rule.span_intervals) > 1) next();
        return seen;
    }
    // Spans by query: intervals of each of the two rows.
    CF_DEVICE void keep_keys(uint32_t (&kept)[2]) const {
        const int32_t* first = intervals();
        const int32_t lane = this->lane(), key = first_key + lane % 4 * 2;
        const auto from = [=](int32_t bound) {
            // why the larger first: bounds may be any numbers.
            const int32_t keys = smaller(larger(bound, key) - key, kKeys), odd = smaller(keys % 8, 2);
            return ~0u << keys / 8 << (keys / 8 + odd);    // why twice: 32 bits are too far for one
        };
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t query = smaller(first_query + lane / 4 + 8 * half, sequence.seqlen_q - 1);
            kept[half] &= seen_of(first, query, from);
        }
    }
    // Spans by key: of each key that rows see it, found by one lane for a key in 32; then bits go where their rows are.
    // layout: before, a lane has keys 32 k + 8 i + 2 t + odd, where lane = 8 i + 4 odd + t, a byte for each k of rows 8 half
    // on. Columns of t are in lanes of t already; bits of i and odd change places with those of g.
    CF_DEVICE void keep_queries(uint32_t (&kept)[2]) const {
        const int32_t* first = intervals();
        const int32_t lane = this->lane(), key = first_key + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
        // why the block's last key again: past it keys have no say in the vote.
        const int32_t last = smaller(first_key + kKeys, sequence.seqlen_k) - 1;
        const auto from = [this](int32_t bound) {
            // why the larger first: bounds may be any numbers.
            return ~0u << smaller(larger(bound, first_query) - first_query, 16);
        };
        constexpr int kEach = (kKeys + 31) / 32;
        uint32_t seen[2] = {~0u, ~0u};
        // why not always: tiles of 192 queries have no registers for keys at once.
#pragma unroll kEach < 4 ? kEach : 1
        for (int k = 0; k < 32 * kEach; k += 32) {
            const uint32_t rows = seen_of(first, smaller(key + k, last), from);
            seen[0] = permute_bytes(seen[0], rows, 0x4321), seen[1] = permute_bytes(seen[1], rows, 0x5321);
        }
        if (kEach == 3)
            seen[0] = permute_bytes(seen[0], 0, 0x0321), seen[1] = permute_bytes(seen[1], 0, 0x0321);
        // why: of the warps of a tile that is seen in part most see all of it, or nothing.
        if (__all_sync(0xffffffffu, (seen[0] & seen[1]) == ~0u)) return;
        CF_UNROLL
        for (int i = 0; i < 3; i++) {
            constexpr uint32_t kLow[] = {0x55555555, 0x33333333, 0x0f0f0f0f};
            const uint32_t shift = 1u << i, is_high = lane >> (i + 2) & 1;
            // why sums: choices would take predicates, of which whole blocks hold all but a few.
            const uint32_t stay = opaque(kLow[i] + is_high * (~kLow[i] - kLow[i]));
            const uint32_t left = opaque(shift + is_high * (32 - 2 * shift));
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, seen[half], 4 << i);
                seen[half] = (seen[half] & stay) | ((other << left | other >> (32 - left)) & ~stay);
            }
        }
        kept[0] &= seen[0], kept[1] &= seen[1];
    }
    // A block of the mask has 16 queries and keys or more, so that the warp's rows are of one, and so are 16 keys.
    CF_DEVICE void keep_blocks(uint32_t (&kept)[2]) const {
        const HeadBlocks blocks(rule, sequence, head);
        const int32_t log_q = rule.block_log_queries, log_k = rule.block_log_keys;
        const int32_t query = smaller(first_query, sequence.seqlen_q - 1);
        const int32_t row = (first_query + lane() / 4) & ((1 << log_q) - 1);
#pragma unroll 1
        for (int n = 0; n < kKeys / 8; n += 2) {
            const int32_t key = smaller(first_key + 8 * n, sequence.seqlen_k - 1);
            const int32_t code = blocks.code(query >> log_q, key >> log_k);
            const uint32_t which = static_cast<uint32_t>(code) - 2;
            if (which >= static_cast<uint32_t>(rule.block_count)) {
                if (code != 1) kept[0] &= ~(0xfu << 2 * n), kept[1] &= ~(0xfu << 2 * n);
                continue;
            }
            const int32_t column = (first_key + 8 * n) & ((1 << log_k) - 1);
            const int64_t bit = (((static_cast<int64_t>(which) << log_q) + row) << log_k) + column;
            const uint8_t* of_row = rule.block_bits + bit / 8;
            CF_UNROLL
            for (int half = 0; half < 2; half++, of_row += 1 << log_k) {    // 8 rows further
                CF_UNROLL
                for (int i = 0; i < 2; i++) {
                    const uint32_t hidden = ~static_cast<uint32_t>(of_row[i]) >> (lane() % 4 * 2);
                    kept[half] &= ~((hidden & 3) << 2 * (n + i));
                }
            }
        }
    }
};
