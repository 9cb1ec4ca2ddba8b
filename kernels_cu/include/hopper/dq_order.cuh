// Deterministic dQ: the order in which blocks that own keys start, visit tiles of queries, and add to the dQ of each. A
// block waits for its turn at the semaphore of a tile (prim/semaphore.cuh).
// Design note: docs/kernels/backward_sm90.md.
//
// A block need not wait if it reaches a tile right after the block with the turn before. A wave is the blocks of a head
// that run at once: they visit tiles one behind the other. The next wave would wait for the last block of this one, so it
// adds to sums of its own. Two such chains of sums are enough:
//
//   causal, waves 0, 2, ..: blocks of the last keys first. Each begins on the diagonal, where those before it have been
//     and those after it come later, and goes towards the last queries. Chain 0.
//   causal, waves 1, 3, ..: blocks start when one of the wave before ends, those with the most queries first. Each
//     begins with the last queries and goes back. Chain 1.
//   all keys: blocks begin evenly apart and go back, chain 1, then from the last queries on to where they began, chain 0.
//
// Without waves (any other mask, or heads enough): blocks of the first keys first, all from the last queries back, in
// one chain.
#pragma once
#include "tile/score_tile.cuh"

// Blocks of `keys` keys of which these queries see at least one.
CF_DEVICE Range blocks_seen(const NarrowBand& band, Range queries, int32_t keys) {
    return {larger(band.first_key(queries.first), 0) / keys, cdiv(band.end_key(queries.end - 1), keys)};
}

struct DqOrder {
    int32_t block, wave;           // the block of keys; blocks of a wave, or 0
    int32_t number, first;         // of its wave: which one it is; its first block of keys
    int32_t home;                  // of all keys, the tile where chain 0 ends; otherwise 0
    int32_t start, stop;           // the first and the last tile of queries
    int32_t by, edge, opposite;    // what comes after a tile: tile + by, but after edge opposite
    bool up, all;                  // towards the last queries; every query sees every key

    // Block `place` of the `blocks` of a head in the order in which they start.
    CF_DEVICE DqOrder(int32_t place, int32_t blocks, int32_t blocks_of_wave, const Band& band)
        : block(place), wave(blocks_of_wave), number(0), first(0), home(0), start(0), stop(0), by(-1),
          edge(0), opposite(0), up(false), all(false) {
        if (wave == 0) return;
        number = place / wave, first = number * wave;
        all = band.end_key(0) >= band.seqlen_k;
        up = !all && number % 2 == 0;
        if (up) block = first + smaller(first + wave, blocks) - 1 - place;
    }
    // Over the tiles that see the block.
    CF_DEVICE void set_tiles(Range tiles) {
        if (all) home = static_cast<int32_t>(uint32_t(block - first) * uint32_t(tiles.end) / wave);
        start = up ? tiles.first : (home > tiles.first ? home : tiles.end) - 1;
        stop = up ? tiles.end - 1 : larger(home, tiles.first);
        edge = tiles.first, opposite = tiles.end - 1;
        if (up) edge = -1, by = 1;
    }
    CF_DEVICE int32_t after(int32_t tile) const { return tile == edge ? opposite : tile + by; }

    CF_DEVICE static int32_t chains(int32_t wave) { return wave == 0 ? 1 : 2; }
    CF_DEVICE int32_t chain(int32_t tile) const {
        if (all) return tile < home;
        return wave != 0 && !up;
    }
    // Blocks that add to the chain of a tile before this one. seen: those that its queries see; tiles: all of the head.
    CF_DEVICE uint32_t before(int32_t tile, Range seen, int32_t tiles) const {
        if (wave == 0) return block - seen.first;
        const int32_t place = block - first;
        if (up) return number / 2 * wave + smaller(seen.end, first + wave) - 1 - block;
        if (!all) return number / 2 * wave + place;
        // Of a wave, those that come to the tile in chain 0.
        const auto begun = static_cast<int32_t>(cdiv(uint32_t(tile + 1) * uint32_t(wave), uint32_t(tiles)));
        return tile < home ? number * (wave - begun) + place - begun : number * begun + place;
    }
};
