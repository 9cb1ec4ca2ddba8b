// Where the rows of one batch entry begin and end: one description for padded batches and for packed sequences.
#pragma once
#include "abi.cuh"

struct Sequence {
    int32_t batch;
    int64_t first_q, first_k;      // row of q and of k at which the sequence starts; 0 unless packed
    int32_t seqlen_q, seqlen_k;    // queries, and keys in use
    int32_t rows_k;                // keys stored, seqlen_k or more
};

CF_DEVICE Sequence sequence_of(const Shape& shape, int32_t batch) {
    Sequence s{batch, 0, 0, shape.seqlen_q, shape.seqlen_k, shape.seqlen_k};
    if (shape.packed) {
        s.first_q = shape.cu_seqlens_q[batch];
        s.first_k = shape.cu_seqlens_k[batch];
        s.seqlen_q = static_cast<int32_t>(shape.cu_seqlens_q[batch + 1] - s.first_q);
        s.rows_k = static_cast<int32_t>(shape.cu_seqlens_k[batch + 1] - s.first_k);
        s.seqlen_k = s.rows_k;
    }
    if (shape.seqused_k) s.seqlen_k = smaller(shape.seqused_k[batch], s.rows_k);
    return s;
}

// The row `first_row` of one head; the batch strides of packed tensors are 0.
template <class T> CF_DEVICE T* head_rows(const Tensor& t, int32_t batch, int32_t head, int64_t first_row) {
    return static_cast<T*>(t.data) + batch * t.batch + head * t.head + first_row * t.row;
}
template <class T> CF_DEVICE T* head_rows(const Rows& t, int32_t batch, int32_t head, int64_t first_row) {
    return static_cast<T*>(t.data) + batch * t.batch + head * t.head + first_row * t.row;
}

// What a block works on when everything is laid along grid.x, tiles fastest:
// x = (batch * heads + head) * tiles + tile.
// why: grid.y and grid.z end at 65535, which batch * heads may exceed.
struct TileCoord {
    int32_t tile, head, batch;
};
CF_DEVICE TileCoord tile_coord(uint32_t block, int32_t tiles, int32_t heads) {
    const uint32_t head = block / static_cast<uint32_t>(tiles);
    return {static_cast<int32_t>(block - head * tiles), static_cast<int32_t>(head % heads),
            static_cast<int32_t>(head / heads)};
}

// The same grid with heads of one tile next to each other, in sections of `heads` heads; tiles are counted from
// the first.
CF_DEVICE TileCoord section_tile_coord(uint32_t block, int32_t tiles, uint32_t heads, int32_t heads_of_batch,
                                       uint32_t per_section) {
    const uint32_t first = block / (per_section * tiles) * per_section;
    const uint32_t here = smaller(per_section, heads - first);
    const uint32_t step = block - first * tiles, head = first + step % here;
    return {static_cast<int32_t>(step / here), static_cast<int32_t>(head % heads_of_batch),
            static_cast<int32_t>(head / heads_of_batch)};
}

// Tiles of queries, the longest work first: from the last tile to the first.
// why: under a causal mask the last tiles see the most keys, and what starts last should be short. All heads at
// once would stream every K and V through the L2 cache once per tile. So heads are taken in sections, whose K and V
// have section_elements.
// heads_of_batch: heads of q; or of k, if a tile holds all heads of q that share one. batch, seqlen_k: those of shape;
// or 1 and the sequence's own, if the tiles are of one sequence.
CF_DEVICE TileCoord lpt_query_tile(uint32_t block, int32_t tiles, const Shape& shape, int32_t heads_of_batch,
                                   uint32_t section_elements, int32_t batch, int32_t seqlen_k) {
    const uint32_t heads = static_cast<uint32_t>(heads_of_batch) * static_cast<uint32_t>(batch);
    const uint32_t group = static_cast<uint32_t>(heads_of_batch / shape.heads_k);
    const uint32_t section_keys = section_elements / static_cast<uint32_t>(shape.head_dim + shape.head_dim_v);
    const uint32_t kv_heads = larger(section_keys / larger<uint32_t>(seqlen_k, 1), 1u);
    const uint32_t per_section = smaller(kv_heads, heads / group) * group;
    TileCoord work = section_tile_coord(block, tiles, heads, heads_of_batch, per_section);
    work.tile = tiles - 1 - work.tile;
    return work;
}
CF_DEVICE TileCoord lpt_query_tile(uint32_t block, int32_t tiles, const Shape& shape, int32_t heads_of_batch,
                                   uint32_t section_elements) {
    return lpt_query_tile(block, tiles, shape, heads_of_batch, section_elements, shape.batch, shape.seqlen_k);
}

// Tiles of keys, the longest work first: from the first tile, which under a causal mask the most queries see,
// to the last. Sections are of section_elements of Q and dO.
// why of one query head only: the blocks of a head go through the query heads that share it side by side.
CF_DEVICE TileCoord lpt_key_tile(uint32_t block, int32_t tiles, const Shape& shape,
                                 uint32_t section_elements) {
    const uint32_t heads = static_cast<uint32_t>(shape.heads_k) * static_cast<uint32_t>(shape.batch);
    const uint32_t rows = section_elements / static_cast<uint32_t>(shape.head_dim + shape.head_dim_v);
    const uint32_t per_section = larger(rows / larger<uint32_t>(shape.seqlen_q, 1), 1u);
    return section_tile_coord(block, tiles, heads, shape.heads_k, smaller(per_section, heads));
}
