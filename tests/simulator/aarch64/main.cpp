// Runs one simulated kernel of the tests without Python, so that a cross-compiled simulator can be tried under an emulator.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

extern "C" {
int simulate_kernel(const uint32_t grid[3], const uint32_t block[3], uint64_t shared_bytes,
                    const void* params);
const char* simulator_report();
void simulator_configure(int policy, uint64_t seed, int seconds, int counting);
}

#if defined(RUN_WARP)
struct Params {
    const float* x;
    float* out;
    int* counter;
};
int main() {
    const uint32_t grid[3] = {1, 1, 1}, block[3] = {64, 1, 1};
    for (int policy = 0; policy < 3; policy++) {
        float x[64];
        static float out[24 * 64];
        int counter[2] = {};
        for (int i = 0; i < 64; i++) x[i] = float(i * 37 % 64 - 31) / 8 + 0.0625f;
        Params p{x, out, counter};
        simulator_configure(policy, 1, 20, 0);
        int good = simulate_kernel(grid, block, 256, &p);
        uint32_t sum = 0;
        for (int i = 0; i < 23 * 64; i++) {
            uint32_t bits;
            memcpy(&bits, &out[i], 4);
            if (i / 64 != 11 && i / 64 != 12)
                sum = sum * 31 + bits;    // but for exp2 and log2, which libraries round their way
        }
        printf("policy %d: %d %08x %d\n", policy, good, unsigned(sum), counter[0]);
    }
}
#else
struct Params {
    float* out;
    int mode;
};
int main() {
    alignas(16) static float out[128];
    const uint32_t grid[3] = {1, 1, 1}, block[3] = {128, 1, 1};
    for (int mode : {1, 2, 3, 7, 8, 10, 13, 25}) {
        Params p{out, mode};
        simulator_configure(1, 1, 1, 0);
        int good = simulate_kernel(grid, block, 2048, &p);
        char line[120];
        snprintf(line, sizeof line, "%s", simulator_report());
        line[strcspn(line, "{\n")] = 0;
        printf("mode %d: %d %s\n", mode, good,
               mode == 7 ? strstr(line, "invalid") ? "invalid memory access" : line : line);
    }
}
#endif
