// Values of the narrow formats. 16-bit to float goes through tables: the host versions in NVIDIA's headers
// are slow.
#pragma once

namespace sim {

extern SIM_API float f16_values[65536], bf16_values[65536], e4m3_values[256];
template <class T> const float* values() {
    static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
    return kSame<T, __half> ? f16_values : bf16_values;
}
template <class T> float low(uint32_t r) { return values<T>()[r & 0xffff]; }
template <class T> float high(uint32_t r) { return values<T>()[r >> 16]; }
SIM_API uint32_t to_e4m3(float x);    // to nearest even, what is too large becomes 448
// A tensor core reads the upper 19 bits of a float.
inline float as_tf32(uint32_t r) { return __builtin_bit_cast(float, r & 0xffffe000); }

// d[m][n] += a[m][k] * b[k][n]
template <int M, int K, int N, class D, class A> void multiply(D (&d)[M][N], const A (&a)[M][K],
                                                               const A (&b)[K][N]) {
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++)
            for (int n = 0; n < N; n++) d[m][n] += a[m][k] * b[k][n];
}

// The same for floats of any extents, row after row.
SIM_API void multiply_add(float* d, const float* a, const float* b, int m_extent, int k_extent, int n_extent);

}    // namespace sim
