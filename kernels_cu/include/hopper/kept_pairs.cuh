// Bit masks of the pairs of a partial tile, one bit per pair, which the helpers of flash_backward_sm90 write and its
// consumers read.
// Design note: docs/kernels/backward_sm90.md.
//
// layout: bit i of words[stage][h][key] is query 32 h + i of the tile. Consumers have keys as rows and read a word for
// each of their two. Helpers make 32 words at a time, a part of 32 x 32 pairs, one lane per key. Where intervals or bits are
// by query, one lane per query: its word has 32 bits along the keys, and the bits of a warp are then transposed.
// why helpers do it: in consumers dK, dV, S and dP leave no registers, and helpers cost no time while they take less than
// a step.
// why a row of parts at a time: the limits of a key or a query are then read and cut to the tile once for all parts.
#pragma once
#include "attention/mask.cuh"
#include "tile/score_tile.cuh"

template <int kStages, int kQueries, int kKeys> struct KeptPairs {
    static_assert(kQueries % 32 == 0 && kKeys % 32 == 0);
    static constexpr int kQueryWords = kQueries / 32, kKeyWords = kKeys / 32, kWarps = 2;
    alignas(1024) uint32_t words[kStages][kQueryWords][kKeys];

    // Warp `warp` of two makes its half of the words of tile `tile` of queries and a block of keys. All lanes call.
    CF_DEVICE void make(const Score& rule, const Sequence& sequence, const NarrowBand& band, int32_t head,
                        int32_t tile, const int32_t& first_key, int stage, int warp) {
        const bool of_queries = rule.blocks.data || rule.spans_by_query;
        if (of_queries) make_of<true>(rule, sequence, band, head, tile, first_key, stage, warp);
        if (!rule.spans_by_query && (!of_queries || rule.spans.data))
            make_of<false>(rule, sequence, band, head, tile, first_key, stage, warp);
    }
    // -inf where a pair of the thread's does not count. layout: as mma.cuh has S^T, keys from `key` of the block on.
    template <int n> CF_DEVICE void apply(float (&s)[n], int stage, int key) const {
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
    // Of part `part` of a row, the bits from one of two bounds up to the other. layout: bounds are bytes, the lowest first.
    CF_DEVICE static uint32_t bits(uint32_t bounds, int part) {
        const int32_t first = larger(static_cast<int32_t>(bounds & 255) - 32 * part, 0);
        const int32_t end = smaller(static_cast<int32_t>(bounds >> 8 & 255) - 32 * part, 32);
        return first < end ? (~0u << first) & (~0u >> (32 - end)) : 0;
    }
    // Of what queries have, or keys: a lane has a row of 32, and goes along it from part to part.
    // why opaque: what does not change from row to row would wait in registers that helpers do not have.
    template <bool kOfQueries>
    CF_DEVICE void make_of(const Score& rule, const Sequence& sequence, const NarrowBand& band, int32_t head,
                           int32_t tile, const int32_t& first_key, int stage, int warp) {
        constexpr int kRows = kOfQueries ? kQueryWords : kKeyWords,
                      kParts = kOfQueries ? kKeyWords : kQueryWords;
        constexpr uint32_t kNextPart = kOfQueries ? 32 * sizeof(uint32_t) : sizeof words[0][0];
        const auto lane = [] { return static_cast<int32_t>(opaque(threadIdx.x) % 32); };
        // Words of blocks are there already: those of a warp's own queries, by its own lanes.
        const bool more = !kOfQueries && rule.blocks.data;
#pragma unroll 1
        for (int n = more ? 0 : warp; n < kRows; n += more ? 1 : kWarps) {
            const auto row = [&] {
                return (kOfQueries ? again(tile) * kQueries : first_key) + 32 * again(n) + lane();
            };
            const auto word = [&](uint32_t part) {
                const auto& row_of_parts = words[again(stage)][kOfQueries ? again(n) : 0];
                return smem_addr(row_of_parts + (kOfQueries ? 0 : 32 * again(n)) + lane()) + part * kNextPart;
            };
            if (kOfQueries && rule.blocks.data) {
                // why 16: blocks do not cut 16 x 16 pairs. A lane has the code of 16 rows and 16 of the keys.
                const int32_t code =
                    code_of(rule, sequence, again(head), row() / 16 * 16, first_key + lane() % 16 * 16);
#pragma unroll 1
                for (int half = 0; half < 2 * kParts; half += rule.block_log_keys == 4 ? 1 : 2) {
                    const int32_t own = __shfl_sync(0xffffffffu, code, lane() / 16 * 16 + again(half));
                    uint32_t kept = in_block(rule, own, row(), first_key + 16 * again(half));
                    const uint32_t at = word(again(half) / 2);
                    if (again(half) % 2) kept = (ld_shared<uint32_t>(at) & 0xffff) | kept << 16;
                    st_shared(at, kept);
                }
            }
            const bool two = rule.span_intervals > 1;
            const uint32_t bounds = bounds_of<kOfQueries>(rule, sequence, band, head, row(),
                                                          kOfQueries ? first_key : again(tile) * kQueries);
            const uint32_t first_word = word(0);
            uint32_t mixed = 0;
            CF_UNROLL
            for (int part = 0; part < kParts; part++) {
                const uint32_t at = first_word + part * kNextPart;
                uint32_t kept = bits(bounds, part);
                if (two) kept |= bits(bounds >> 16, part);
                if (more && part % kWarps != warp) continue;
                if (more || (kOfQueries && rule.blocks.data)) kept &= ld_shared<uint32_t>(at);
                if (kOfQueries && !vote(kept)) mixed |= 1u << part;
                st_shared(at, kept);
            }
            if constexpr (kOfQueries) {
#pragma unroll 1
                while (mixed) {
                    const int part = 31 - __clz(static_cast<int>(mixed));
                    const uint32_t at = word(part);
                    st_shared(at, transposed(ld_shared<uint32_t>(at)));
                    mixed ^= 1u << part;
                }
            }
        }
    }
    // Of a key or a query: where, from position `from` on and within the tile, each of its intervals starts and stops, cut
    // to the band; one, the band's, where such rows have none. In bytes.
    template <bool kOfQueries>
    CF_DEVICE static uint32_t bounds_of(const Score& rule, const Sequence& sequence, const NarrowBand& band,
                                        int32_t head, int32_t row, int32_t from) {
        constexpr int32_t kAlong = kOfQueries ? kKeys : kQueries;
        static_assert(kAlong < 256, "a bound is a byte");
        const int32_t rows = kOfQueries ? sequence.seqlen_q : sequence.seqlen_k;
        const int32_t first = kOfQueries ? band.first_key(row) : row - band.high;
        const int32_t end = kOfQueries ? band.end_key(row) : row < rows ? row - band.low + 1 : 0;
        const auto cut = [=](int32_t start, int32_t stop) {
            // why not subtracted first: bounds may be any numbers.
            const auto within = [=](int32_t x) {
                return static_cast<uint32_t>(smaller(larger(x, from) - from, kAlong));
            };
            return within(larger(start, first)) | within(smaller(stop, end)) << 8;
        };
        const HeadSpans spans(rule, sequence, again(head));
        if (!spans.bounds || spans.by_query != kOfQueries) return cut(first, end);
        const int32_t* at = spans.bounds + smaller(row, rows - 1) * spans.row;
        // why no loop: it would keep strides in registers.
        const uint32_t one = cut(at[0], at[spans.column]);
        at += 2 * spans.column;
        return spans.intervals > 1 ? one | cut(at[0], at[spans.column]) << 16 : one;
    }
    // What the table says of the block of a pair; 0 past the last key.
    CF_DEVICE static int32_t code_of(const Score& rule, const Sequence& sequence, int32_t head, int32_t query,
                                     int32_t key) {
        if (key >= sequence.seqlen_k) return 0;
        return HeadBlocks(rule, sequence, head)
            .code(smaller(query, sequence.seqlen_q - 1) >> rule.block_log_queries,
                  key >> rule.block_log_keys);
    }
    // Of a query: which of the keys from `key` on are kept by a block with such a code, 16 if it has no more, else 32.
    CF_DEVICE static uint32_t in_block(const Score& rule, int32_t code, int32_t query, int32_t key) {
        const uint32_t which = static_cast<uint32_t>(code) - 2;
        if (which >= static_cast<uint32_t>(rule.block_count)) return code == 1 ? ~0u : 0;
        const int64_t row = (static_cast<int64_t>(which) << rule.block_log_queries) +
                            (query & ((1 << rule.block_log_queries) - 1));
        const uint8_t* at = rule.block_bits + (row << (rule.block_log_keys - 3)) +
                            static_cast<uint32_t>(key & ((1 << rule.block_log_keys) - 1)) / 8;
        const auto byte = [=](int n) { return static_cast<uint32_t>(at[n]) << 8 * n; };
        return rule.block_log_keys == 4 ? byte(0) | byte(1) : byte(0) | byte(1) | byte(2) | byte(3);
    }
    // Transposes a part of rows that have all or nothing, as in most parts: a vote is every column. False if others have.
    CF_DEVICE static bool vote(uint32_t& x) {
        const uint32_t column = __ballot_sync(0xffffffffu, x != 0);
        if (!__all_sync(0xffffffffu, x == 0 || x == ~0u)) return false;
        x = column;
        return true;
    }
    // Bit i of lane j changes places with bit j of lane i.
    CF_DEVICE static uint32_t transposed(uint32_t x) {
        CF_UNROLL
        for (int distance = 16; distance > 0; distance /= 2) {
            const uint32_t low = ~0u / ((1u << distance) + 1);    // bits whose number lacks `distance`
            const uint32_t other = __shfl_xor_sync(0xffffffffu, x, distance);
            x = lane() & distance ? (x & ~low) | (other >> distance & low)
                                  : (x & low) | (other & low) << distance;
        }
        return x;
    }
};
