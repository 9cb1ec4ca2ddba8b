// Blocks of queries and keys: a table marks each as full, empty or partial, and bits mark the pairs of partial ones.
#pragma once
#include "attention/seqlen.cuh"
#include "element.cuh"

// The blocks of one head. A code of the table without bits counts as empty: it is compared before it is used as an
// index.
struct HeadBlocks {
    const int32_t* table;    // of block (0, 0); null: every pair is kept
    const Score& rule;
    int32_t seqlen_q, seqlen_k;

    CF_DEVICE HeadBlocks(const Score& score, const Sequence& sequence, int32_t head)
        : table(nullptr), rule(score), seqlen_q(sequence.seqlen_q), seqlen_k(sequence.seqlen_k) {
        const auto* all = static_cast<const int32_t*>(score.blocks.data);
        if (all) table = all + sequence.batch * score.blocks.batch + head * score.blocks.head;
    }
    // What the table says of a block: 0 nothing, 1 all, n + 2 the n-th bits.
    CF_DEVICE int32_t code(int32_t block_q, int32_t block_k) const {
        return table[block_q * rule.blocks.row + block_k * rule.blocks.column];
    }
    // Whether the block of a pair is seen as a whole.
    CF_DEVICE bool is_whole(int32_t query, int32_t key) const {
        return code(query >> rule.block_log_queries, key >> rule.block_log_keys) == 1;
    }
    CF_DEVICE bool keeps(int32_t query, int32_t key) const {
        if (!table) return true;
        const int32_t log_q = rule.block_log_queries, log_k = rule.block_log_keys;
        const int32_t which = code(query >> log_q, key >> log_k);
        // why unsigned: codes below 2 wrap, so that one comparison serves for both ends.
        const uint32_t n = static_cast<uint32_t>(which) - 2;
        if (n >= static_cast<uint32_t>(rule.block_count)) return which == 1;
        const int32_t row = query & ((1 << log_q) - 1), column = key & ((1 << log_k) - 1);
        const int64_t bit = (((static_cast<int64_t>(n) << log_q) + row) << log_k) + column;
        return rule.block_bits[bit / 8] >> (bit % 8) & 1;
    }
    // Whether any block that a tile lies in is seen. All lanes of a warp call, and all warps get the same answer: each
    // looks at every block.
    CF_DEVICE bool reach(int32_t query_first, int32_t query_end, int32_t key_first, int32_t key_end) const {
        if (!table) return true;
        const int32_t log_q = rule.block_log_queries, log_k = rule.block_log_keys;
        const int32_t m_last = (smaller(query_end, seqlen_q) - 1) >> log_q;
        const int32_t n_last = (smaller(key_end, seqlen_k) - 1) >> log_k;
        bool any = false;
        // why lanes along keys only: lanes along both would take two more registers, which kernels do not have.
#pragma unroll 1
        for (int32_t m = query_first >> log_q; m <= m_last; ++m) {
#pragma unroll 1
            for (int32_t n = (key_first >> log_k) + threadIdx.x % 32; n <= n_last; n += 32)
                any = any || code(m, n) != 0;
        }
        return __any_sync(0xffffffffu, any);
    }
};
