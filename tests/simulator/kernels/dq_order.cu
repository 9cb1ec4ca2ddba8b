// Writes what each block of a head goes over where gradients are summed in turns, and when it may add.
#include "prim.cuh"
#include "hopper/dq_order.cuh"

struct TurnParams {
    int32_t* out;    // (blocks, 1 + tiles, 3): block and nothing, then tile, chain and blocks before, or -1
    int32_t tiles, wave, m, n;
    int32_t seqlen_q, seqlen_k, low, high;
};

CF_DEVICE void turns(const TurnParams& p) {
    const Score score{};
    Band band(score, Sequence{});
    band.low = p.low, band.high = p.high, band.seqlen_q = p.seqlen_q, band.seqlen_k = p.seqlen_k;
    DqOrder order(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x), p.wave, band);
    const int32_t first_key = order.block * p.n;
    const Range queries = band.queries_of(first_key, first_key + p.n);
    const Range tiles{queries.first / p.m, cdiv(queries.end, p.m)};
    order.set_tiles(tiles);

    int32_t* out = p.out + 3 * (1 + p.tiles) * int64_t(blockIdx.x);
    *out = order.block;
    if (tiles.first == tiles.end) return;
    for (int32_t tile = order.start;; tile = order.after(tile)) {
        const Range of_tile{tile * p.m, smaller((tile + 1) * p.m, p.seqlen_q)};
        const Range seen = blocks_seen(NarrowBand(band), of_tile, p.n);
        out += 3;
        out[0] = tile, out[1] = order.chain(tile);
        out[2] = static_cast<int32_t>(order.before(tile, seen, cdiv(p.seqlen_q, p.m)));
        if (tile == order.stop) break;
    }
}

CF_KERNEL(TurnParams, 1, 1, turns)
