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

    // Parts first, first + step .. of tile `tile` of queries and a block of keys. All lanes of a warp call.
    // why opaque: what does not change from part to part would wait in registers that helpers do not have.
    CF_DEVICE void make(const Score& rule, const Sequence& sequence, const NarrowBand& band, int32_t head,
                        int32_t tile, const int32_t& first_key, int stage, int first, int step) {
#pragma unroll 1
        for (int part = first; part < kParts; part += step) {
            const auto lane = [] { return static_cast<int32_t>(opaque(threadIdx.x) % 32); };
            const auto part_of_queries = [&] { return again(part) % kQueryWords; };
            const auto part_of_keys = [&] { return again(part) / kQueryWords * 32; };
            const auto query = [&] { return again(tile) * kQueries + part_of_queries() * 32; };
            const auto key = [&] { return first_key + part_of_keys(); };
            uint32_t kept = ~0u;
            if (rule.blocks.data) kept = in_blocks(rule, sequence, head, query() + lane(), key());
            if (rule.spans.data && rule.spans_by_query)
                kept &= inside(rule, sequence, again(head), smaller(query() + lane(), sequence.seqlen_q - 1),
                               key());
            if (rule.blocks.data || rule.spans_by_query) kept = transposed(kept);
            if (rule.spans.data && !rule.spans_by_query)
                kept &= inside(rule, sequence, again(head), smaller(key() + lane(), sequence.seqlen_k - 1),
                               query());
            kept &= of_band(band, query(), key() + lane());
            st_shared(smem_addr(words[again(stage)][part_of_queries()] + part_of_keys() + lane()), kept);
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
    CF_DEVICE static int32_t again(int32_t x) {
        return static_cast<int32_t>(opaque(static_cast<uint32_t>(x)));
    }
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
    // Of a row that has intervals: which of the 32 positions from `first` on are in one.
    CF_DEVICE static uint32_t inside(const Score& rule, const Sequence& sequence, int32_t head, int32_t row,
                                     int32_t first) {
        const HeadSpans spans(rule, sequence, head);
        const int32_t* at = spans.bounds + row * spans.row;
        const auto of_interval = [=, &spans](const int32_t* bounds) {
            // why not subtracted first: bounds may be any numbers.
            const int32_t start = larger(bounds[0], first), stop = smaller(bounds[spans.column], first + 32);
            return start < stop ? bits(start - first, stop - first) : 0;
        };
        // why no loop: it would keep strides in registers.
        uint32_t any = of_interval(at);
        if (spans.intervals > 1) any |= of_interval(at + 2 * spans.column);
        return any;
    }
    // Of a query: which of the 32 keys from `key` on, a multiple of 32, its blocks keep. Blocks have 16 keys or more.
    CF_DEVICE static uint32_t in_blocks(const Score& rule, const Sequence& sequence, int32_t head, int32_t query,
                                        int32_t key) {
        query = smaller(query, sequence.seqlen_q - 1);
        uint32_t kept = 0;
#pragma unroll 1
        for (int n = 0; n < 32 && key + n < sequence.seqlen_k; n += 16) {
            const int32_t column = again(key) + n;
            const int32_t code = HeadBlocks(rule, sequence, again(head))
                                     .code(again(query) >> rule.block_log_queries, column >> rule.block_log_keys);
            const uint32_t which = static_cast<uint32_t>(code) - 2;
            uint32_t of_sixteen = code == 1 ? 0xffffu : 0;
            if (which < static_cast<uint32_t>(rule.block_count)) {
                const int64_t row = (static_cast<int64_t>(which) << rule.block_log_queries) +
                                    (query & ((1 << rule.block_log_queries) - 1));
                const uint8_t* at = rule.block_bits + (row << (rule.block_log_keys - 3)) +
                                    (column & ((1 << rule.block_log_keys) - 1)) / 8;
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
