// A fiber: a stack and a saved stack pointer. Switching saves the callee-saved registers only.
#pragma once
#include <cstddef>

// ThreadSanitizer keeps a stack of the calls of a fiber; one that never returns would stay there.
#define SIM_NEVER_RETURNS __attribute__((no_sanitize_thread))

namespace sim {

struct Context {    // also stands for the launching thread, which has no stack of its own here
    void* sp = nullptr;
    char* stack = nullptr;
    size_t size = 0;
    void* fake = nullptr;    // AddressSanitizer's fake stack
    void* tsan = nullptr;    // ThreadSanitizer's fiber
    bool fiber_is_own = false;

    void make(size_t bytes);    // allocates the stack
    void free();
    // `colour` staggers the stack tops, else all stacks meet in the same cache sets.
    void start(void (*entry)(), int colour = 0);
};

// Where the frame pointer is, in words from the saved stack pointer.
#if defined(__x86_64__)
constexpr int kSavedFrameSlot = 5;
#elif defined(__aarch64__)
constexpr int kSavedFrameSlot = 10;
#else
#error "the simulator needs a context switch for this architecture"
#endif

// Runs `to` and comes back when something switches to `from`. `last`: `from` never runs again.
void switch_context(Context& from, Context& to, bool last = false);
// The first thing a fiber does; `launcher` learns the bounds of its own stack this way.
void entered(Context& launcher);

}    // namespace sim
