// The rows of a tile over a cache: queries of all heads that share a key head, heads of one query next to each other.
// Design note: docs/kernels/decode.md.
#pragma once
#include "cache/slots.cuh"

// What a row of the tile is.
struct Row {
    int32_t query, head;
};
// What the scores of a row depend on: the keys that it sees, and where ALiBi has it.
struct RowScore {
    int32_t first_key, end_key, position;
    float slope;
};
// Which rows a block has, and which of the parts of their keys.
struct RowBlock {
    int32_t group, kv_head, batch, split;
    int32_t first_row, rows;    // rows that exist of the tile

    // Grid: x = ((batch * heads_k + kv_head) * splits + split) * tiles + tile.
    CF_DEVICE static RowBlock of(uint32_t block, const Shape& shape, int32_t splits, int32_t tile_rows) {
        const int32_t group = shape.heads_q / shape.heads_k, rows = group * shape.seqlen_q;
        const uint32_t tiles = cdiv(rows, tile_rows), part = block / tiles;
        const int32_t pair = static_cast<int32_t>(part / splits);
        const int32_t first_row = static_cast<int32_t>(block % tiles) * tile_rows;
        return {group,
                pair % shape.heads_k,
                pair / shape.heads_k,
                static_cast<int32_t>(part % splits),
                first_row,
                smaller(tile_rows, rows - first_row)};
    }
    CF_DEVICE Row row(int32_t i) const {
        return {(first_row + i) / group, kv_head * group + (first_row + i) % group};
    }
    // The first and the last query of the rows.
    CF_DEVICE int32_t first_query() const { return first_row / group; }
    CF_DEVICE int32_t last_query() const { return (first_row + rows - 1) / group; }
    // Of row i, or of the last that exists.
    CF_DEVICE RowScore score(int32_t i, const Score& rule, const Sequence& sequence, const Band& band) const {
        const Row at = row(smaller(i, rows - 1));
        const HeadScore<float> head(rule, sequence, at.head);
        const Range seen = band.keys_of(at.query);
        return {seen.first, seen.end, at.query + static_cast<int32_t>(head.offset), head.slope};
    }
    // Index into (splits, batch, heads_q, seqlen_q).
    CF_DEVICE int64_t part_row(const Shape& shape, Row at) const {
        return ((int64_t(split) * shape.batch + batch) * shape.heads_q + at.head) * shape.seqlen_q + at.query;
    }
};

// The keys of a block in steps of kBlockN: its part of those that its rows see.
struct KeySteps {
    int32_t first, count;    // step i begins at key (first + i) * kBlockN

    // least: steps of a part, but of the last one.
    template <int kBlockN>
    CF_DEVICE static KeySteps of(const RowBlock& block, const Band& band, int32_t splits, int32_t least) {
        const Range keys = band.keys_of(block.first_query(), block.last_query() + 1);
        const int32_t begin = keys.first / kBlockN, steps = cdiv(keys.end, kBlockN) - begin;
        const int32_t of_part = larger(cdiv(steps, splits), least);
        const int32_t first = begin + smaller(block.split, cdiv(steps, of_part)) * of_part;
        return {first, larger(0, smaller(first + of_part, begin + steps) - first)};
    }
};

// Q of the rows of a block, into a tile, by kThreads threads. read(row of q, row, chunk) returns 16 bytes; the row of q is null
// where there is none. kAtOnce: reads of a thread that wait for memory together.
template <class Element, int kThreads, int kAtOnce = 1, class T, class Read>
CF_DEVICE void load_queries(T& tile, const DecodeParams& p, const RowBlock& block, Read read) {
    const Tensor q = p.rotated_q.data ? p.rotated_q : p.q;
#pragma unroll kAtOnce
    for (int32_t i = threadIdx.x; i < T::kRows * T::kChunks; i += kThreads) {
        const int32_t row = i / T::kChunks, chunk = i % T::kChunks;
        const Element* from = nullptr;
        if (row < block.rows) {
            const Row at = block.row(row);
            from = head_rows<const Element>(q, block.batch, at.head, at.query);
        }
        st_shared(smem_addr(tile.data) + T::offset(row, chunk), read(from, row, chunk));
    }
}
// The same without a change: what does not exist becomes zeros.
template <class Element, int kThreads, int kAtOnce = 1, class T>
CF_DEVICE void load_queries(T& tile, const DecodeParams& p, const RowBlock& block) {
    load_queries<Element, kThreads, kAtOnce>(tile, p, block, [&](const Element* from, int, int chunk) {
        return from ? read_chunk(from, chunk, p.shape.head_dim) : uint4{};
    });
}

// Of a part without keys: flash_combine reads no O of it. By the threads of a block, at least one for each row.
CF_DEVICE void store_empty_part(const DecodeParams& p, const RowBlock& block) {
    const int32_t row = threadIdx.x;
    if (row < block.rows) st_global(p.partial_lse + block.part_row(p.shape, block.row(row)), -kInfinity);
}

// The last keys, as many as there are queries, are drafts, which the queries in their spans see. Of a warp's 16 rows from
// row_first on; first_key: of column 0 of this thread.
template <int kN>
CF_DEVICE void mask_drafts(float (&s)[1][kN][4], const Score& score, const Sequence& sequence,
                           const RowBlock& block, int32_t row_first, int32_t first_key) {
    const int32_t first = first_key - (sequence.seqlen_k - sequence.seqlen_q);
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const Row row = block.row(row_first + threadIdx.x % 32 / 4 + 8 * half);
        const HeadSpans spans(score, sequence, row.head);
        CF_UNROLL
        for (int i = 0; i < 2 * kN; i++) {
            const int32_t draft = first + i / 2 * 8 + i % 2;
            const bool is_draft = draft >= 0 && draft < sequence.seqlen_q;
            if (is_draft && !spans.meets(draft, row.query, row.query + 1))
                s[0][i / 2][2 * half + i % 2] = -kInfinity;
        }
    }
}
