// Rotation of a row's features by its position; the source is named in flash_append.cu.
// Design note: docs/kernels/decode.md.
#pragma once
#include "attention/mask.cuh"

// Feature `column` of a row, rotated if it is one of those that are; at(c) is feature c.
template <class Feature>
CF_DEVICE auto rotated_feature(const Rotary& rotary, int32_t column, int64_t position, Feature at) {
    const auto x = at(column);
    using Acc = decltype(at(column));
    const int32_t i = column - rotary.first_rotated;
    if (!rotary.cos || i < 0 || i >= rotary.rotated) return x;
    const int32_t half = rotary.rotated / 2;
    const int32_t pair = rotary.interleaved ? i / 2 : i % half;
    const bool second = rotary.interleaved ? i % 2 : i >= half;
    const int32_t distance = rotary.interleaved ? 1 : half;
    const Acc y = at(second ? column - distance : column + distance);
    const int64_t m = smaller(larger(position, int64_t(0)), int64_t(rotary.positions) - 1);
    const Acc cos =
        load_bias<Acc>(rotary.cos, m * rotary.cos_row + pair * rotary.cos_column, rotary.table_type);
    const Acc sin =
        load_bias<Acc>(rotary.sin, m * rotary.sin_row + pair * rotary.sin_column, rotary.table_type);
    return x * cos + (second ? y : -y) * sin;
}
