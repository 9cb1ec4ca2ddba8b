// Warpgroup matrix products: asynchronous, their accumulators and register operands out of bounds until the
// wait.
#include "../include/prim.cuh"
#include "core.h"

namespace sim {

// A matrix operand in shared memory.
class Tile {
  public:
    Tile(uint64_t descriptor, int element_bytes, bool trans, Site site)
        : start(uint32_t(descriptor & 0x3fff) << 4), leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
          stride(uint32_t(descriptor >> 32 & 0x3fff) << 4), bits(uint32_t(4 - (descriptor >> 62)) % 4),
          bytes(uint32_t(element_bytes)), contiguous_mn(trans) {
        if (trans && bits == 0)
            fail("wgmma at %s:%d: columns without swizzle are not simulated", site.file, site.line);
    }
    // Of element (i, k), i along m or n. In rows of `width` bytes, swizzled in patterns of 8 rows, canonical
    //   layouts are k contiguous: row i, 8 rows `stride` apart; i contiguous: row k, 8 rows `stride` apart,
    //   `leading` to the next width of i. Without swizzle rows are 16 bytes, and k goes on `leading` further.
    uint32_t address(uint32_t i, uint32_t k) const {
        uint32_t width = 16u << bits, per_row = width / bytes;
        uint32_t a = contiguous_mn ? start + i / per_row * leading + i % per_row * bytes + k / 8 * stride +
                                         k % 8 * width
                                   : start + i / 8 * stride + i % 8 * width +
                                         (bits ? k * bytes : k * bytes / 16 * leading + k * bytes % 16);
        return a ^ (a >> 7 & ((1u << bits) - 1)) << 4;
    }

  private:
    uint32_t start, leading, stride, bits, bytes;
    bool contiguous_mn;
};

namespace {

struct Shape {
    int k, pack, bytes;    // depth; elements in a register; bytes of an element
};
Shape shape_of(Format f) {
    if (f == Format::e4m3) return {32, 4, 1};
    return {16, 2, 2};
}
float value(Format f, uint32_t r, int i) {
    if (f == Format::e4m3) return e4m3_values[r >> 8 * i & 255];
    uint32_t bits = r >> 16 * i & 0xffff;
    return (f == Format::f16 ? f16_values : bf16_values)[bits];
}

struct Registers {
    float* d[128];
    const uint32_t* a[128];
};

// Fills x[row][column] of `rows` x k (k_first: of k x rows) from shared memory.
void read_operand(float* x, const Tile& tile, const Wgmma& w, int rows, bool k_first, Site site) {
    Shape s = shape_of(w.format);
    for (int k = 0; k < s.k; k++)
        for (int i = 0; i < rows; i++) {
            uint32_t addr = tile.address(uint32_t(i), uint32_t(k)), r = 0;
            auto* p = shared + addr;
            if (addr + uint32_t(s.bytes) > block.shared_bytes)
                fail("wgmma at %s:%d reads shared address %zu, past the end (%zu)", site.file, site.line,
                     size_t(addr), block.shared_bytes);
            if (block.dirty[addr / 16]) check_clean(p, 1, "wgmma", site);
            memcpy(&r, p, size_t(s.bytes));
            (k_first ? x[k * rows + i] : x[i * s.k + k]) = value(w.format, r, 0);
        }
}
void read_registers(float* x, const Registers& r, Format f) {
    Shape s = shape_of(f);
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < s.pack; e++) {
                int row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, k = t % 4 * s.pack + i / 2 * 4 * s.pack + e;
                x[row * s.k + k] = value(f, r.a[t][i], e);
            }
}

void complete(const Wgmma& w, const Registers& r, Site site) {
    static float A[64 * 32], B[32 * 256], D[64 * 256];
    Shape s = shape_of(w.format);
    int n = w.n, per_thread = n / 2;
    read_operand(B, Tile(w.desc_b, s.bytes, w.trans_b, site), w, n, true, site);
    if (w.a) read_registers(A, r, w.format);
    else read_operand(A, Tile(w.desc_a, s.bytes, w.trans_a, site), w, 64, false, site);
    Shadow& shadow = (*block.shadows)[r.d[0]];
    auto place = [&](int t, int i) {
        return (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + t % 4 * 2 + i % 2;
    };
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < per_thread; i++)
            D[place(t, i)] = w.accumulate ? shadow.d[size_t(t * per_thread + i)] : 0.f;
    multiply_add(D, A, B, 64, s.k, n);
    bool last = --shadow.users == 0;
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < per_thread; i++) {
            shadow.d[size_t(t * per_thread + i)] = D[place(t, i)];
            if (last) r.d[t][i] = D[place(t, i)];
        }
    if (last) block.shadows->erase(r.d[0]);
}

// What ThreadSanitizer learns that a product reads, 16 bytes at a time.
void announce_reads(const Tile& tile, int rows, int depth, int element_bytes, bool trans) {
    int step = 16 / element_bytes;
    for (int i = 0; i < rows; i += trans ? step : 1)
        for (int k = 0; k < depth; k += trans ? 1 : step)
            reads(shared + tile.address(uint32_t(i), uint32_t(k)), 16);
}

void issue_product(const Wgmma& w, Wgmma* (&all)[128], Site site) {
    Group& g = my_group();
    Registers r;
    for (int t = 0; t < 128; t++) {
        r.d[t] = all[t]->d, r.a[t] = all[t]->a;
        if (all[t]->desc_b != w.desc_b || all[t]->desc_a != w.desc_a || all[t]->accumulate != w.accumulate)
            fail("wgmma operands differ within the warpgroup at %s:%d", site.file, site.line);
    }
    if (!g.fenced) fail("wgmma at %s:%d without wgmma_fence since the last wait", site.file, site.line);
    Shape s = shape_of(w.format);
    Tile tile_b(w.desc_b, s.bytes, w.trans_b, site);
    size_t per_thread = size_t(w.n / 2);
    Shadow& shadow = (*block.shadows)[r.d[0]];
    if (shadow.users++ == 0) {
        shadow.d.resize(128 * per_thread);
        for (size_t t = 0; t < 128; t++)
            memcpy(&shadow.d[t * per_thread], r.d[t], per_thread * sizeof(float));
    }
    count(&Cost::mma_flops, 2u * 64 * uint64_t(w.n) * uint64_t(s.k));
    count(&Cost::product_bytes, uint64_t(w.n + (w.a ? 0 : 64)) * uint64_t(s.k * s.bytes));
    as_agent(g.agent, &g.products, [&] {
        announce_reads(tile_b, w.n, s.k, s.bytes, w.trans_b);
        if (!w.a) announce_reads(Tile(w.desc_a, s.bytes, w.trans_a, site), 64, s.k, s.bytes, w.trans_a);
    });
    g.products.add(issue(
        [&] {
            for (int t = 0; t < 128; t++) memset(r.d[t], 0xff, per_thread * sizeof(float));
        },
        [=] { complete(w, r, site); }, &g.products));
}

}    // namespace

void wgmma(Wgmma args, Site site) {
    release(&my_group().agent);
    collective<128>(args, site, "wgmma", [&](Wgmma*(&all)[128]) { issue_product(args, all, site); });
}
void wgmma_fence(Site site) {
    Nothing none;
    collective<128>(none, site, "wgmma.fence", [](auto&) { my_group().fenced = true; });
}
void wgmma_commit(Site site) {
    Nothing none;
    collective<128>(none, site, "wgmma.commit", [](auto&) { my_group().products.open_group++; });
}
void wgmma_wait(int newest_left, Site site) {
    Nothing none;
    collective<128>(none, site, "wgmma.wait", [](auto&) { my_group().fenced = false; });
    wait(my_group().products, size_t(newest_left), site, "wgmma.wait_group $a");
}

}    // namespace sim
