// The blocks of keys that a tile of queries visits under spans and block masks, from the bits that flash_reach wrote.
// Design note: docs/kernels/forward_sm90.md.
#pragma once
#include "attention/reach.cuh"

// A block of keys as the producer hands it over, beside K: its number, and whether some of its pairs are masked.
struct SparseBlock {
    uint32_t bits = 0;

    CF_DEVICE int32_t number() const { return static_cast<int32_t>(bits >> 1); }
    CF_DEVICE bool partial() const { return bits & 1; }
};

// The blocks that a tile reaches, from the last to the first.
struct SparseBlocks {
    const Reach* words;    // of the tile
    int32_t word;          // whose bits are left
    Reach left{};

    CF_DEVICE SparseBlock next() {
        while (!left.seen) left = words[--word];
        const int bit = 31 - __clz(static_cast<int>(left.seen));
        left.seen ^= 1u << bit;
        return {static_cast<uint32_t>(word * 32 + bit) << 1 | (left.partial >> bit & 1)};
    }
};
