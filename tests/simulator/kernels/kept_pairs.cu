// The words of KeptPairs, of every head, tile of queries and block of 128 keys, made by two warps as in
// flash_backward_sm90.
#include "hopper/kept_pairs.cuh"

struct KeptParams {
    Shape shape;
    Score score;
    uint32_t* out;    // (blocks, QUERIES / 32, 128)
    int32_t tiles, blocks_of_keys;
};
constexpr int kQueries = QUERIES, kKeys = 128;
struct Storage {
    KeptPairs<2, kQueries, kKeys> kept;
    int32_t first_key;
};

CF_DEVICE void make_kept(const KeptParams& p) {
    Storage& s = shared_memory<Storage>();
    const TileCoord work = tile_coord(blockIdx.x, p.tiles * p.blocks_of_keys, p.shape.heads_q);
    const int32_t tile = work.tile / p.blocks_of_keys, stage = work.tile % 2;
    const Sequence sequence = sequence_of(p.shape, work.batch);
    if (threadIdx.x == 0) s.first_key = work.tile % p.blocks_of_keys * kKeys;
    // sync: both warps see it.
    __syncthreads();
    s.kept.make(p.score, sequence, NarrowBand(Band(p.score, sequence)), work.head, tile, s.first_key, stage,
                static_cast<int>(threadIdx.x) / 32);
    // sync: words are complete.
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kQueries / 32 * kKeys; i += 64)
        p.out[blockIdx.x * (kQueries / 32 * kKeys) + i] = s.kept.words[stage][i / kKeys][i % kKeys];
}

CF_KERNEL(KeptParams, 64, 1, make_kept)
