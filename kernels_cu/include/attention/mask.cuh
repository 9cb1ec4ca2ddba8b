// Which keys a query may attend to, and what its scores become between q k^T and the softmax.
#pragma once
#include "attention/blocks.cuh"
#include "attention/function.cuh"
#include "attention/seqlen.cuh"
#include "element.cuh"

// Half-open range of rows; empty is {0, 0}.
struct Range {
    int32_t first, end;
};

// Query i keeps key j if i + low <= j <= i + high and both are rows of the sequence. Causal masks, windows,
// the end of the keys and no mask at all are all bands, so a kernel compares a key with two limits per query
// and knows which tiles to skip.
struct Band {
    int64_t low, high;
    int32_t seqlen_q, seqlen_k;

    CF_DEVICE Band(const Score& score, const Sequence& sequence)
        : seqlen_q(sequence.seqlen_q), seqlen_k(sequence.seqlen_k) {
        const int64_t offset = score_offset(score, sequence);
        low = offset - score.left;
        high = offset + score.right;
    }
    CF_DEVICE static int64_t score_offset(const Score& score, const Sequence& sequence) {
        return score.offset + (score.offset_from_end ? sequence.seqlen_k - sequence.seqlen_q : 0);
    }
    // why: positions are 64-bit until they are clamped to the sequence, so that no offset or window can wrap.
    CF_DEVICE static int32_t clamp(int64_t row, int32_t end) {
        return static_cast<int32_t>(larger<int64_t>(0, smaller<int64_t>(row, end)));
    }

    CF_DEVICE int32_t first_key(int32_t query) const { return clamp(query + low, seqlen_k); }
    CF_DEVICE int32_t end_key(int32_t query) const { return clamp(query + high + 1, seqlen_k); }
    CF_DEVICE int32_t first_query(int32_t key) const { return clamp(key - high, seqlen_q); }
    CF_DEVICE int32_t end_query(int32_t key) const { return clamp(key - low + 1, seqlen_q); }

    // Keys of a single query; none for a row past the last query.
    CF_DEVICE Range keys_of(int32_t query) const {
        if (query >= seqlen_q) return {0, 0};
        return {first_key(query), end_key(query)};
    }
    // Keys that any query of [query_first, query_end) sees. Limits grow with the query, so the ends decide.
    CF_DEVICE Range keys_of(int32_t query_first, int32_t query_end) const {
        const Range keys{first_key(query_first), end_key(smaller(query_end, seqlen_q) - 1)};
        return keys.first < keys.end && query_first < seqlen_q ? keys : Range{0, 0};
    }
    // Queries that see any key of [key_first, key_end).
    CF_DEVICE Range queries_of(int32_t key_first, int32_t key_end) const {
        const Range queries{first_query(key_first), end_query(smaller(key_end, seqlen_k) - 1)};
        return queries.first < queries.end && key_first < seqlen_k ? queries : Range{0, 0};
    }
    // Whether every query of the tile sees every key of the tile, so that no element needs a test.
    CF_DEVICE bool keeps_all(int32_t query_first, int32_t query_end, int32_t key_first,
                             int32_t key_end) const {
        return query_end <= seqlen_q && first_key(query_end - 1) <= key_first &&
               end_key(query_first) >= key_end;
    }
};

CF_DEVICE bool contains(Range range, int32_t position) {
    return position >= range.first && position < range.end;
}

// An element of a bias, whose type is known only at run time, and the same for writing a dbias.
template <class Acc> CF_DEVICE Acc load_bias(const void* data, int64_t index, int32_t type) {
    switch (type) {
        case kBiasF16: return static_cast<Acc>(widen(static_cast<const __half*>(data)[index]));
        case kBiasBF16: return static_cast<Acc>(widen(static_cast<const __nv_bfloat16*>(data)[index]));
        case kBiasF32: return static_cast<Acc>(static_cast<const float*>(data)[index]);
        default: return static_cast<Acc>(static_cast<const double*>(data)[index]);
    }
}
template <class Acc> CF_DEVICE void store_bias(void* data, int64_t index, int32_t type, Acc value) {
    switch (type) {
        case kBiasF16: static_cast<__half*>(data)[index] = narrow<__half>(value); break;
        case kBiasBF16: static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(value); break;
        case kBiasF32: static_cast<float*>(data)[index] = narrow<float>(value); break;
        default: static_cast<double*>(data)[index] = narrow<double>(value); break;
    }
}

// Intervals, of one head, of the queries that see a key or of the keys that a query sees: a pair is kept if it is
// in any. Bounds beyond the sequence mean nothing: they are compared, never used as an index.
struct HeadSpans {
    const int32_t* bounds;    // of row 0; null: every pair is kept
    int64_t row, column;
    int32_t intervals, seqlen_q, seqlen_k;
    bool by_query;

    CF_DEVICE HeadSpans(const Score& score, const Sequence& sequence, int32_t head)
        : bounds(nullptr), row(score.spans.row), column(score.spans.column), intervals(score.span_intervals),
          seqlen_q(sequence.seqlen_q), seqlen_k(sequence.seqlen_k), by_query(score.spans_by_query != 0) {
        const auto* all = static_cast<const int32_t*>(score.spans.data);
        if (all) bounds = all + sequence.batch * score.spans.batch + head * score.spans.head;
    }
    // Whether a row has any of the positions of [first, end).
    CF_DEVICE bool meets(int32_t of_row, int32_t first, int32_t end) const {
        const int32_t* at = bounds + of_row * row;
        bool any = false;
        // why: where this is asked of one pair after the other, unrolled copies would hold registers.
#pragma unroll 1
        for (int n = 0; n < intervals; ++n, at += 2 * column) {
            const int32_t start = larger(at[0], first), stop = smaller(at[column], end);
            any = any || start < stop;
        }
        return any;
    }
    CF_DEVICE bool keeps(int32_t query, int32_t key) const {
        if (!bounds) return true;
        return by_query ? meets(query, key, key + 1) : meets(key, query, query + 1);
    }
    // Whether any pair of a tile is kept. All lanes of a warp call, and all warps get the same answer: each
    // looks at every row.
    CF_DEVICE bool reach(int32_t query_first, int32_t query_end, int32_t key_first, int32_t key_end) const {
        if (!bounds) return true;
        const Range queries{query_first, smaller(query_end, seqlen_q)};
        const Range keys{key_first, smaller(key_end, seqlen_k)};
        const Range rows = by_query ? queries : keys, along = by_query ? keys : queries;
        bool any = false;
        for (int32_t r = rows.first + threadIdx.x % 32; r < rows.end; r += 32)
            any = any || meets(r, along.first, along.end);
        return __any_sync(0xffffffffu, any);
    }
    // The part of a range that rows [first, end) have in their intervals, from the first position to the last,
    // where the rows are those that have them; else all of it. All lanes of a warp call, and all warps get the
    // same answer.
    CF_DEVICE Range narrowed(Range range, int32_t first, int32_t end, bool rows_are_queries) const {
        if (!bounds || rows_are_queries != by_query) return range;
        int32_t low = range.end, high = range.first;
#pragma unroll 1
        for (int32_t r = first + threadIdx.x % 32; r < smaller(end, by_query ? seqlen_q : seqlen_k);
             r += 32) {
            const int32_t* at = bounds + r * row;
#pragma unroll 1
            for (int n = 0; n < intervals; ++n, at += 2 * column) {
                const int32_t start = larger(at[0], range.first), stop = smaller(at[column], range.end);
                if (start < stop) low = smaller(low, start), high = larger(high, stop);
            }
        }
#pragma unroll 1
        for (int distance = 16; distance > 0; distance /= 2) {
            low = smaller(low, __shfl_xor_sync(0xffffffffu, low, distance));
            high = larger(high, __shfl_xor_sync(0xffffffffu, high, distance));
        }
        return low < high ? Range{low, high} : Range{0, 0};
    }
};

#if defined(CF_FUNCTION)
// The score function of one head.
template <class Acc> struct HeadFunction {
    const FunctionArray* arrays;
    int32_t batch, head;

    CF_DEVICE HeadFunction(const Score& score, const Sequence& sequence, int32_t of_head)
        : arrays(score.arrays), batch(sequence.batch), head(of_head) {}
    CF_DEVICE Acc operator()(Acc capped, int32_t query, int32_t key) const {
        return score_function<Acc>(capped, batch, head, query, key, arrays);
    }
    // Its derivative.
    CF_DEVICE Acc slope(Acc capped, int32_t query, int32_t key) const {
        return score_slope<Acc>(capped, batch, head, query, key, arrays);
    }
    // Its first and its second derivative.
    CF_DEVICE ScoreDerivatives<Acc> derivatives(Acc capped, int32_t query, int32_t key) const {
        return score_derivatives<Acc>(capped, batch, head, query, key, arrays);
    }
};
#endif

// The scores of one head: scale -> softcap -> function -> + bias, + ALiBi -> mask, spans, blocks. The band is the caller's.
// Positions are those within the sequence; the rows of mask and bias are too, packed or not.
template <class Acc> struct HeadScore {
    const Score& rule;
    int64_t offset;
    int64_t bias_first, mask_first;    // element of position (0, 0)
    Acc scale, softcap, slope;         // softcap 0: none
    HeadSpans spans;
    HeadBlocks blocks;
#if defined(CF_FUNCTION)
    HeadFunction<Acc> function;
#endif

    CF_DEVICE HeadScore(const Score& score, const Sequence& sequence, int32_t head)
        : rule(score), offset(Band::score_offset(score, sequence)),
          bias_first(sequence.batch * score.bias.batch + head * score.bias.head),
          mask_first(sequence.batch * score.mask.batch + head * score.mask.head),
          scale(static_cast<Acc>(score.scale)), softcap(static_cast<Acc>(score.softcap)), slope(0),
          spans(score, sequence, head), blocks(score, sequence, head)
#if defined(CF_FUNCTION)
          ,
          function(score, sequence, head)
#endif
    {
        const int64_t alibi_index = sequence.batch * score.alibi_batch + head * score.alibi_head;
        if (score.alibi_slopes) slope = static_cast<const Acc*>(score.alibi_slopes)[alibi_index];
    }

    // Whether spans and blocks keep any pair of a tile, as far as their own `reach` can say.
    CF_DEVICE bool reach(int32_t query_first, int32_t query_end, int32_t key_first, int32_t key_end) const {
        return spans.reach(query_first, query_end, key_first, key_end) &&
               blocks.reach(query_first, query_end, key_first, key_end);
    }

    // scale * q.k, capped.
    CF_DEVICE Acc apply_softcap(Acc product) const {
        const Acc scaled = product * scale;
        return softcap == 0 ? scaled : softcap * hyperbolic_tangent(scaled / softcap);
    }
    // d cap / d (scale * q.k), from the capped value.
    CF_DEVICE Acc softcap_slope(Acc capped) const {
        if (softcap == 0) return 1;
        const Acc tanh = capped / softcap;
        return 1 - tanh * tanh;
    }
    // The score of a pair inside the band: -inf, whatever q.k is, where mask, spans, blocks, function or bias
    // forbid it.
    CF_DEVICE Acc score(Acc capped, int32_t query, int32_t key) const {
        if (!spans.keeps(query, key) || !blocks.keeps(query, key)) return -Acc(kInfinity);
        if (rule.mask.data) {
            const auto* mask = static_cast<const uint8_t*>(rule.mask.data) + mask_first;
            if (!mask[query * rule.mask.row + key * rule.mask.column]) return -Acc(kInfinity);
        }
#if defined(CF_FUNCTION)
        capped = function(capped, query, key);
#endif
        if (rule.alibi_slopes) {
            const int64_t distance = query + offset - key;
            capped -= slope * static_cast<Acc>(distance < 0 ? -distance : distance);
        }
        if (rule.bias.data) {
            const int64_t index = bias_first + query * rule.bias.row + key * rule.bias.column;
            const Acc bias = load_bias<Acc>(rule.bias.data, index, rule.bias_type);
            capped = bias == -Acc(kInfinity) ? bias : capped + bias;
        }
        return capped;
    }
};
