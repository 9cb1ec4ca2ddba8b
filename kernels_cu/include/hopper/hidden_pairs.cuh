// Pairs of a block of keys that spans and blocks hide from the rows of a warp, where flash_reach calls it partial.
//
// layout: scores as in mma.cuh; a lane has rows g = lane / 4 and g + 8 of its warp's 16, and of the 8 columns of each n
// columns 2 (lane % 4) and one more. What it sees of a row is a word: bit n of the first column, 16 + n of the second.
// why words: two registers hold what 4 kKeys / 8 comparisons would take, and all that is looked up comes before scores are
// touched, in loops that are not unrolled where many registers are in use.
#pragma once
#include "attention/mask.cuh"

template <int kKeys> struct HiddenPairs {
    static_assert(kKeys <= 128 && kKeys % 16 == 0, "a word has a bit for each column of a lane");
    const Score& rule;
    const Sequence& sequence;
    int32_t head;
    int32_t first_query;    // of the warp, a multiple of 16
    int32_t first_key;      // of the block, a multiple of 16

    // -inf where a pair is hidden. All lanes of a warp call.
    CF_DEVICE void hide(float (&s)[1][kKeys / 8][4]) const {
        uint32_t kept[2] = {~0u, ~0u};
        if (rule.spans.data) {
            if (rule.spans_by_query) keep_keys(kept);
            else keep_queries(kept);
        }
        if (rule.blocks.data) keep_blocks(kept);
        // why: of the block's pairs some are hidden, but often from other warps.
        constexpr uint32_t kAll = 0x10001u * ((1u << kKeys / 8) - 1);
        if (__all_sync(0xffffffffu, (kept[0] & kept[1] & kAll) == kAll)) return;
        CF_UNROLL
        for (int n = 0; n < kKeys / 8; n++) {
            CF_UNROLL
            for (int e = 0; e < 4; e++)
                s[0][n][e] = kept[e / 2] >> (16 * (e % 2) + n) & 1 ? s[0][n][e] : -kInfinity;
        }
    }

  private:
    CF_DEVICE static int32_t lane() { return static_cast<int32_t>(threadIdx.x % 32); }
    // Bits first .. end - 1 of the lowest 16.
    CF_DEVICE static uint32_t bits(int32_t first, int32_t end) {
        const auto below = [](int32_t bit) { return (1u << larger(0, smaller(bit, 16))) - 1; };
        return below(end) & ~below(first);
    }
    // Spans by query: intervals of each of the two rows.
    CF_DEVICE void keep_keys(uint32_t (&kept)[2]) const {
        const HeadSpans spans(rule, sequence, head);
        const int32_t key = first_key + lane() % 4 * 2;
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t query = smaller(first_query + lane() / 4 + 8 * half, sequence.seqlen_q - 1);
            const int32_t* at = spans.bounds + query * spans.row;
            uint32_t seen = 0;
#pragma unroll 1
            for (int n = 0; n < spans.intervals; n++, at += 2 * spans.column) {
                const int32_t first = at[0] - key + 7, end = at[spans.column] - key + 7;
                seen |= bits(first >> 3, end >> 3) | bits((first - 1) >> 3, (end - 1) >> 3) << 16;
            }
            kept[half] &= seen;
        }
    }
    // Spans by key: of each key that rows see it, found by one lane for 4 keys; then bits go where their rows are.
    // layout: before, lane 4 n + 2 odd + high has keys 8 (n + 8 high) + 2 t + odd, a byte for each t of rows 8 half on. Bit
    // i of a lane's number then changes places with bit (i + 3) % 5 of a bit's.
    CF_DEVICE void keep_queries(uint32_t (&kept)[2]) const {
        const HeadSpans spans(rule, sequence, head);
        const int32_t key = first_key + lane() / 4 * 8 + lane() % 2 * 64 + lane() / 2 % 2;
        uint32_t seen[2] = {};
#pragma unroll 1
        for (int t = 0; t < 8; t += 2) {
            const int32_t* at = spans.bounds + smaller(key + t, sequence.seqlen_k - 1) * spans.row;
            uint32_t rows = 0;
            int n = spans.intervals;
#pragma unroll 1
            do {
                rows |= bits(at[0] - first_query, at[spans.column] - first_query);
                at += 2 * spans.column;
            } while (--n > 0);
            seen[0] = permute_bytes(seen[0], rows, 0x4321), seen[1] = permute_bytes(seen[1], rows, 0x5321);
        }
        CF_UNROLL
        for (int i = 0; i < 5; i++) {
            const int shift = 1 << (i + 3) % 5;
            const uint32_t high = ~0u / ((1u << shift) + 1) << shift;
            const bool is_high = lane() >> i & 1;
            // why opaque: or ptxas makes three instructions of one.
            const uint32_t stay = opaque(is_high ? high : ~high);
            const int left = is_high ? 32 - shift : shift;
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, seen[half], 1 << i);
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
                if (code != 1) kept[0] &= ~(0x30003u << n), kept[1] &= ~(0x30003u << n);
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
                    kept[half] &= ~(((hidden & 1) | (hidden & 2) << 15) << (n + i));
                }
            }
        }
    }
};
