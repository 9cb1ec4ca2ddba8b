// Writes what each block of a grid would work on in the order of lpt_query_tile or, with ORDER_OF_KEYS,
// of lpt_key_tile.
#include "prim.cuh"
#include "attention/seqlen.cuh"

struct OrderParams {
    Shape shape;
    int32_t* out;    // (blocks, 3): tile, head, batch
    int32_t tiles, section_elements;
};

CF_DEVICE void order(const OrderParams& p) {
    const uint32_t section = static_cast<uint32_t>(p.section_elements);
#if defined(ORDER_OF_KEYS)
    const TileCoord work = lpt_key_tile(blockIdx.x, p.tiles, p.shape, section);
#else
    const TileCoord work = lpt_query_tile(blockIdx.x, p.tiles, p.shape, p.shape.heads_q, section);
#endif
    int32_t* out = p.out + 3 * blockIdx.x;
    out[0] = work.tile, out[1] = work.head, out[2] = work.batch;
}

CF_KERNEL(OrderParams, 1, 1, order)
