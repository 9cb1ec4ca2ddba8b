// Warpgroup matrix products of sm_90a: d (64 x N, float) = or += a b. b is in shared memory, a there or in
// registers.
//
// All 128 threads of four warps that start at a multiple of four call together. The products run
//   asynchronously: wgmma_fence(), products, wgmma_commit(), ... wgmma_wait<n>()
// Until the wait neither d nor registers of a may be touched, and the shared memory may not be overwritten.
// wgmma_fence_operand(d) before the fence and after the wait keeps the compiler from moving accesses to d across them.
// layout: lane l of warp w, g = l / 4, t = l % 4: d[i] is row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2
// t + i % 2; registers of a as for mma_m16n8k16 (k16), mma_m16n8k32_e4m3 (k32), rows
// counted from 16 w.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

CF_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CF_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the newest kNewest groups are done.
template <int kNewest> CF_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}
template <int n> CF_DEVICE void wgmma_fence_operand(float (&d)[n]) {
    CF_UNROLL
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- register lists: CF_Rn the places of n accumulators in the asm text, CF_Dn their operands

#define CF_R4 "%0,%1,%2,%3"
#define CF_D4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define CF_R8 CF_R4 ",%4,%5,%6,%7"
#define CF_D8 CF_D4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CF_R12 CF_R8 ",%8,%9,%10,%11"
#define CF_D12 CF_D8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define CF_R16 CF_R12 ",%12,%13,%14,%15"
#define CF_D16 CF_D12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define CF_R20 CF_R16 ",%16,%17,%18,%19"
#define CF_D20 CF_D16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define CF_R24 CF_R20 ",%20,%21,%22,%23"
#define CF_D24 CF_D20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define CF_R28 CF_R24 ",%24,%25,%26,%27"
#define CF_D28 CF_D24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define CF_R32 CF_R28 ",%28,%29,%30,%31"
#define CF_D32 CF_D28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define CF_R36 CF_R32 ",%32,%33,%34,%35"
#define CF_D36 CF_D32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define CF_R40 CF_R36 ",%36,%37,%38,%39"
#define CF_D40 CF_D36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define CF_R44 CF_R40 ",%40,%41,%42,%43"
#define CF_D44 CF_D40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define CF_R48 CF_R44 ",%44,%45,%46,%47"
#define CF_D48 CF_D44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define CF_R52 CF_R48 ",%48,%49,%50,%51"
#define CF_D52 CF_D48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define CF_R56 CF_R52 ",%52,%53,%54,%55"
#define CF_D56 CF_D52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define CF_R60 CF_R56 ",%56,%57,%58,%59"
#define CF_D60 CF_D56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define CF_R64 CF_R60 ",%60,%61,%62,%63"
#define CF_D64 CF_D60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define CF_R68 CF_R64 ",%64,%65,%66,%67"
#define CF_D68 CF_D64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define CF_R72 CF_R68 ",%68,%69,%70,%71"
#define CF_D72 CF_D68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define CF_R76 CF_R72 ",%72,%73,%74,%75"
#define CF_D76 CF_D72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define CF_R80 CF_R76 ",%76,%77,%78,%79"
#define CF_D80 CF_D76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define CF_R84 CF_R80 ",%80,%81,%82,%83"
#define CF_D84 CF_D80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define CF_R88 CF_R84 ",%84,%85,%86,%87"
#define CF_D88 CF_D84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define CF_R92 CF_R88 ",%88,%89,%90,%91"
#define CF_D92 CF_D88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define CF_R96 CF_R92 ",%92,%93,%94,%95"
#define CF_D96 CF_D92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define CF_R100 CF_R96 ",%96,%97,%98,%99"
#define CF_D100 CF_D96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define CF_R104 CF_R100 ",%100,%101,%102,%103"
#define CF_D104 CF_D100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define CF_R108 CF_R104 ",%104,%105,%106,%107"
#define CF_D108 CF_D104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define CF_R112 CF_R108 ",%108,%109,%110,%111"
#define CF_D112 CF_D108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define CF_R116 CF_R112 ",%112,%113,%114,%115"
#define CF_D116 CF_D112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define CF_R120 CF_R116 ",%116,%117,%118,%119"
#define CF_D120 CF_D116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define CF_R124 CF_R120 ",%120,%121,%122,%123"
#define CF_D124 CF_D120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define CF_R128 CF_R124 ",%124,%125,%126,%127"
#define CF_D128 CF_D124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// ---- one specialisation per N. Operands after the accumulators: descriptors or registers of a, descriptor
// of b, accumulate, flags.

template <int n> struct WarpgroupProduct;    // n = N / 2 accumulators per thread

// clang-format off
#define CF_WGMMA(shape, types, n, operands, accumulate, flags, ...)                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64" shape "." types                                          \
                 " {" CF_R##n "}, " operands ", p, 1, 1" flags ";\n}"                                        \
                 : CF_D##n                                                                                   \
                 : __VA_ARGS__)
// clang-format on
// Operands of a in shared memory and in registers: their places in the text, and what stands there.
#define CF_SS_TEXT(p0, p1) "%" #p0 ", %" #p1
#define CF_RS_TEXT(p0, p1, p2, p3, p4) "{%" #p0 ",%" #p1 ",%" #p2 ",%" #p3 "}, %" #p4
#define CF_SS "l"(a), "l"(b), "r"(add)
#define CF_RS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)
#define CF_WGMMA_SS(N, k, types, n, flags, p0, p1, p2, ...)                                                  \
    CF_WGMMA("n" #N k, types, n, CF_SS_TEXT(p0, p1), p2, flags, __VA_ARGS__)
#define CF_WGMMA_RS(N, k, types, n, flags, p0, p1, p2, p3, p4, p5, ...)                                      \
    CF_WGMMA("n" #N k, types, n, CF_RS_TEXT(p0, p1, p2, p3, p4), p5, flags, __VA_ARGS__)
// p0 .. p7: the numbers n .. n + 7
#define CF_WGMMA_SIZE(N, n, p0, p1, p2, p3, p4, p5, p6, p7)                                                  \
    template <> struct WarpgroupProduct<n> {                                                                 \
        template <class T, int kTransA, int kTransB>                                                         \
        CF_DEVICE static void k16(float (&d)[n], uint64_t a, uint64_t b, int add) {                          \
            if constexpr (kSame<T, __half>)                                                                  \
                CF_WGMMA_SS(N, "k16", "f32.f16.f16", n, ", %" #p3 ", %" #p4, p0, p1, p2, CF_SS,              \
                            "n"(kTransA), "n"(kTransB));                                                     \
            else                                                                                             \
                CF_WGMMA_SS(N, "k16", "f32.bf16.bf16", n, ", %" #p3 ", %" #p4, p0, p1, p2, CF_SS,            \
                            "n"(kTransA), "n"(kTransB));                                                     \
        }                                                                                                    \
        template <class T, int kTransB>                                                                      \
        CF_DEVICE static void k16(float (&d)[n], const uint32_t (&a)[4], uint64_t b, int add) {              \
            if constexpr (kSame<T, __half>)                                                                  \
                CF_WGMMA_RS(N, "k16", "f32.f16.f16", n, ", %" #p6, p0, p1, p2, p3, p4, p5, CF_RS,            \
                            "n"(kTransB));                                                                   \
            else                                                                                             \
                CF_WGMMA_RS(N, "k16", "f32.bf16.bf16", n, ", %" #p6, p0, p1, p2, p3, p4, p5, CF_RS,          \
                            "n"(kTransB));                                                                   \
        }                                                                                                    \
        CF_DEVICE static void k32_e4m3(float (&d)[n], uint64_t a, uint64_t b, int add) {                     \
            CF_WGMMA_SS(N, "k32", "f32.e4m3.e4m3", n, "", p0, p1, p2, CF_SS);                                \
        }                                                                                                    \
        CF_DEVICE static void k32_e4m3(float (&d)[n], const uint32_t (&a)[4], uint64_t b, int add) {         \
            CF_WGMMA_RS(N, "k32", "f32.e4m3.e4m3", n, "", p0, p1, p2, p3, p4, p5, CF_RS);                    \
        }                                                                                                    \
    };
CF_WGMMA_SIZE(8, 4, 4, 5, 6, 7, 8, 9, 10, 11)
CF_WGMMA_SIZE(16, 8, 8, 9, 10, 11, 12, 13, 14, 15)
CF_WGMMA_SIZE(24, 12, 12, 13, 14, 15, 16, 17, 18, 19)
CF_WGMMA_SIZE(32, 16, 16, 17, 18, 19, 20, 21, 22, 23)
CF_WGMMA_SIZE(40, 20, 20, 21, 22, 23, 24, 25, 26, 27)
CF_WGMMA_SIZE(48, 24, 24, 25, 26, 27, 28, 29, 30, 31)
CF_WGMMA_SIZE(56, 28, 28, 29, 30, 31, 32, 33, 34, 35)
CF_WGMMA_SIZE(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
CF_WGMMA_SIZE(72, 36, 36, 37, 38, 39, 40, 41, 42, 43)
CF_WGMMA_SIZE(80, 40, 40, 41, 42, 43, 44, 45, 46, 47)
CF_WGMMA_SIZE(88, 44, 44, 45, 46, 47, 48, 49, 50, 51)
CF_WGMMA_SIZE(96, 48, 48, 49, 50, 51, 52, 53, 54, 55)
CF_WGMMA_SIZE(104, 52, 52, 53, 54, 55, 56, 57, 58, 59)
CF_WGMMA_SIZE(112, 56, 56, 57, 58, 59, 60, 61, 62, 63)
CF_WGMMA_SIZE(120, 60, 60, 61, 62, 63, 64, 65, 66, 67)
CF_WGMMA_SIZE(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
CF_WGMMA_SIZE(136, 68, 68, 69, 70, 71, 72, 73, 74, 75)
CF_WGMMA_SIZE(144, 72, 72, 73, 74, 75, 76, 77, 78, 79)
CF_WGMMA_SIZE(152, 76, 76, 77, 78, 79, 80, 81, 82, 83)
CF_WGMMA_SIZE(160, 80, 80, 81, 82, 83, 84, 85, 86, 87)
CF_WGMMA_SIZE(168, 84, 84, 85, 86, 87, 88, 89, 90, 91)
CF_WGMMA_SIZE(176, 88, 88, 89, 90, 91, 92, 93, 94, 95)
CF_WGMMA_SIZE(184, 92, 92, 93, 94, 95, 96, 97, 98, 99)
CF_WGMMA_SIZE(192, 96, 96, 97, 98, 99, 100, 101, 102, 103)
CF_WGMMA_SIZE(200, 100, 100, 101, 102, 103, 104, 105, 106, 107)
CF_WGMMA_SIZE(208, 104, 104, 105, 106, 107, 108, 109, 110, 111)
CF_WGMMA_SIZE(216, 108, 108, 109, 110, 111, 112, 113, 114, 115)
CF_WGMMA_SIZE(224, 112, 112, 113, 114, 115, 116, 117, 118, 119)
CF_WGMMA_SIZE(232, 116, 116, 117, 118, 119, 120, 121, 122, 123)
CF_WGMMA_SIZE(240, 120, 120, 121, 122, 123, 124, 125, 126, 127)
CF_WGMMA_SIZE(248, 124, 124, 125, 126, 127, 128, 129, 130, 131)
CF_WGMMA_SIZE(256, 128, 128, 129, 130, 131, 132, 133, 134, 135)
#undef CF_WGMMA_SIZE
#undef CF_WGMMA_SS
#undef CF_WGMMA_RS
#undef CF_WGMMA

// ---- the products. N = 2 n follows from the accumulators. Without `accumulate` d = a b.

// f16 or bf16, k = 16. kTransA, kTransB: the operand in shared memory is contiguous along m or n, not k.
template <class T, bool kTransA, bool kTransB, int n>
CF_DEVICE void wgmma_m64k16(float (&d)[n], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
    WarpgroupProduct<n>::template k16<T, kTransA, kTransB>(d, a, b, accumulate);
}
template <class T, bool kTransB, int n>
CF_DEVICE void wgmma_m64k16(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
    WarpgroupProduct<n>::template k16<T, kTransB>(d, a, b, accumulate);
}
// e4m3, k = 32: operands in shared memory are contiguous along k.
template <int n> CF_DEVICE void wgmma_m64k32_e4m3(float (&d)[n], uint64_t a, uint64_t b, bool accumulate) {
    WarpgroupProduct<n>::k32_e4m3(d, a, b, accumulate);
}
template <int n> CF_DEVICE void wgmma_m64k32_e4m3(float (&d)[n], const uint32_t (&a)[4], uint64_t b,
                                                  bool accumulate) {
    WarpgroupProduct<n>::k32_e4m3(d, a, b, accumulate);
}

#endif
