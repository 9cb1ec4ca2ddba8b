// Primitives of a thread and of a warp: shared memory, special functions, barriers, matrix fragments, mma.
#pragma once

extern __shared__ __align__(1024) unsigned char cf_shared_memory[];
// The dynamic shared memory of the block, as the one struct that describes it.
template <class T> CF_DEVICE T& shared_memory() { return *reinterpret_cast<T*>(cf_shared_memory); }
CF_DEVICE uint32_t smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- special functions

// 2^x, denormal results flushed to zero.
CF_DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
CF_DEVICE double ex2(double x) { return exp2(x); }
// 1 / x, error up to one unit in the last place.
CF_DEVICE float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a * b + c with a 64-bit result, one instruction. why: written as a product of widened integers, what does
// not change in a loop is widened before it, and the loop multiplies 64 by 64 bits, which takes four.
CF_DEVICE int64_t mad_wide(int32_t a, int32_t b, int64_t c) {
    int64_t d;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
    return d;
}

// x, of which the compiler does not know that it is the same in every iteration. why: what is computed from
// it then stays in the loop, at an instruction each, and does not wait through it in registers that a main
// loop cannot spare.
CF_DEVICE uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A point across which ptxas moves nothing. x is any register in use.
// why: for ptxas a wgmma_wait depends on products alone, and it hoists one above the whole softmax that was meant to
// overlap with them. ptxas neither moves a profiler event nor moves anything across it, and a predicate whose value it
// cannot know disables the event: x never has this value, a NaN that no instruction produces and that is no address.
// (A branch around nanosleep holds, too, but costs registers; around a barrier of the warp or nothing it does not.)
CF_DEVICE void pin_schedule(uint32_t x) {
    asm volatile("{\n.reg .pred never;\nsetp.eq.u32 never, %0, 0x7fc12345;\n@never pmevent 1;\n}" ::"r"(x)
                 : "memory");
}

// Byte i of the result is byte `selector >> 4 i & 7` of the eight bytes of x (0 to 3) and y (4 to 7).
CF_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
    return __byte_perm(x, y, selector);
}

// ---- conversions

// Two 16-bit elements in a register, x in the low half.
template <class T> CF_DEVICE uint32_t pack(float x, float y) {
    if constexpr (kSame<T, __half>) {
        __half2 h = __floats2half2_rn(x, y);
        return reinterpret_cast<uint32_t&>(h);
    } else {
        static_assert(kSame<T, __nv_bfloat16>);
        __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
        return reinterpret_cast<uint32_t&>(h);
    }
}
// Two e4m3 elements, x in the low byte; what is too large becomes the largest (sm_89).
CF_DEVICE uint16_t pack_e4m3(float x, float y) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
    return r;
}
// Rounded to 10 bits of mantissa, ties away from zero (sm_80).
CF_DEVICE uint32_t to_tf32(float x) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}

// ---- barriers of a part of a block; id 0 is __syncthreads, `threads` is a multiple of 32

CF_DEVICE void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CF_DEVICE void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
// True in one lane of the warp.
CF_DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The registers per thread of the calling warpgroup, which all its warps ask for.
template <int kRegisters> CF_DEVICE void setmaxnreg_inc() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> CF_DEVICE void setmaxnreg_dec() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif

// ---- matrices of 8 x 8 16-bit elements
// layout: lane l gives the address of row l % 8 of matrix l / 8 (x1 and x2 use lanes 0-7 and 0-15); register
// j of lane l holds elements 2 (l % 4) and + 1 of row l / 4 of matrix j, or of its transpose.

#if __CUDA_ARCH__ >= 750
#define CF_LDMATRIX(name, kind)                                                                              \
    CF_DEVICE void ldmatrix_x1##name(uint32_t (&r)[1], uint32_t addr) {                                      \
        asm volatile("ldmatrix.sync.aligned.m8n8.x1" kind ".shared.b16 {%0}, [%1];"                          \
                     : "=r"(r[0])                                                                            \
                     : "r"(addr)                                                                             \
                     : "memory");                                                                            \
    }                                                                                                        \
    CF_DEVICE void ldmatrix_x2##name(uint32_t (&r)[2], uint32_t addr) {                                      \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" kind ".shared.b16 {%0,%1}, [%2];"                       \
                     : "=r"(r[0]), "=r"(r[1])                                                                \
                     : "r"(addr)                                                                             \
                     : "memory");                                                                            \
    }                                                                                                        \
    CF_DEVICE void ldmatrix_x4##name(uint32_t (&r)[4], uint32_t addr) {                                      \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0,%1,%2,%3}, [%4];"                 \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                        \
                     : "r"(addr)                                                                             \
                     : "memory");                                                                            \
    }
CF_LDMATRIX(, "")
CF_LDMATRIX(_trans, ".trans")
#undef CF_LDMATRIX
#endif

#if __CUDA_ARCH__ >= 900
#define CF_STMATRIX(name, kind)                                                                              \
    CF_DEVICE void stmatrix_x1##name(uint32_t addr, const uint32_t (&r)[1]) {                                \
        asm volatile("stmatrix.sync.aligned.m8n8.x1" kind ".shared.b16 [%0], {%1};" ::"r"(addr), "r"(r[0])   \
                     : "memory");                                                                            \
    }                                                                                                        \
    CF_DEVICE void stmatrix_x2##name(uint32_t addr, const uint32_t (&r)[2]) {                                \
        asm volatile("stmatrix.sync.aligned.m8n8.x2" kind ".shared.b16 [%0], {%1,%2};" ::"r"(addr),          \
                     "r"(r[0]), "r"(r[1])                                                                    \
                     : "memory");                                                                            \
    }                                                                                                        \
    CF_DEVICE void stmatrix_x4##name(uint32_t addr, const uint32_t (&r)[4]) {                                \
        asm volatile("stmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),    \
                     "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])                                              \
                     : "memory");                                                                            \
    }
CF_STMATRIX(, "")
CF_STMATRIX(_trans, ".trans")
#undef CF_STMATRIX
#endif

// ---- d += a b, with d of 16 x 8
// layout: lane l, g = l / 4, t = l % 4. d: rows g (d0 d1) and g + 8 (d2 d3), columns 2t and 2t + 1.
// k16: a0 a1 rows g and g + 8 at k = 2t, 2t + 1; a2 a3 the same at k + 8; b0 k = 2t, 2t + 1 of column g, b1
// at k + 8.

#define CF_MMA(shape, type)                                                                                  \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                                     \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define CF_MMA_K8(a_type)                                                                                    \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." a_type "." a_type                                   \
                 ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                         \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(b0))

// why: declared for every target, so that a kernel that uses them on some targets only can leave the choice
// to `if constexpr`.

// k = 8 (sm_75): a0 a1 rows g and g + 8 at k = 2t, 2t + 1; b0 k = 2t, 2t + 1 of column g. Turing has f16
// only.
template <class T> CF_DEVICE void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b0) {
    if constexpr (kSame<T, __half>) {
        CF_MMA_K8("f16");
    } else {
        static_assert(kSame<T, __nv_bfloat16>);
        CF_MMA_K8("bf16");
    }
}
// The rest is sm_80.
template <class T> CF_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
    if constexpr (kSame<T, __half>) {
        CF_MMA("m16n8k16", "f16");
    } else {
        static_assert(kSame<T, __nv_bfloat16>);
        CF_MMA("m16n8k16", "bf16");
    }
}
// layout: a0 a1 rows g and g + 8 at k = t, a2 a3 the same at k = t + 4; b0 k = t of column g, b1 k = t + 4.
CF_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    CF_MMA("m16n8k8", "tf32");
}
// layout (sm_89): a0 a1 rows g and g + 8 at k = 4t .. 4t + 3, a2 a3 the same at k + 16; b0 k = 4t .. 4t + 3 of column
// g, b1 at k + 16. Data-center GPUs from Hopper on convert to 16 bits and multiply those.
CF_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    CF_MMA("m16n8k32", "e4m3");
}
#undef CF_MMA
#undef CF_MMA_K8
// d += (a 2^(scale of its row - 127)) (b 2^(scale of its column - 127)), of the family of sm_120: at twice the rate
// of mma_m16n8k32_e4m3, whose layout a, b and d have. A scale is a byte (ue8m0), 255 is NaN.
// layout: of scale_a and scale_b byte kByte counts, in lanes 4 g + 2 kThread + i for row g + 8 i of a, and in lanes
// 4 g + kThread for column g of b; what other bytes and lanes hold does not matter.
template <int kByte = 0, int kThread = 0>
CF_DEVICE void mma_m16n8k32_e4m3_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                        uint32_t scale_a, uint32_t scale_b) {
    static_assert(kByte >= 0 && kByte < 4 && (kThread == 0 || kThread == 1));
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%12,%13}, %11, {%12,%13};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b),
          "n"(kByte), "n"(kThread));
}
// layout: as mma_m16n8k8_tf32, an element of double each (sm_90).
CF_DEVICE void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], double b0, double b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}
// d of 8 x 8. layout: d0 d1 row g, columns 2t and 2t + 1; a row g at k = t; b k = t of column g.
CF_DEVICE void mma_m8n8k4_f64(double& d0, double& d1, double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(d0), "+d"(d1)
                 : "d"(a), "d"(b));
}
