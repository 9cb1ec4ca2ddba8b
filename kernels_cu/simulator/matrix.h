// The host side of the matrix instructions in prim/warp.cuh.
#pragma once

namespace sim {

struct MatrixArgs {
    uint32_t* r;
    uint32_t addr;
};
using Matrix = uint16_t[8][8];

template <int kMatrices, class F> void move_matrices(uint32_t* r, uint32_t addr, bool load, Site site,
                                                     const char* name, F f) {
    MatrixArgs args{r, addr};
    if (me().id % 32 < kMatrices * 8) {
        auto* row = at(addr, 16, 16, site);
        load ? reads(row, 16) : writes(row, 16);
    }
    collective<32>(args, site, name, [&](MatrixArgs*(&all)[32]) {
        for (int j = 0; j < kMatrices; j++) {
            f(all, j);
            if (!block.counting) continue;
            uint32_t rows[8];
            for (int i = 0; i < 8; i++) rows[i] = all[j * 8 + i]->addr;
            (load ? cost.matrix_loads : cost.matrix_stores)++;
            (load ? cost.matrix_load_cycles : cost.matrix_store_cycles) += uint64_t(cycles_of_rows(rows));
        }
    });
}
template <bool kTrans, int n> void ldmatrix(uint32_t (&r)[n], uint32_t addr, Site site, const char* name) {
    move_matrices<n>(r, addr, true, site, name, [&](MatrixArgs*(&all)[32], int j) {
        Matrix m;
        for (int row = 0; row < 8; row++) memcpy(m[row], at(all[j * 8 + row]->addr, 16, 16, site), 16);
        for (int t = 0; t < 32; t++) {
            int g = t / 4, c = t % 4 * 2;
            all[t]->r[j] =
                kTrans ? m[c][g] | uint32_t(m[c + 1][g]) << 16 : m[g][c] | uint32_t(m[g][c + 1]) << 16;
        }
    });
}
template <bool kTrans, int n> void stmatrix(uint32_t addr, const uint32_t (&r)[n], Site site,
                                            const char* name) {
    if (me().id % 32 < n * 8) mark_written(at(addr, 16, 16, site), 16);
    move_matrices<n>(const_cast<uint32_t*>(r), addr, false, site, name, [&](MatrixArgs*(&all)[32], int j) {
        Matrix m;
        for (int t = 0; t < 32; t++) {
            int g = t / 4, c = t % 4 * 2;
            (kTrans ? m[c][g] : m[g][c]) = uint16_t(all[t]->r[j]);
            (kTrans ? m[c + 1][g] : m[g][c + 1]) = uint16_t(all[t]->r[j] >> 16);
        }
        for (int row = 0; row < 8; row++) memcpy(at(all[j * 8 + row]->addr, 16, 16, site), m[row], 16);
    });
}

// The m16n8 products. unpack(register, i) gives the i-th element along k of a register that holds kPack of
// them.
template <int K, int kPack, class D, class F>
void mma(D (&d)[4], const uint32_t* a, int a_registers, const uint32_t* b, Site site, const char* name,
         F unpack) {
    struct Args {
        D* d;
        const uint32_t *a, *b;
    } args{d, a, b};
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
        multiply(C, A, B);
        for (int t = 0; t < 32; t++)
            for (int i = 0; i < 4; i++) all[t]->d[i] = C[t / 4 + i / 2 * 8][t % 4 * 2 + i % 2];
        count(&Cost::mma_flops, 2 * 16 * 8 * K);
    });
}
template <class T> float half_of(uint32_t r, int i) { return i ? high<T>(r) : low<T>(r); }

}    // namespace sim

inline void ldmatrix_x1(uint32_t (&r)[1], uint32_t addr, SIM_SITE) {
    sim::ldmatrix<false>(r, addr, site, "ldmatrix.x1");
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr, SIM_SITE) {
    sim::ldmatrix<false>(r, addr, site, "ldmatrix.x2");
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr, SIM_SITE) {
    sim::ldmatrix<false>(r, addr, site, "ldmatrix.x4");
}
inline void ldmatrix_x1_trans(uint32_t (&r)[1], uint32_t addr, SIM_SITE) {
    sim::ldmatrix<true>(r, addr, site, "ldmatrix.x1.trans");
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr, SIM_SITE) {
    sim::ldmatrix<true>(r, addr, site, "ldmatrix.x2.trans");
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr, SIM_SITE) {
    sim::ldmatrix<true>(r, addr, site, "ldmatrix.x4.trans");
}
inline void stmatrix_x1(uint32_t addr, const uint32_t (&r)[1], SIM_SITE) {
    sim::stmatrix<false>(addr, r, site, "stmatrix.x1");
}
inline void stmatrix_x2(uint32_t addr, const uint32_t (&r)[2], SIM_SITE) {
    sim::stmatrix<false>(addr, r, site, "stmatrix.x2");
}
inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4], SIM_SITE) {
    sim::stmatrix<false>(addr, r, site, "stmatrix.x4");
}
inline void stmatrix_x1_trans(uint32_t addr, const uint32_t (&r)[1], SIM_SITE) {
    sim::stmatrix<true>(addr, r, site, "stmatrix.x1.trans");
}
inline void stmatrix_x2_trans(uint32_t addr, const uint32_t (&r)[2], SIM_SITE) {
    sim::stmatrix<true>(addr, r, site, "stmatrix.x2.trans");
}
inline void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4], SIM_SITE) {
    sim::stmatrix<true>(addr, r, site, "stmatrix.x4.trans");
}

template <class T> void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b0, SIM_SITE) {
    sim::mma<8, 2>(d, a, 2, &b0, site, "mma.m16n8k8",
                   [](uint32_t r, int i) { return sim::half_of<T>(r, i); });
}
template <class T> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                     SIM_SITE) {
    uint32_t b[2] = {b0, b1};
    sim::mma<16, 2>(d, a, 4, b, site, "mma.m16n8k16",
                    [](uint32_t r, int i) { return sim::half_of<T>(r, i); });
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIM_SITE) {
    uint32_t b[2] = {b0, b1};
    sim::mma<8, 1>(d, a, 4, b, site, "mma.m16n8k8.tf32", [](uint32_t r, int) { return sim::as_tf32(r); });
}
inline void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIM_SITE) {
    uint32_t b[2] = {b0, b1};
    sim::mma<32, 4>(d, a, 4, b, site, "mma.m16n8k32.s8",
                    [](uint32_t r, int i) { return int(int8_t(r >> 8 * i)); });
}
inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIM_SITE) {
    uint32_t b[2] = {b0, b1};
    sim::mma<32, 4>(d, a, 4, b, site, "mma.m16n8k32.e4m3",
                    [](uint32_t r, int i) { return sim::e4m3_values[r >> 8 * i & 255]; });
}
