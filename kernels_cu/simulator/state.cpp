// Tables of values, and votes over a block.
#include <cmath>
#include "../include/prim.cuh"
#include "core.h"

namespace sim {

float f16_values[65536], bf16_values[65536], e4m3_values[256];

static float e4m3_value(int bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float x = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    if ((bits & 127) == 127) x = NAN;
    return bits & 128 ? -x : x;
}
uint32_t to_e4m3(float x) {
    uint32_t sign = std::signbit(x) ? 128 : 0;
    if (std::isnan(x)) return 127;
    float y = std::fabs(x);
    if (y >= 448) return sign | 126;
    uint32_t below = 0;
    while (e4m3_values[below + 1] <= y) below++;
    float down = y - e4m3_values[below], up = e4m3_values[below + 1] - y;
    return sign | (below + (up < down || (up == down && below % 2)));
}

[[maybe_unused]] static const bool tables_filled = [] {
    for (int i = 0; i < 65536; i++) {
        f16_values[i] = __half2float(__ushort_as_half(uint16_t(i)));
        bf16_values[i] = __uint_as_float(uint32_t(i) << 16);
    }
    for (int i = 0; i < 256; i++) e4m3_values[i] = e4m3_value(i);
    return true;
}();

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("avx512f", "avx2",
                             "default")))    // why: nine tenths of the time of a wgmma kernel is here
#endif
__attribute__((optimize("O3", "no-trapping-math"))) void multiply_add(float* d, const float* a,
                                                                      const float* b, int m_extent,
                                                                      int k_extent, int n_extent) {
    for (int m = 0; m < m_extent; m++)
        for (int k = 0; k < k_extent; k++) {
            float x = a[m * k_extent + k];
            for (int n = 0; n < n_extent; n++) d[m * n_extent + n] += x * b[k * n_extent + n];
        }
}

int barrier_vote(bool predicate, Site site) {
    const Barrier& b = block.barriers[0];
    int& mine = block.votes[b.phase & 1];
    if (b.arrived == 0) mine = 0;
    mine += predicate;
    barrier(0, block.size, true, site);
    return mine;
}

}    // namespace sim
