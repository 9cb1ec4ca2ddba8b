// Context switches of x86-64 and aarch64, and what the sanitizers must be told about them.
#include "fiber.h"
#include <cstdlib>
#include <sys/mman.h>
#include "race.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers and the stack pointer, and goes on where `load_sp` was saved.
extern "C" void sim_switch(void** save_sp, void* load_sp);
#if defined(__x86_64__)
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch,@function
sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size sim_switch,.-sim_switch
)");
static void* first_frame(char* top, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(top) - 1;    // rsp = 16n + 8 at entry, as after a call
    *--sp = reinterpret_cast<void*>(entry);
    return sp - 6;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch,%function
sim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8,  d9,  [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8,  d9,  [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size sim_switch,.-sim_switch
)");
static void* first_frame(char* top, void (*entry)()) {
    char* sp = top - 160;
    *reinterpret_cast<void**>(sp + 88) = reinterpret_cast<void*>(entry);    // x30
    return sp;
}
#else
#error "the simulator needs a context switch for this architecture"
#endif

namespace sim {

void Context::make(size_t bytes) {
    size = bytes;
    stack = static_cast<char*>(mmap(nullptr, size + 4096, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stack == MAP_FAILED) abort();
    mprotect(stack, 4096, PROT_NONE);    // a stack overflow faults here
    stack += 4096;
}

void Context::free() { munmap(stack - 4096, size + 4096); }

void Context::start(void (*entry)(), int colour) {
    sp = first_frame(stack + size - colour % 16 * 256, entry);
    fake = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(stack, size);
#endif
}

SIM_NEVER_RETURNS void switch_context(Context& from, Context& to, [[maybe_unused]] bool last) {
#if defined(__SANITIZE_THREAD__)
    void* next = to.tsan;
    if (last) observe_accesses();
    __tsan_switch_to_fiber(next, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &from.fake, to.stack, to.size);
#endif
    sim_switch(&from.sp, to.sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
}

void entered([[maybe_unused]] Context& launcher) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!launcher.stack) {
        launcher.stack = static_cast<char*>(const_cast<void*>(bottom));
        launcher.size = size;
    }
#endif
}

}    // namespace sim
