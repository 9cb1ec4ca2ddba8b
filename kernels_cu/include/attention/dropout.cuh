// Dropout of attention weights: counter-based, so that forward, backward, CPU and GPU agree on what is kept.
//
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one call for four
// neighbouring keys:
//     key = (seed low word, seed high word), counter = (key_position / 4, query_position, query head, batch)
//     the weight at key_position is kept if word key_position % 4 of the result >= threshold
#pragma once
#include "abi.cuh"

struct PhiloxWords {
    uint32_t word[4];
};
CF_DEVICE PhiloxWords philox(PhiloxWords counter, uint32_t key_low, uint32_t key_high) {
    uint32_t (&c)[4] = counter.word;
    CF_UNROLL
    for (int round = 0; round < 10; ++round) {
        const uint64_t left = uint64_t(0xd2511f53u) * c[0];
        const uint64_t right = uint64_t(0xcd9e8d57u) * c[2];
        c[0] = static_cast<uint32_t>(right >> 32) ^ c[1] ^ key_low;
        c[1] = static_cast<uint32_t>(right);
        c[2] = static_cast<uint32_t>(left >> 32) ^ c[3] ^ key_high;
        c[3] = static_cast<uint32_t>(left);
        key_low += 0x9e3779b9u;
        key_high += 0xbb67ae85u;
    }
    return counter;
}

// The dropout of one head.
struct Dropout {
    uint32_t key_low, key_high, threshold, head, batch;

    CF_DEVICE Dropout(const Score& score, int32_t of_batch, int32_t of_head)
        : key_low(static_cast<uint32_t>(score.dropout_seed)),
          key_high(static_cast<uint32_t>(score.dropout_seed >> 32)), threshold(score.dropout_threshold),
          head(of_head), batch(of_batch) {}

    CF_DEVICE bool active() const { return threshold != 0; }
    // The words of keys 4 * quad to 4 * quad + 3.
    CF_DEVICE PhiloxWords words(int32_t query, int32_t quad) const {
        const PhiloxWords counter{{static_cast<uint32_t>(quad), static_cast<uint32_t>(query), head, batch}};
        return philox(counter, key_low, key_high);
    }
    CF_DEVICE bool keeps(int32_t query, int32_t key) const {
        const PhiloxWords w = words(query, key / 4);
        const uint32_t low = key & 1 ? w.word[1] : w.word[0], high = key & 1 ? w.word[3] : w.word[2];
        return (key & 2 ? high : low) >= threshold;
    }
};
