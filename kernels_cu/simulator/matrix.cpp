// Matrix instructions of a warp.
#include "../include/prim.cuh"
#include "core.h"
#include <cmath>

namespace sim {

namespace {

struct MatrixArgs {
    uint32_t* r;
    uint32_t addr;
};
using Lanes = MatrixArgs* (&)[32];
using Matrix = uint16_t[8][8];

template <class F> void move_matrices(int matrices, uint32_t* r, uint32_t addr, bool load, Site site,
                                      const char* name, F f) {
    MatrixArgs args{r, addr};
    if (me().id % 32 < matrices * 8) {
        auto* row = at(addr, 16, 16, site);
        load ? reads(row, 16) : writes(row, 16);
    }
    collective<32>(args, site, name, [&](Lanes all) {
        for (int j = 0; j < matrices; j++) {
            f(all, j);
            if (!block.counting) continue;
            uint32_t rows[8];
            for (int i = 0; i < 8; i++) rows[i] = all[j * 8 + i]->addr;
            (load ? cost.matrix_loads : cost.matrix_stores)++;
            (load ? cost.matrix_load_cycles : cost.matrix_store_cycles) += uint64_t(cycles_of_rows(rows));
        }
    });
}

// d[m][n] += a[m][k] * b[k][n]
template <int M, int K, int N, class D, class A> void multiply(D (&d)[M][N], const A (&a)[M][K],
                                                               const A (&b)[K][N]) {
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++)
            for (int n = 0; n < N; n++) d[m][n] += a[m][k] * b[k][n];
}

// Byte `i` of a register as a scale: 2^(byte - 127), 255 is NaN.
float ue8m0(uint32_t held, int i) {
    const int byte = held >> 8 * i & 255;
    return byte == 127 ? 1 : byte == 255 ? NAN : ldexpf(1, byte - 127);
}

// unpack(register, i) gives the i-th element along k of a register that holds kPack of them.
template <int K, int kPack, class D, class F>
void multiply_fragments(D (&d)[4], const uint32_t* a, int a_registers, const uint32_t* b, Site site,
                        const char* name, F unpack, const Scales* scales = nullptr) {
    struct Args {
        D* d;
        const uint32_t *a, *b;
        const Scales* scales;
    } args{d, a, b, scales};
    collective<32>(args, site, name, [&](Args*(&all)[32]) {
        using Value = decltype(unpack(0u, 0));
        Value A[16][K], B[K][8];
        D C[16][8];
        for (int t = 0; t < 32; t++) {
            int g = t / 4, k0 = t % 4 * kPack, c = t % 4 * 2;
            for (int i = 0; i < a_registers; i++)
                for (int e = 0; e < kPack; e++)
                    A[g + i % 2 * 8][k0 + i / 2 * 4 * kPack + e] = unpack(all[t]->a[i], e);
            for (int i = 0; i < a_registers / 2; i++)
                for (int e = 0; e < kPack; e++) B[k0 + i * 4 * kPack + e][g] = unpack(all[t]->b[i], e);
            for (int i = 0; i < 4; i++) C[g + i / 2 * 8][c + i % 2] = all[t]->d[i];
        }
        if (scales) {
            const Scales& at = *scales;
            // why not by 1: kernels have no other scale, and these loops would take as long as the product.
            for (int row = 0; row < 16; row++) {
                const float f = ue8m0(all[4 * (row % 8) + 2 * at.thread_a + row / 8]->scales->a, at.byte_a);
                if (f != 1)
                    for (Value& x : A[row]) x *= f;
            }
            for (int column = 0; column < 8; column++) {
                const float f = ue8m0(all[4 * column + at.thread_b]->scales->b, at.byte_b);
                if (f != 1)
                    for (auto& row : B) row[column] *= f;
            }
        }
        multiply(C, A, B);
        for (int t = 0; t < 32; t++)
            for (int i = 0; i < 4; i++) all[t]->d[i] = C[t / 4 + i / 2 * 8][t % 4 * 2 + i % 2];
        count(&Cost::mma_flops, 2 * 16 * 8 * K);
    });
}

}    // namespace

void ldmatrix(uint32_t* r, int matrices, bool trans, uint32_t addr, Site site, const char* name) {
    move_matrices(matrices, r, addr, true, site, name, [&](Lanes all, int j) {
        Matrix m;
        for (int row = 0; row < 8; row++) memcpy(m[row], at(all[j * 8 + row]->addr, 16, 16, site), 16);
        for (int t = 0; t < 32; t++) {
            int g = t / 4, c = t % 4 * 2;
            all[t]->r[j] =
                trans ? m[c][g] | uint32_t(m[c + 1][g]) << 16 : m[g][c] | uint32_t(m[g][c + 1]) << 16;
        }
    });
}
void stmatrix(uint32_t addr, const uint32_t* r, int matrices, bool trans, Site site, const char* name) {
    if (me().id % 32 < matrices * 8) mark_written(at(addr, 16, 16, site), 16);
    move_matrices(matrices, const_cast<uint32_t*>(r), addr, false, site, name, [&](Lanes all, int j) {
        Matrix m;
        for (int t = 0; t < 32; t++) {
            int g = t / 4, c = t % 4 * 2;
            (trans ? m[c][g] : m[g][c]) = uint16_t(all[t]->r[j]);
            (trans ? m[c + 1][g] : m[g][c + 1]) = uint16_t(all[t]->r[j] >> 16);
        }
        for (int row = 0; row < 8; row++) memcpy(at(all[j * 8 + row]->addr, 16, 16, site), m[row], 16);
    });
}

void mma(float (&d)[4], const uint32_t* a, int a_registers, const uint32_t* b, Format format, Site site,
         const char* name) {
    const auto of_halves = [](const float* values) {
        return [values](uint32_t r, int i) { return values[r >> 16 * i & 0xffff]; };
    };
    if (format == Format::tf32)
        multiply_fragments<8, 1>(d, a, 4, b, site, name, [](uint32_t r, int) { return as_tf32(r); });
    else if (format == Format::e4m3)
        multiply_fragments<32, 4>(d, a, 4, b, site, name,
                                  [](uint32_t r, int i) { return e4m3_values[r >> 8 * i & 255]; });
    else {
        const auto unpack = of_halves(format == Format::f16 ? f16_values : bf16_values);
        if (a_registers == 2) multiply_fragments<8, 2>(d, a, 2, b, site, name, unpack);
        else multiply_fragments<16, 2>(d, a, 4, b, site, name, unpack);
    }
}
void mma_scaled(float (&d)[4], const uint32_t* a, const uint32_t* b, const Scales& scales, Site site) {
    const auto unpack = [](uint32_t r, int i) { return e4m3_values[r >> 8 * i & 255]; };
    multiply_fragments<32, 4>(d, a, 4, b, site, "mma.m16n8k32.e4m3.block_scale", unpack, &scales);
}
void mma_f64(double* d, const double* a, const double* b, int halves, Site site, const char* name) {
    struct Args {
        double* d;
        const double *a, *b;
    } args{d, a, b};
    collective<32>(args, site, name, [&](Args*(&all)[32]) {
        double A[16][8] = {}, B[8][8] = {}, C[16][8] = {};
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int k = 0; k < halves; k++) {
                B[t + 4 * k][g] = all[lane]->b[k];
                for (int m = 0; m < halves; m++) A[g + 8 * m][t + 4 * k] = all[lane]->a[m + 2 * k];
            }
            for (int i = 0; i < 2 * halves; i++) C[g + i / 2 * 8][2 * t + i % 2] = all[lane]->d[i];
        }
        multiply(C, A, B);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2 * halves; i++)
                all[lane]->d[i] = C[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        count(&Cost::mma_flops, uint64_t(2 * 8 * 8 * 4) * halves * halves);
    });
}

}    // namespace sim
