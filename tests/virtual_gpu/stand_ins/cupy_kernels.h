// What CuPy's own kernels need of CUDA C++ when g++ compiles them: the built-in names, and a loop over the grid.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>
#include <crt/host_defines.h>
#include <vector_types.h>
#undef __shared__
#define __shared__ static    // why: blocks run one after another
#define __noinline__ __attribute__((noinline))
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#define __CUDACC_VER_MAJOR__ CUDA_MAJOR
using namespace std;

// ---- where a thread is

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- a grid

namespace virtual_gpu {

static char* dynamic;    // shared memory of the launch

// The threads of a block whose kernel has barriers: contexts that take turns at them.
class Block {
  public:
    explicit Block(size_t threads) : contexts(threads), stacks(threads), over(threads, false) {
        for (auto& stack : stacks) stack.reset(new char[kStack]);
    }
    template <class Place, class Body> void run(Place&& place, Body&& body) {
        for (size_t t = 0; t < contexts.size(); t++) {
            over[t] = false;
            getcontext(&contexts[t]);
            contexts[t].uc_stack.ss_sp = stacks[t].get();
            contexts[t].uc_stack.ss_size = kStack;
            contexts[t].uc_link = nullptr;
            makecontext(&contexts[t], begin<std::remove_reference_t<Body>>, 0);
        }
        current = this, body_of_all = &body;
        for (size_t left = contexts.size(); left;)
            for (running = 0; running < contexts.size(); running++) {
                if (over[running]) continue;
                place(running);
                swapcontext(&scheduler, &contexts[running]);
                left -= over[running];
            }
    }
    static void yield() { swapcontext(&current->contexts[current->running], &current->scheduler); }

  private:
    static constexpr size_t kStack = 32 << 10;
    template <class Body> static void begin() {
        (*static_cast<Body*>(current->body_of_all))();
        current->over[current->running] = true;
        yield();
    }
    static inline Block* current = nullptr;
    std::vector<ucontext_t> contexts;
    std::vector<std::unique_ptr<char[]>> stacks;
    std::vector<char> over;
    ucontext_t scheduler;
    size_t running = 0;
    void* body_of_all = nullptr;
};

template <bool kMeet, class Body>
void over_grid(const uint32_t* grid, const uint32_t* block, uint64_t shared, Body&& body) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    std::vector<char> bytes(shared + 1);
    dynamic = bytes.data();
    const size_t threads = size_t(block[0]) * block[1] * block[2];
    auto place = [&](size_t t) {
        threadIdx = {uint32_t(t % block[0]), uint32_t(t / block[0] % block[1]),
                     uint32_t(t / block[0] / block[1])};
    };
    Block contexts(kMeet ? threads : 0);
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                if (kMeet) {
                    contexts.run(place, body);
                    continue;
                }
                for (size_t t = 0; t < threads; t++) {
                    place(t);
                    body();
                }
            }
}

// How a kernel is called with pointers to its parameters.
template <class F> struct Signature;
template <class... A> struct Signature<void (*)(A...)> {
    static constexpr size_t count = sizeof...(A);
    static constexpr size_t sizes[count + 1] = {sizeof(A)..., 0};
    template <size_t... I> static void call(void (*f)(A...), void** a, std::index_sequence<I...>) {
        f(*(std::remove_cv_t<std::remove_reference_t<A>>*)a[I]...);
    }
};

}    // namespace virtual_gpu

#define VIRTUAL_GPU_KERNEL(name, meet)                                                                       \
    extern "C" void virtual_gpu_run_##name(const uint32_t* grid, const uint32_t* block, uint64_t shared,     \
                                           void** params) {                                                  \
        using S = virtual_gpu::Signature<decltype(&name)>;                                                   \
        virtual_gpu::over_grid<meet>(grid, block, shared,                                                    \
                                     [&] { S::call(&name, params, std::make_index_sequence<S::count>()); }); \
    }                                                                                                        \
    extern "C" const size_t* virtual_gpu_sizes_##name(size_t* count) {                                       \
        using S = virtual_gpu::Signature<decltype(&name)>;                                                   \
        *count = S::count;                                                                                   \
        return S::sizes;                                                                                     \
    }

// ---- what kernels call

inline void __syncthreads() { virtual_gpu::Block::yield(); }
inline void __syncwarp(unsigned = ~0u) { virtual_gpu::Block::yield(); }
inline void __threadfence() {}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }

namespace virtual_gpu {
template <class To, class From> To bits(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
template <class T> T exchange(T* p, T x) {
    T old = *p;
    *p = x;
    return old;
}
}    // namespace virtual_gpu
inline float __int_as_float(int x) { return virtual_gpu::bits<float>(x); }
inline int __float_as_int(float x) { return virtual_gpu::bits<int>(x); }
inline double __longlong_as_double(long long x) { return virtual_gpu::bits<double>(x); }
inline long long __double_as_longlong(double x) { return virtual_gpu::bits<long long>(x); }
template <class T, class U> T atomicAdd(T* p, U x) { return virtual_gpu::exchange(p, T(*p + T(x))); }
template <class T, class U> T atomicMax(T* p, U x) { return virtual_gpu::exchange(p, max(*p, T(x))); }
template <class T, class U> T atomicMin(T* p, U x) { return virtual_gpu::exchange(p, min(*p, T(x))); }
template <class T, class U> T atomicExch(T* p, U x) { return virtual_gpu::exchange(p, T(x)); }
template <class T, class U, class V> T atomicCAS(T* p, U was, V x) {
    return virtual_gpu::exchange(p, *p == T(was) ? T(x) : *p);
}
