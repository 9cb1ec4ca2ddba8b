// Conversions between the formats of PTX, with the simulator's tables.
#include "library.h"

namespace ptx {

float from_f16(u16 x) { return sim::f16_values[x]; }
float from_bf16(u16 x) { return sim::bf16_values[x]; }
template <> u16 to_f16(float x) { return bit_cast<u16>(__float2half_rn(x)); }
template <> u16 to_f16(double x) { return bit_cast<u16>(__double2half(x)); }
template <> u16 to_bf16(float x) { return bit_cast<u16>(__float2bfloat16_rn(x)); }
template <> u16 to_bf16(double x) { return bit_cast<u16>(__double2bfloat16(x)); }
u16 to_e4m3x2(float high, float low) { return u16(sim::to_e4m3(high) << 8 | sim::to_e4m3(low)); }
u32 to_tf32(float x) { return ::to_tf32(x); }
float ex2_ftz(float x) { return ::ex2(x); }

}    // namespace ptx
