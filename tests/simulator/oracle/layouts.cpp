// Prints, as JSON, where CuTe (CUTLASS's headers, an independent description of the hardware) says that
// elements of fragments and of shared memory tiles are. tests/simulator/layouts.json holds the output; the
// tests feed the simulated instructions by it.
#include <cute/atom/mma_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm120.hpp>
#include <cute/atom/mma_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cstdio>
using namespace cute;

// For each thread and value: row + rows * column.
template <class Layout> void fragment(const char* name, Layout layout, int threads, const char* end = ",\n") {
    int values = int(size(layout)) / threads;
    printf("  \"%s\": [", name);
    for (int t = 0; t < threads; t++)
        for (int v = 0; v < values; v++) printf("%s%d", t + v ? "," : "", int(layout(t, v)));
    printf("]%s", end);
}
template <class Op> void mma(const char* name) {
    using T = MMA_Traits<Op>;
    char text[80];
    snprintf(text, sizeof text, "%s a", name), fragment(text, typename T::ALayout{}, 32);
    snprintf(text, sizeof text, "%s b", name), fragment(text, typename T::BLayout{}, 32);
    snprintf(text, sizeof text, "%s c", name), fragment(text, typename T::CLayout{}, 32);
}
// For each thread: the row or column whose scale it holds; which of the threads count, the instruction says.
template <class Layout> void scales(const char* name, Layout layout) {
    fragment(name, make_layout(get<0>(layout), cute::Layout<_1, _0>{}), 32);
}
// For each (i, k) of a tile: the byte offset.
template <int kBits, int kBytes, class Layout> void tile(const char* name, Layout layout,
                                                         const char* end = ",\n") {
    auto plain = layout.layout_b();
    int m = int(size<0>(plain)), n = int(size<1>(plain));
    printf("  \"%s\": [", name);
    for (int i = 0; i < m; i++)
        for (int k = 0; k < n; k++)
            printf("%s%d", i + k ? "," : "", int(Swizzle<kBits, 4, 3>{}(int(plain(i, k)) * kBytes)));
    printf("]%s", end);
}

int main() {
    printf("{\n");
    mma<SM75_16x8x8_F32F16F16F32_TN>("m16n8k8");
    mma<SM80_16x8x16_F32F16F16F32_TN>("m16n8k16");
    mma<SM80_16x8x8_F32TF32TF32F32_TN>("m16n8k8 tf32");
    mma<SM80_16x8x32_S32S8S8S32_TN>("m16n8k32 s8");
    mma<SM89_16x8x32_F32E4M3E4M3F32_TN>("m16n8k32 e4m3");
    using Scaled = MMA_Traits<SM120::BLOCKSCALED::SM120_16x8x32_TN_VS<float_e4m3_t, float_e4m3_t, float,
                                                                      float_ue8m0_t, 32>>;
    scales("m16n8k32 e4m3 scale of a", Scaled::SFALayout{});
    scales("m16n8k32 e4m3 scale of b", Scaled::SFBLayout{});
    mma<SM80_8x8x4_F64F64F64F64_TN>("m8n8k4 f64");
    mma<SM90_16x8x8_F64F64F64F64_TN>("m16n8k8 f64");
    using namespace SM90;
    fragment("m64k16 a", GMMA::ALayout_64x16{}, 128);
    fragment("m64k8 tf32 a", GMMA::ALayout_64x8{}, 128);
    fragment("m64k32 e4m3 a", GMMA::ALayout_64x32{}, 128);
    fragment("m64n24 c", GMMA::CLayout_64xN<24>{}, 128);
    fragment("m64n40 c", GMMA::CLayout_64xN<40>{}, 128);
    tile<3, 2>("k 128", tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_16, _64>{}));
    tile<2, 2>("k 64", tile_to_shape(GMMA::Layout_K_SW64_Atom<half_t>{}, Shape<_16, _32>{}));
    tile<1, 2>("k 32", tile_to_shape(GMMA::Layout_K_SW32_Atom<half_t>{}, Shape<_16, _16>{}));
    tile<3, 2>("mn 128", tile_to_shape(GMMA::Layout_MN_SW128_Atom<half_t>{}, Shape<_128, _16>{}));
    tile<2, 2>("mn 64", tile_to_shape(GMMA::Layout_MN_SW64_Atom<half_t>{}, Shape<_64, _16>{}));
    tile<1, 2>("mn 32", tile_to_shape(GMMA::Layout_MN_SW32_Atom<half_t>{}, Shape<_32, _16>{}), "\n");
    printf("}\n");
}
