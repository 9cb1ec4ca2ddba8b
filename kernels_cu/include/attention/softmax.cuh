// The online softmax of one row: its state, and the reductions over the lanes that share the row.
// Rows are described one at a time, so that any layout of a score tile over threads can use this.
#pragma once
#include "element.cuh"

// Over kLanes neighbouring lanes (a power of two); all of them get the result. All lanes of a warp call.
template <int kLanes, class Acc> CF_DEVICE Acc max_over_lanes(Acc x) {
    CF_UNROLL
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
        x = larger(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
template <int kLanes, class Acc> CF_DEVICE Acc sum_over_lanes(Acc x) {
    CF_UNROLL
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// What a row came to.
template <class Acc> struct FinalRow {
    Acc lse;    // natural-log; of a row without keys that of its sink, or -inf, NaN for one whose scores are NaN
    Acc normaliser;    // factor on the row of o; 0 for a row without keys
};
// A sink is a key with this score and no value; -inf if there is none.
template <class Acc> CF_DEVICE FinalRow<Acc> finalize_row(Acc natural_max, Acc sum, Acc sink) {
    // why the sum: it is 0 without keys, and NaN where every score is; as -inf that row would be left out of a merge.
    if (natural_max == -Acc(kInfinity)) return {sum + sink, 0};
    const Acc highest = larger(natural_max, sink);
    const Acc share = natural_exp(natural_max - highest);
    const Acc total = sum * share + natural_exp(sink - highest);
    return {highest + natural_log(total), share / total};
}

// Each lane keeps the same row_max and its own share of row_sum, which sum_over_lanes completes after the
// last tile.
template <class Acc> struct RowSoftmax {
    Acc row_max = -Acc(kInfinity);
    Acc row_sum = 0;

    // why: in a row that has seen no key, -inf - (-inf) would be NaN; any finite reference gives weight 0.
    CF_DEVICE Acc reference() const { return row_max == -Acc(kInfinity) ? 0 : row_max; }

    // Takes a new maximum into account; returns the factor on everything accumulated under the old one.
    CF_DEVICE Acc update_max(Acc tile_max) {
        const Acc old_max = row_max;
        row_max = larger(old_max, tile_max);
        const Acc rescale = natural_exp(old_max - reference());
        row_sum *= rescale;
        return rescale;
    }
    // The unnormalised weight of a score, counted in row_sum.
    CF_DEVICE Acc exp_and_sum(Acc score) {
        const Acc weight = natural_exp(score - reference());
        row_sum += weight;
        return weight;
    }
    template <int kLanes> CF_DEVICE FinalRow<Acc> finalize(Acc sink) const {
        return finalize_row(row_max, sum_over_lanes<kLanes>(row_sum), sink);
    }
};
