// One mma of doubles of each kind, on registers that the test fills.
#include "prim.cuh"

struct Params {
    const double *a, *b;    // (32 lanes, 4), (32 lanes, 2)
    double* d;              // (32 lanes, 4), read and written
    int32_t kind;
};

CF_DEVICE void body(const Params& p) {
    const int lane = threadIdx.x;
    double a[4], b[2], d[4];
    for (int i = 0; i < 4; i++) a[i] = p.a[lane * 4 + i], d[i] = p.d[lane * 4 + i];
    for (int i = 0; i < 2; i++) b[i] = p.b[lane * 2 + i];
    if (p.kind == 0) mma_m8n8k4_f64(d[0], d[1], a[0], b[0]);
    else mma_m16n8k8_f64(d, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) p.d[lane * 4 + i] = d[i];
}
CF_KERNEL(Params, 32, 1, body)
