// Which pairs of a tile that flash_reach calls partial count, one bit of each, on their way from the helpers to the
// consumers of flash_backward_sm90.
//
// layout: bit i of words[stage][h][key] is query 32 h + i of the tile. Consumers have keys as rows and ask for a word of
// each of their two; helpers make 32 x 32 pairs at a time, a lane for each key. Where queries have intervals or bits, a
// lane has those of a query, and the 32 words of a warp are transposed.
// why by helpers: in a thread of the consumers dK, dV, S and dP leave no registers to look anything up, and what a helper
// does costs no time of theirs.
#pragma once
#include "attention/mask.cuh"
#include "tile/score_tile.cuh"

template <int kStages, int kQueries, int kKeys> struct KeptPairs {
    static_assert(kQueries % 32 == 0 && kKeys % 32 == 0);
    static constexpr int kQueryWords = kQueries / 32, kParts = kQueryWords * (kKeys / 32);
    alignas(1024) uint32_t words[kStages][kQueryWords][kKeys];

    // Parts first, first + step .. of a tile of queries and a block of keys. All lanes of a warp call.
    CF_DEVICE void make(const Score& rule, const Sequence& sequence, const NarrowBand& band, int32_t head,
                        int32_t first_query, int32_t first_key, int stage, int first, int step) {
#pragma unroll 1
        for (int part = first; part < kParts; part += step) {
            const int h = part % kQueryWords, keys = part / kQueryWords * 32;
            const int32_t query = first_query + 32 * h, key = first_key + keys;
            uint32_t kept = of_band(band, query, key + lane());
            if (rule.spans.data) {
                const HeadSpans spans(rule, sequence, head);
                kept &= spans.by_query ? transposed(inside(spans, query + lane(), spans.seqlen_q, key))
                                       : inside(spans, key + lane(), spans.seqlen_k, query);
            }
            if (rule.blocks.data) kept &= transposed(in_blocks(rule, sequence, head, query + lane(), key));
            st_shared(smem_addr(words[stage][h] + keys + lane()), kept);
        }
    }
    // -inf where a pair of the thread's does not count. layout: as mma.cuh has S^T, keys from `key` of the block on.
    template <int n> CF_DEVICE void hide(float (&s)[n], int stage, int key) const {
        static_assert(n == kQueries / 2);
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            CF_UNROLL
            for (int h = 0; h < kQueryWords; h++) {
                const uint32_t at = smem_addr(words[stage][h] + key + 8 * half + lane() / 4);
                const uint32_t kept = ld_shared<uint32_t>(at) >> (lane() % 4 * 2);
                CF_UNROLL
                for (int i = 0; i < 8; i++) {
                    float& x = s[16 * h + i / 2 * 4 + 2 * half + i % 2];
                    x = kept >> (i / 2 * 8 + i % 2) & 1 ? x : -kInfinity;
                }
            }
        }
    }

  private:
    CF_DEVICE static int32_t lane() { return static_cast<int32_t>(threadIdx.x % 32); }
    // Bits first .. end - 1 of a word.
    CF_DEVICE static uint32_t bits(int32_t first, int32_t end) {
        first = larger(first, 0), end = smaller(end, 32);
        return first < end ? (~0u << first) & (~0u >> (32 - end)) : 0;
    }
    // Of a key: which of the 32 queries from `query` on the band lets see it.
    CF_DEVICE static uint32_t of_band(const NarrowBand& band, int32_t query, int32_t key) {
        return key < band.seqlen_k ? bits(key - band.high - query, key - band.low + 1 - query) : 0;
    }
    // Of a row that has intervals: which of the 32 positions from `first` on are in one. A row past the end is as the last.
    CF_DEVICE static uint32_t inside(const HeadSpans& spans, int32_t row, int32_t rows, int32_t first) {
        const int32_t* at = spans.bounds + smaller(row, rows - 1) * spans.row;
        uint32_t any = 0;
#pragma unroll 1
        for (int n = 0; n < spans.intervals; n++, at += 2 * spans.column)
            any |= bits(at[0] - first, at[spans.column] - first);
        return any;
    }
    // Of a query: which of the 32 keys from `key` on, a multiple of 32, its blocks keep. Blocks have 16 keys or more.
    CF_DEVICE static uint32_t in_blocks(const Score& rule, const Sequence& sequence, int32_t head, int32_t query,
                                        int32_t key) {
        const HeadBlocks blocks(rule, sequence, head);
        const int32_t log_q = rule.block_log_queries, log_k = rule.block_log_keys;
        query = smaller(query, sequence.seqlen_q - 1);
        uint32_t kept = 0;
#pragma unroll 1
        for (int n = 0; n < 32 && key + n < sequence.seqlen_k; n += 16) {
            const int32_t code = blocks.code(query >> log_q, (key + n) >> log_k);
            const uint32_t which = static_cast<uint32_t>(code) - 2;
            uint32_t of_sixteen = code == 1 ? 0xffffu : 0;
            if (which < static_cast<uint32_t>(rule.block_count)) {
                const int32_t row = query & ((1 << log_q) - 1), column = (key + n) & ((1 << log_k) - 1);
                const int64_t bit = (((static_cast<int64_t>(which) << log_q) + row) << log_k) + column;
                const uint8_t* at = rule.block_bits + bit / 8;
                of_sixteen = at[0] | static_cast<uint32_t>(at[1]) << 8;
            }
            kept |= of_sixteen << n;
        }
        return kept;
    }
    // Bit i of lane j changes places with bit j of lane i.
    CF_DEVICE static uint32_t transposed(uint32_t x) {
        CF_UNROLL
        for (int distance = 16; distance > 0; distance /= 2) {
            const uint32_t low = ~0u / ((1u << distance) + 1);    // bits whose number lacks `distance`
            const uint32_t other = __shfl_xor_sync(0xffffffffu, x, distance);
            x = lane() & distance ? (x & ~low) | (other >> distance & low) : (x & low) | (other & low) << distance;
        }
        return x;
    }
};
