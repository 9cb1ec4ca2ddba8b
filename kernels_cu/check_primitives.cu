// Runs the primitives of an architecture one at a time, on numbers whose result is known. `cupy-flash check` runs it
// before any attention, see cupy_flash/check/primitives.py.
//
// Grid:   one block.
// Block:  four warps. Thread t takes row t of `given` and writes row t of `found`.
// Shared: `bytes`, for what a primitive stores and loads; the mbarrier of bulk copies.
//
// Assumes: `found` is 0.
#include "prim.cuh"

// ---- Config
#if !defined(CF_CAPABILITY)
#define CF_CAPABILITY 75
#define CF_THREADS 128
#define CF_SHARED_BYTES 11264
#endif
constexpr int kThreads = CF_THREADS, kGiven = 32, kFound = 32;    // words of a row

struct CheckParams {
    TensorMap map;            // of `given`, in boxes of 64 rows; only of sm_90a
    const uint32_t* given;    // (kThreads, kGiven)
    uint32_t* found;          // (kThreads, kFound)
    int32_t primitive;        // its number in cupy_flash/check/primitives.py
};
struct alignas(1024) SharedStorage {
    unsigned char bytes[10240];
    uint64_t bar;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES);

CF_DEVICE const uint32_t* row_of(const CheckParams& p) { return p.given + threadIdx.x * kGiven; }
CF_DEVICE uint32_t given(const CheckParams& p, int i) { return ld_global_nc(row_of(p) + i); }
CF_DEVICE float given_float(const CheckParams& p, int i) { return __uint_as_float(given(p, i)); }
CF_DEVICE double given_double(const CheckParams& p, int i) {
    return ld_global_nc(reinterpret_cast<const double*>(row_of(p)) + i);
}
CF_DEVICE uint4 given_16_bytes(const CheckParams& p, int i) {
    return ld_global_nc(reinterpret_cast<const uint4*>(row_of(p)) + i);
}
CF_DEVICE void find(const CheckParams& p, int i, uint32_t x) {
    st_global(p.found + threadIdx.x * kFound + i, x);
}
CF_DEVICE void find(const CheckParams& p, int i, float x) { find(p, i, __float_as_uint(x)); }
CF_DEVICE void find_double(const CheckParams& p, int i, double x) {
    st_global(reinterpret_cast<double*>(p.found + threadIdx.x * kFound) + i, x);
}
// Words of shared memory, from an address on.
template <int n> CF_DEVICE void find_words(const CheckParams& p, int first, uint32_t addr) {
    CF_UNROLL
    for (int i = 0; i < n; i++) find(p, first + i, ld_shared<uint32_t>(addr + 4 * i));
}
template <int n> CF_DEVICE void find_registers(const CheckParams& p, int first, const uint32_t (&r)[n]) {
    CF_UNROLL
    for (int i = 0; i < n; i++) find(p, first + i, r[i]);
}

// ---- every architecture

CF_DEVICE void functions(const CheckParams& p) {
    find(p, 0, ex2(given_float(p, 0)));
    find(p, 1, rcp(given_float(p, 1)));
}

CF_DEVICE void exchanges(const CheckParams& p) {
    const uint32_t x = given(p, 0), bit = x >> threadIdx.x % 32 & 1;
    find(p, 0, __shfl_xor_sync(~0u, x, 9));
    find(p, 1, __shfl_sync(~0u, x, 5));
    find(p, 2, __ballot_sync(~0u, bit));
    find(p, 3, uint32_t(__any_sync(~0u, threadIdx.x == 37)));
    find(p, 4, uint32_t(__all_sync(~0u, threadIdx.x != 70)));
}

CF_DEVICE void integers(const CheckParams& p) {
    const int64_t wide = int64_t(given(p, 2)) | int64_t(given(p, 3)) << 32;
    const int64_t sum = mad_wide(int32_t(given(p, 0)), int32_t(given(p, 1)), wide);
    find(p, 0, uint32_t(sum));
    find(p, 1, uint32_t(sum >> 32));
    find(p, 2, permute_bytes(given(p, 0), given(p, 1), given(p, 4) & 0x7777u));
}

CF_DEVICE void roundings(const CheckParams& p) {
    find(p, 0, pack<__half>(given_float(p, 0), given_float(p, 1)));
    find(p, 1, pack<__nv_bfloat16>(given_float(p, 0), given_float(p, 1)));
}

CF_DEVICE void barriers(const CheckParams& p, SharedStorage& s) {
    const uint32_t mine = smem_addr(s.bytes + 4 * threadIdx.x);
    st_shared(mine, given(p, 0));
    if (threadIdx.x >= kThreads / 2) {
        bar_arrive(1, kThreads);    // sync: what this half has stored is there for the other one
    } else {
        bar_sync(1, kThreads);    // sync: as above
        find(p, 0, ld_shared<uint32_t>(mine + 2 * kThreads));
    }
    st_shared(mine + 4 * kThreads, ~given(p, 0));
    __syncthreads();    // sync: everything is stored
    find(p, 1, ld_shared<uint32_t>(smem_addr(s.bytes + 4 * (2 * kThreads - 1 - threadIdx.x))));
}

CF_DEVICE void additions(const CheckParams& p) {
    atomicAdd(reinterpret_cast<float*>(p.found) + threadIdx.x % 4, given_float(p, 0));
    atomicAdd(p.found + 4 + threadIdx.x % 4, given(p, 1));
}

// ---- tensor cores of registers

// d += a b, from words 0 to 3, 4 and 5, and 6 to 9 for d.
template <class Multiply> CF_DEVICE void product(const CheckParams& p, Multiply multiply) {
    uint32_t a[4], b[2];
    float d[4];
    CF_UNROLL
    for (int i = 0; i < 4; i++) a[i] = given(p, i), d[i] = given_float(p, 6 + i);
    CF_UNROLL
    for (int i = 0; i < 2; i++) b[i] = given(p, 4 + i);
    multiply(d, a, b);
    CF_UNROLL
    for (int i = 0; i < 4; i++) find(p, i, d[i]);
}
#if CF_CAPABILITY == 120
// The same with scales of a and of b, words 10 and 11.
CF_DEVICE void scaled_product(const CheckParams& p) {
    const uint32_t of_a = given(p, 10), of_b = given(p, 11);
    product(p, [=](float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        mma_m16n8k32_e4m3_scaled(d, a, b[0], b[1], of_a, of_b);
    });
}
#endif
using A = const uint32_t (&)[4];
using B = const uint32_t (&)[2];
using D = float (&)[4];

#if CF_CAPABILITY >= 75
CF_DEVICE void matrix_loads(const CheckParams& p, SharedStorage& s) {
    const uint32_t mine = smem_addr(s.bytes + 16 * threadIdx.x);
    st_shared(mine, given_16_bytes(p, 0));
    __syncwarp();    // sync: rows of other lanes
    uint32_t four[4], two[2];
    ldmatrix_x4(four, mine);
    find_registers(p, 0, four);
    ldmatrix_x4_trans(four, mine);
    find_registers(p, 4, four);
    ldmatrix_x2(two, mine);
    find_registers(p, 8, two);
}
#endif

// ---- sm_80

#if CF_CAPABILITY >= 80
CF_DEVICE void copies(const CheckParams& p, SharedStorage& s) {
    const uint32_t mine = smem_addr(s.bytes + 64 * threadIdx.x);
    cp_async16(mine, row_of(p), threadIdx.x % 3);
    cp_async16_part(mine + 16, row_of(p) + 4, threadIdx.x % 17);
    cp_async_commit();
    cp_async4(mine + 32, row_of(p) + 8, threadIdx.x % 2);
    cp_async4_part(mine + 36, row_of(p) + 9, threadIdx.x % 5);
    cp_async_commit();
    cp_async_wait<1>();    // sync: of its own first group
    find_words<8>(p, 0, mine);
    cp_async_wait<0>();    // sync: of its own second group
    find_words<2>(p, 8, mine + 32);
}
#endif

#if CF_CAPABILITY == 80
CF_DEVICE void doubles(const CheckParams& p) {
    double d0 = given_double(p, 6), d1 = given_double(p, 7);
    mma_m8n8k4_f64(d0, d1, given_double(p, 0), given_double(p, 4));
    find_double(p, 0, d0);
    find_double(p, 1, d1);
}
#endif

// ---- sm_90a

#if CF_CAPABILITY == 90
CF_DEVICE void doubles(const CheckParams& p) {
    double a[4], d[4];
    CF_UNROLL
    for (int i = 0; i < 4; i++) a[i] = given_double(p, i), d[i] = given_double(p, 6 + i);
    mma_m16n8k8_f64(d, a, given_double(p, 4), given_double(p, 5));
    CF_UNROLL
    for (int i = 0; i < 4; i++) find_double(p, i, d[i]);
}

CF_DEVICE void matrix_stores(const CheckParams& p, SharedStorage& s) {
    const uint32_t mine = smem_addr(s.bytes + 16 * threadIdx.x),
                   r[4] = {given(p, 0), given(p, 1), given(p, 2), given(p, 3)};
    stmatrix_x4(mine, r);
    stmatrix_x4_trans(mine + 2048, r);
    __syncwarp();    // sync: rows of other lanes
    find_words<4>(p, 0, mine);
    find_words<4>(p, 4, mine + 2048);
}

constexpr int kLine = 128;    // bytes of a row of a tile, which is as wide as its swizzle
// The address of 16 bytes of a tile in shared memory.
CF_DEVICE uint32_t in_tile(const void* tile, int row, int column) {
    return smem_addr(tile) + row * kLine + ((column ^ row % 8) << 4);
}

// Initialises the barrier for one arrival and this many bytes, and arrives.
CF_DEVICE void expect(SharedStorage& s, int bytes) {
    mbar_init(s.bar, 1);
    mbar_init_fence();
    mbar_arrive_expect_tx(s.bar, bytes);
}

CF_DEVICE void tile_copies(const CheckParams& p, SharedStorage& s) {
    if (threadIdx.x == 0) {
        expect(s, 64 * kLine);
        // why from row 96 of 128 on: what is past the end comes as zeros
        tma_load(s.bytes, p.map, s.bar, 0, 96);
    }
    __syncthreads();        // sync: the barrier is there
    mbar_wait(s.bar, 0);    // sync: so is the tile
    CF_UNROLL
    for (int i = 0; i < 4; i++)
        find_words<4>(p, 4 * i, in_tile(s.bytes, threadIdx.x / 2, threadIdx.x % 2 * 4 + i));
}

CF_DEVICE void bulk_copies(const CheckParams& p, SharedStorage& s) {
    constexpr int kBytes = kThreads * kFound;    // a quarter of `found`
    if (threadIdx.x < 32 && elect_one()) {
        expect(s, 2 * kBytes);
        bulk_load(s.bytes, p.given, 2 * kBytes, s.bar);
        mbar_wait(s.bar, 0);    // sync: all of it is there
        bulk_store(p.found, s.bytes, kBytes);
        CF_UNROLL
        for (int i = 0; i < 2; i++)
            bulk_reduce_add(reinterpret_cast<float*>(p.found) + kBytes / 4, s.bytes + kBytes, kBytes);
        tma_store_commit();
        tma_store_wait<0>();    // sync: written before the block ends
    }
}

// d (64 x 16) = a b over four products along the 128 bytes of a row; a has 64 rows, b 16.
template <class Multiply> CF_DEVICE void warpgroup_product(const CheckParams& p, SharedStorage& s,
                                                           Multiply multiply) {
    const int t = threadIdx.x;
    CF_UNROLL
    for (int i = 0; i < 4; i++) st_shared(in_tile(s.bytes, t / 2, t % 2 * 4 + i), given_16_bytes(p, i));
    st_shared(in_tile(s.bytes + 64 * kLine, t / 8, t % 8), given_16_bytes(p, 4));
    fence_proxy_async();
    __syncthreads();    // sync: both tiles are there
    float d[8] = {};
    const uint32_t a = smem_addr(s.bytes), b = smem_addr(s.bytes + 64 * kLine);
    wgmma_fence_operand(d);
    wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < 4; step++)
        multiply(d, matrix_descriptor(a + 32 * step, 0, 8 * kLine),
                 matrix_descriptor(b + 32 * step, 0, 8 * kLine), step > 0);
    wgmma_commit();
    wgmma_wait<0>();    // sync: d may be read
    wgmma_fence_operand(d);
    CF_UNROLL
    for (int i = 0; i < 8; i++) find(p, i, d[i]);
}
using WD = float (&)[8];

// d (64 x 64) = a b of halves, a in registers, b (16 x 64) as V is: a row for each k.
CF_DEVICE void product_of_registers(const CheckParams& p, SharedStorage& s) {
    const int t = threadIdx.x;
    const uint32_t a[4] = {given(p, 0), given(p, 1), given(p, 2), given(p, 3)};
    st_shared(in_tile(s.bytes, t / 8, t % 8), given_16_bytes(p, 4));
    fence_proxy_async();
    __syncthreads();    // sync: the tile is there
    float d[32];
    wgmma_fence_operand(d);
    wgmma_fence();
    wgmma_m64k16<__half, true>(d, a, matrix_descriptor(smem_addr(s.bytes), 0, 8 * kLine), false);
    wgmma_commit();
    wgmma_wait<0>();    // sync: d may be read
    wgmma_fence_operand(d);
    CF_UNROLL
    for (int i = 0; i < 32; i++) find(p, i, d[i]);
}
#endif

CF_DEVICE void check_primitive(const CheckParams& p) {
    auto& s = shared_memory<SharedStorage>();
    switch (p.primitive) {
        case 0: functions(p); break;
        case 1: exchanges(p); break;
        case 2: integers(p); break;
        case 3: roundings(p); break;
        case 4: barriers(p, s); break;
        case 5: additions(p); break;
#if CF_CAPABILITY >= 75
        case 6: matrix_loads(p, s); break;
        case 7: product(p, [](D d, A a, B b) { mma_m16n8k8<__half>(d, {a[0], a[1]}, b[0]); }); break;
#endif
#if CF_CAPABILITY >= 80
        case 8: copies(p, s); break;
        case 9: product(p, [](D d, A a, B b) { mma_m16n8k16<__half>(d, a, b[0], b[1]); }); break;
        case 10: product(p, [](D d, A a, B b) { mma_m16n8k16<__nv_bfloat16>(d, a, b[0], b[1]); }); break;
        case 11: find(p, 0, to_tf32(given_float(p, 0))); break;
        case 12: product(p, [](D d, A a, B b) { mma_m16n8k8_tf32(d, a, b[0], b[1]); }); break;
#endif
#if CF_CAPABILITY == 80 || CF_CAPABILITY == 90
        case 13: doubles(p); break;
#endif
#if CF_CAPABILITY == 89 || CF_CAPABILITY == 90 || CF_CAPABILITY == 120
        case 14: find(p, 0, uint32_t(pack_e4m3(given_float(p, 0), given_float(p, 1)))); break;
#endif
#if CF_CAPABILITY == 89 || CF_CAPABILITY == 120
        case 15: product(p, [](D d, A a, B b) { mma_m16n8k32_e4m3(d, a, b[0], b[1]); }); break;
#endif
#if CF_CAPABILITY == 90
        case 16: matrix_stores(p, s); break;
        case 17: tile_copies(p, s); break;
        case 18: bulk_copies(p, s); break;
        case 19:
            warpgroup_product(p, s, [](WD d, uint64_t a, uint64_t b, bool add) {
                wgmma_m64k16<__half, false, false>(d, a, b, add);
            });
            break;
        case 20:
            warpgroup_product(p, s, [](WD d, uint64_t a, uint64_t b, bool add) {
                wgmma_m64k16<__nv_bfloat16, false, false>(d, a, b, add);
            });
            break;
        case 21:
            warpgroup_product(
                p, s, [](WD d, uint64_t a, uint64_t b, bool add) { wgmma_m64k32_e4m3(d, a, b, add); });
            break;
        case 22: product_of_registers(p, s); break;
#endif
#if CF_CAPABILITY == 120
        case 23: scaled_product(p); break;
#endif
    }
}
CF_KERNEL(CheckParams, kThreads, 1, check_primitive)
