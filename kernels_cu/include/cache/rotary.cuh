// Rotation of a row's features by its position; the source is named in flash_append.cu.
#pragma once
#include "attention/mask.cuh"

// Feature `column` of a row, rotated if it is one of the first `rotated`; at(c) is feature c.
template <class Feature>
CF_DEVICE auto turned(const Rotary& rotary, int32_t column, int64_t position, Feature at) {
    const auto x = at(column);
    using Acc = decltype(at(column));
    if (!rotary.cos || column >= rotary.rotated) return x;
    const int32_t half = rotary.rotated / 2;
    const int32_t pair = rotary.interleaved ? column / 2 : column % half;
    const bool second = rotary.interleaved ? column % 2 : column >= half;
    const int32_t partner = rotary.interleaved ? column ^ 1 : (second ? column - half : column + half);
    const Acc y = at(partner);
    const int64_t m = smaller(larger(position, int64_t(0)), int64_t(rotary.positions) - 1);
    const Acc cos =
        load_bias<Acc>(rotary.cos, m * rotary.cos_row + pair * rotary.cos_column, rotary.table_type);
    const Acc sin =
        load_bias<Acc>(rotary.sin, m * rotary.sin_row + pair * rotary.sin_column, rotary.table_type);
    return x * cos + (second ? y : -y) * sin;
}
