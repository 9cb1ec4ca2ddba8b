// A warp loads four 8 x 8 matrices of 16-bit elements with ldmatrix and stores registers with stmatrix.
#include "prim.cuh"

struct Params {
    const uint32_t* in;    // (4 matrices, 8 rows, 4 words), then registers (32 lanes, 4)
    uint32_t* out;         // registers of each form (32 lanes, 4), then matrices as stmatrix leaves them
};
struct SharedStorage {
    uint32_t in[128], out[6][128];
};

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const int lane = threadIdx.x;
    for (int i = lane; i < 128; i += 32) s.in[i] = p.in[i];
    for (int i = lane; i < 6 * 128; i += 32) s.out[i / 128][i % 128] = 0;
    __syncwarp();
    const uint32_t row = smem_addr(&s.in[lane * 4]);
    uint32_t one[1], two[2], four[4];
    uint32_t* out = p.out + lane * 4;
    auto put = [&](const uint32_t* r, int n) {
        for (int i = 0; i < 4; i++) out[i] = i < n ? r[i] : 0;
        out += 128;
    };
    ldmatrix_x1(one, row), put(one, 1);
    ldmatrix_x2(two, row), put(two, 2);
    ldmatrix_x4(four, row), put(four, 4);
    ldmatrix_x1_trans(one, row), put(one, 1);
    ldmatrix_x2_trans(two, row), put(two, 2);
    ldmatrix_x4_trans(four, row), put(four, 4);
    const uint32_t* r = p.in + 128 + lane * 4;
    one[0] = r[0];
    for (int i = 0; i < 2; i++) two[i] = r[i];
    for (int i = 0; i < 4; i++) four[i] = r[i];
    stmatrix_x1(smem_addr(&s.out[0][lane * 4]), one);
    stmatrix_x2(smem_addr(&s.out[1][lane * 4]), two);
    stmatrix_x4(smem_addr(&s.out[2][lane * 4]), four);
    stmatrix_x1_trans(smem_addr(&s.out[3][lane * 4]), one);
    stmatrix_x2_trans(smem_addr(&s.out[4][lane * 4]), two);
    stmatrix_x4_trans(smem_addr(&s.out[5][lane * 4]), four);
    __syncwarp();
    for (int j = 0; j < 6; j++)
        for (int i = lane; i < 128; i += 32) p.out[(6 + j) * 128 + i] = s.out[j][i];
}
CF_KERNEL(Params, 32, 1, body)
