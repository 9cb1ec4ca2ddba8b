// One mma of each kind, on registers that the test fills.
#include "prim.cuh"

struct Params {
    const uint32_t *a, *b;    // (32 lanes, 4), (32 lanes, 2)
    float* d;                 // (32 lanes, 4), read and written
    int32_t kind;
};

CF_DEVICE void body(const Params& p) {
    const int lane = threadIdx.x;
    uint32_t a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; i++) a[i] = p.a[lane * 4 + i], d[i] = p.d[lane * 4 + i];
    for (int i = 0; i < 2; i++) b[i] = p.b[lane * 2 + i];
    const uint32_t half[2] = {a[0], a[1]};
    switch (p.kind) {
        case 0: mma_m16n8k8<__half>(d, half, b[0]); break;
        case 1: mma_m16n8k8<__nv_bfloat16>(d, half, b[0]); break;
        case 2: mma_m16n8k16<__half>(d, a, b[0], b[1]); break;
        case 3: mma_m16n8k16<__nv_bfloat16>(d, a, b[0], b[1]); break;
        case 4: mma_m16n8k8_tf32(d, a, b[0], b[1]); break;
        default: mma_m16n8k32_e4m3(d, a, b[0], b[1]);
    }
    for (int i = 0; i < 4; i++) p.d[lane * 4 + i] = d[i];
}
CF_KERNEL(Params, 32, 1, body)
