// Which blocks of keys a tile of queries reaches through its band, spans and blocks, or which tiles of queries reach a
// block of keys: flash_reach computes it before the attention kernel, whose producer is one thread and cannot.
#pragma once
#include "abi.cuh"

// Of 32 blocks of keys, the first in the lowest bit; of a block of keys of 32 tiles of queries.
struct alignas(8) Reach {
    uint32_t seen;       // some pair may count
    uint32_t partial;    // and some are masked
};

// Those of a tile of queries, in the order of keys, or of gradients of a block of keys in the order of queries. One
// (batch, head) has them for all that are like it.
template <class Params> CF_DEVICE Reach* reach_of(const Params& call, int32_t batch, int32_t head,
                                                  int32_t tile) {
    const Score& rule = call.score;
    if (!rule.spans.head && !rule.blocks.head) head = 0;
    // why not: sequences have their own lengths.
    const bool lengths = call.shape.packed || call.shape.seqused_k;
    if (!lengths && !rule.spans.batch && !rule.blocks.batch) batch = 0;
    const Tensor& all = call.reach;
    return reinterpret_cast<Reach*>(static_cast<uint32_t*>(all.data) + batch * all.batch + head * all.head +
                                    tile * all.row);
}
