// mma of 8-bit floats with scales, on registers that the test fills.
#include "prim.cuh"

struct Params {
    const uint32_t *a, *b;                // (32 lanes, 4), (32 lanes, 2)
    const uint32_t *scale_a, *scale_b;    // (32 lanes)
    float* d;                             // (32 lanes, 4), read and written
    int32_t kind;
};

CF_DEVICE void body(const Params& p) {
    const int lane = threadIdx.x;
    uint32_t a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; i++) a[i] = p.a[lane * 4 + i], d[i] = p.d[lane * 4 + i];
    for (int i = 0; i < 2; i++) b[i] = p.b[lane * 2 + i];
    const uint32_t of_a = p.scale_a[lane], of_b = p.scale_b[lane];
    if (p.kind == 0) mma_m16n8k32_e4m3_scaled(d, a, b[0], b[1], of_a, of_b);
    else mma_m16n8k32_e4m3_scaled<2, 1>(d, a, b[0], b[1], of_a, of_b);
    for (int i = 0; i < 4; i++) p.d[lane * 4 + i] = d[i];
}
CF_KERNEL(Params, 32, 1, body)
