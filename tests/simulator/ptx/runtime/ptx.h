// What a translated kernel includes: arithmetic in line, and the declarations of everything that is compiled once, into a
// library, and calls the simulator.
// why not the simulator's headers: they cost more than a second of every kernel.
#pragma once
#include <vector_types.h>
#include "arithmetic.h"

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace ptx {

// Where an instruction stands. Lanes of a warp meet at the same one.
struct Site {
    const char* file;
    int line;
};

// ---- numbers.cpp: the narrow formats, and the special functions of the simulator
float from_f16(u16 x);
float from_bf16(u16 x);
template <class From> u16 to_f16(From x);    // of float and double
template <class From> u16 to_bf16(From x);
u16 to_e4m3x2(float high, float low);
u32 to_tf32(float x);
float ex2_ftz(float x);

// ---- memory.cpp. Addresses: generic and global ones are those of the host, all others offsets, so that PTX which
// forgets a cvta crashes.
enum class Space { generic, global, shared };
template <class T, int n> struct Vector {
    T x[n];
};
// T: an unsigned integer, or a Vector of two or four.
template <class T> T load(Space space, u64 address, Site site);
template <class T> void store(Space space, u64 address, T x, Site site);
u64 generic_of_shared(u64 offset);
u64 shared_of_generic(u64 address);

template <int n> struct alignas(64) Params {
    u8 bytes[n];
    template <class T> T at(u64 offset) const {
        T x;
        if (offset % sizeof x || offset + sizeof x > n)
            __builtin_trap();    // no variant does so, whatever its data
        memcpy(&x, bytes + offset, sizeof x);
        return x;
    }
};
template <class T> T load_local(const u8* local, u64 offset) {
    T x;
    memcpy(&x, local + offset, sizeof x);
    return x;
}
template <class T> void store_local(u8* local, u64 offset, T x) { memcpy(local + offset, &x, sizeof x); }

// atom and red: of u32, s32, u64, float and double as far as PTX has them. The value before.
template <class T> T atomic_add(Space space, u64 address, T x, Site site);
template <class T> T atomic_max(Space space, u64 address, T x, Site site);
template <class T> T atomic_min(Space space, u64 address, T x, Site site);
template <class T> T atomic_exchange(Space space, u64 address, T x, Site site);
void release_turn(u64 address, Site site);    // red.release.gpu.add of 1
void poll(Site site);                         // a branch back to a load that acquires: other blocks go on

void copy_async(u64 to, u64 from, int bytes, int wanted, Site site);
void copy_async_commit();
void copy_async_wait(int newest, Site site);

// ---- warp.cpp
u32 lane();
void barrier(int id, int threads, bool waits, Site site);
void block_barrier(Site site);
u32 barrier_vote(bool predicate, Site site);    // how many of the block say yes
u32 block_size();
void warp_barrier(u32 mask, Site site);
u32 ballot(u32 mask, bool predicate, Site site);
enum class Shuffle { up, down, bfly, idx };
struct Shuffled {
    u32 x;
    bool valid;
};
Shuffled shuffle(Shuffle mode, u32 a, u32 b, u32 c, u32 mask, Site site);
bool elect(Site site);
void set_registers(Site site);
void pause();    // nanosleep
[[noreturn]] void trap(Site site);

// ---- matrices.cpp
template <int n, bool transposed> void load_matrices(u32 (&r)[n], u64 address, Site site);
template <int n, bool transposed> void store_matrices(u64 address, const u32 (&r)[n], Site site);
enum class Product {
    m16n8k8_f16,
    m16n8k8_bf16,
    m16n8k16_f16,
    m16n8k16_bf16,
    m16n8k8_tf32,
    m16n8k32_e4m3
};
template <Product product, class D, int n_a, int n_b>
void multiply(D (&d)[4], const u32 (&a)[n_a], const u32 (&b)[n_b], Site site);
// Registers of a and of b with scales, and of each the byte and the lanes that count.
struct ScalesOfProduct {
    u32 a, b;
    int byte_a, thread_a, byte_b, thread_b;
};
void multiply_scaled(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], ScalesOfProduct scales, Site site);
void multiply(double (&d)[2], const double (&a)[1], const double (&b)[1], Site site);    // m8n8k4
void multiply(double (&d)[4], const double (&a)[4], const double (&b)[2], Site site);    // m16n8k8

enum class Element { f16, bf16, tf32, e4m3 };
void warpgroup_product(float* d, const u32* a, u64 descriptor_a, u64 descriptor_b, bool accumulate,
                       Element element, int n, bool transposed_a, bool transposed_b, Site site);
void warpgroup_fence(Site site);
void warpgroup_commit(Site site);
void warpgroup_wait(int newest, Site site);

// ---- bulk.cpp
void mbarrier_init(u64 address, int count, Site site);
void mbarrier_init_fence();
void mbarrier_arrive(u64 address, int arrivals, int bytes, Site site);
bool mbarrier_try_wait(u64 address, int parity, Site site);
void proxy_fence();
struct Box {
    u64 map;
    int rank;
    int at[5];
};
void prefetch_map(u64 map, Site site);
void load_box(u64 to, Box from, u64 mbarrier, Site site);
void store_box(Box to, u64 from, Site site);
void bulk_load(u64 to, u64 from, int bytes, u64 mbarrier, Site site);
void bulk_store(u64 to, u64 from, int bytes, bool add, Site site);
void bulk_commit();
void bulk_wait(int newest, bool read_only, Site site);

// ---- launch.cpp
int launch(void (*body)(const void*), const u32 grid[3], const u32 block[3], u64 shared_bytes,
           const void* params, int max_threads);

}    // namespace ptx
using namespace ptx;

// The entry that cupy_flash.simulator calls, as CF_KERNEL of base.cuh makes it of a kernel's source.
#define PTX_KERNEL(name, n_params, max_threads, body)                                                        \
    extern "C" __attribute__((visibility("default"))) int simulate_##name(                                   \
        const u32 grid[3], const u32 block[3], u64 shared_bytes, const void* params) {                       \
        Params<n_params> copy;                                                                               \
        memcpy(&copy, params, sizeof copy);                                                                  \
        const auto call = [](const void* p) { body(*static_cast<const Params<n_params>*>(p)); };             \
        return launch(call, grid, block, shared_bytes, &copy, max_threads);                                  \
    }
