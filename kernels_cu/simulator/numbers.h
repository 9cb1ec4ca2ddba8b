// Values of the narrow formats. 16-bit to float goes through tables: the host versions in NVIDIA's headers
// are slow.
#pragma once

namespace sim {

enum class Format { f16, bf16, tf32, e4m3 };
template <class T> constexpr Format format_of() {
    static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
    return kSame<T, __half> ? Format::f16 : Format::bf16;
}

extern SIM_API float f16_values[65536], bf16_values[65536], e4m3_values[256];
SIM_API uint32_t to_e4m3(float x);    // to nearest even, what is too large becomes 448
// A tensor core reads the upper 19 bits of a float.
inline float as_tf32(uint32_t r) { return __builtin_bit_cast(float, r & 0xffffe000); }

// d[m][n] += a[m][k] * b[k][n], row after row.
SIM_API void multiply_add(float* d, const float* a, const float* b, int m_extent, int k_extent, int n_extent);

}    // namespace sim
