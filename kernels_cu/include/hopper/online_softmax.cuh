// P from the scores of a block of keys, for the 64 rows of a warpgroup: softcap, ALiBi, masks, then the online softmax.
// Design note: docs/kernels/forward_sm90.md.
//
// K has to define Product (Math), Softmax (OnlineSoftmax of the 16 rows of a warp), kMask and kBlockN.
#pragma once
#include "hopper/masked_pairs.cuh"
#include "hopper/sparse_blocks.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/warpgroup.cuh"
#include "tile/online_softmax.cuh"
#include "tile/score_tile.cuh"

template <class K> struct MaskedSoftmax {
    // why: of kind spans rows and first_key are constants, and no register holds them.
    static constexpr bool kSpans = K::kMask == Mask::spans;
    TileScore<typename K::Product> score;
    float slope[2];    // of ALiBi, for the thread's two rows
    NarrowBand band;
    float unit_log2;    // from a score as the softmax finds it to log2
    // kRescaleThreshold in the unit of the scores. why not infinity, for a scale next to 0: a first score would not exceed
    // -inf by it.
    float rescale_threshold;
    PackGqa rows;
    int32_t row, first_key;            // the thread's first row and the tile's first key
    int32_t whole_first, whole_end;    // blocks of keys in which every pair counts
    typename K::Softmax online;

    CF_DEVICE MaskedSoftmax(const Score& rule, const WorkTile<K>& work, int32_t first, float unit_log2)
        : score(rule, work.sequence, work.head(first)), band(Band(rule, work.sequence)), unit_log2(unit_log2),
          rescale_threshold(K::Softmax::kRescaleThreshold
                                ? warp_uniform(fminf(K::Softmax::kRescaleThreshold * rcp(unit_log2), 3e38f))
                                : 0.0f),
          rows(kSpans ? PackGqa() : work.rows),
          row(first + static_cast<int32_t>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4)),
          first_key(kSpans ? 0 : work.first_key) {
        const Band wide(rule, work.sequence);
        const int32_t last = smaller(rows.query(first + 63), work.sequence.seqlen_q - 1);
        whole_first = cdiv(wide.first_key(last) - first_key, K::kBlockN);
        whole_end = (wide.end_key(rows.query(first)) - first_key) / K::kBlockN;
        CF_UNROLL
        for (int half = 0; half < 2; half++)
            slope[half] = HeadScore<float>(rule, work.sequence, work.head(row + 8 * half)).slope;
    }
    // Blocks of keys up to the last key that a row of the warpgroup sees; at least one. first: its first row.
    CF_DEVICE int32_t visible_blocks(const WorkTile<K>& work, int32_t first) const {
        if (kSpans) return work.blocks;
        const int32_t last = smaller(work.rows.query(first + 63), work.sequence.seqlen_q - 1);
        const int32_t end = work.rows.query(first) > last ? 0 : band.end_key(last) - first_key;
        return warp_uniform(larger(1, smaller(work.blocks, cdiv(end, K::kBlockN))));
    }
    // -inf outside the band. key: of the thread's first column.
    CF_DEVICE void mask(float (&s)[1][K::kBlockN / 8][4], const NarrowBand& limits, int32_t key) const {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t query = rows.query(row + 8 * half);
            mask_row(s, 0, half, limits.first_key(query) - key, limits.end_key(query) - key);
        }
    }
    // Kind spans, a partial block: -inf where band, spans or blocks mask a pair.
    // why the band is computed again: no register holds it while blocks are full.
    CF_DEVICE void mask_partial(float (&rS)[K::kBlockN / 2], const Score& rule, const WorkTile<K>& work,
                                SparseBlock block) const {
        const int32_t first = block.number() * K::kBlockN, query = row & ~15;
        MaskedPairs<K::kBlockN>{rule, work.sequence, work.group, query, first}.apply(as_tile(rS));
        // why first: beside spans most calls have no band, and ask for the end of the keys alone. An offset is below 2^40.
        constexpr int64_t kOpen = int64_t(1) << 62;
        const bool open = rule.left >= kOpen && rule.right >= kOpen;
        if (open && first + K::kBlockN <= work.sequence.seqlen_k) return;
        const NarrowBand rows_band(Band(rule, work.sequence));
        const int32_t before = rows_band.first_key(query + 15) - first;
        const int32_t after = first + K::kBlockN - rows_band.end_key(query);
        // why opaque: or ptxas holds a predicate less while blocks are whole.
        if (static_cast<int32_t>(opaque(static_cast<uint32_t>(larger(before, after)))) > 0)
            mask(as_tile(rS), rows_band, first + static_cast<int32_t>(threadIdx.x) % 4 * 2);
    }
    // S becomes P; row_max and row_sum follow. Returns what O is to be rescaled by.
    CF_DEVICE Rescale mask_and_softmax(float (&rS)[K::kBlockN / 2], int32_t block) {
        auto& s = as_tile(rS);
        const int32_t key = first_key + block * K::kBlockN + static_cast<int32_t>(threadIdx.x) % 4 * 2;
        if constexpr (K::kMask == Mask::any) {
            score.apply_softcap(s);
            if (score.head.rule.alibi_slopes) {
                CF_UNROLL
                for (int half = 0; half < 2; half++)
                    score.add_alibi_row(
                        s, 0, half, slope[half],
                        static_cast<float>(rows.query(row + 8 * half) + score.head.offset - key));
            }
        }
        if constexpr (!kSpans) {
            if (block < whole_first || block >= whole_end) mask(s, band, key);
        }
        if constexpr (K::Softmax::kRescaleThreshold > 0)
            return online.softmax_rows(s, 0, unit_log2, rescale_threshold);
        else {
            const float upper = online.softmax_row(s, 0, 0, unit_log2);
            return {true, {upper, online.softmax_row(s, 0, 1, unit_log2)}};
        }
    }
};
