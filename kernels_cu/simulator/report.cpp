// Failures: who waits for what, where in the kernel, and crashes and endless loops turned into reports.
#include <csignal>
#include <cstdarg>
#include <map>
#include <pthread.h>
#include <string>
#include <sys/time.h>
#include <ucontext.h>
#include "core.h"

namespace sim {

static std::string text_of_report;
static int seconds_allowed = 120;
static volatile sig_atomic_t ticks;    // seconds of processor time since the launch

void clear_report() { text_of_report.clear(); }
void report(const char* text) { text_of_report = text; }
int time_limit() { return seconds_allowed; }
bool time_is_up() { return ticks >= seconds_allowed; }

// ---- call chains. Frame pointers are kept in simulated kernels; the launcher in Python turns addresses into
// lines.

struct Frame {
    const Frame* up;
    void* back;
};
static std::string call_chain(const Thread& t, const void* frame, const void* pc = nullptr) {
    char line[40];
    std::string out = " {";
    auto add = [&](const void* p) {
        snprintf(line, sizeof line, "%s%p", out.size() > 2 ? " " : "", p);
        out += line;
    };
    if (pc) add(pc);
    auto f = static_cast<const Frame*>(frame);
    auto inside = [&](const Frame* x) {
        auto p = reinterpret_cast<const char*>(x);
        return p >= t.stack && p + sizeof(Frame) <= t.stack + t.size &&
               reinterpret_cast<uintptr_t>(p) % 8 == 0;
    };
    for (int depth = 0; depth < 40 && inside(f); depth++) {
        if (!f->back) break;
        add(f->back);
        if (f->up <= f) break;
        f = f->up;
    }
    return out + "}";
}
static std::string chain_of_blocked(const Thread& t) {
    auto sp = static_cast<void* const*>(t.sp);
    return call_chain(t, sp[kSavedFrameSlot]);
}

static std::string names_of(const std::vector<int>& ids) {
    std::string out;
    for (size_t i = 0, j; i < ids.size(); i = j) {
        for (j = i + 1; j < ids.size() && ids[j] == ids[j - 1] + 1;) j++;
        out += (i ? "," : "") + std::to_string(ids[i]);
        if (j > i + 1) out += "-" + std::to_string(ids[j - 1]);
    }
    return out;
}

static std::string describe_waits() {
    std::map<std::string, std::vector<int>> waits;    // by reason
    for (int i = 0; i < block.size; i++) {
        Thread& t = block.threads[i];
        if (t.done) continue;
        std::string s = t.what;
        for (size_t p; (p = s.find("$a")) != s.npos;) s.replace(p, 2, std::to_string(t.a));
        for (size_t p; (p = s.find("$b")) != s.npos;) s.replace(p, 2, std::to_string(t.b));
        s += std::string(" at ") + t.site.file + ":" + std::to_string(t.site.line);
        waits[t.key ? s : &t == block.running ? "" : "can run"].push_back(t.id);
    }
    std::string out;
    for (auto& [what, ids] : waits) {
        if (what.empty()) continue;
        const std::string chain = what == "can run" ? "" : chain_of_blocked(block.threads[ids[0]]);
        out += "  thread" + std::string(ids.size() > 1 ? "s " : " ") + names_of(ids) + ": " + what + chain +
               "\n";
    }
    int exited = block.size - block.live;
    if (exited) out += "  " + std::to_string(exited) + " threads have exited\n";
    return out;
}

[[noreturn]] static void abandon(const char* text, const std::string& chain) {
    Thread& t = me();
    char head[120];
    snprintf(head, sizeof head, "block (%u,%u,%u) thread %d: ", blockIdx.x, blockIdx.y, blockIdx.z,
             t.id % block.size);
    block.failed = true;
    text_of_report = std::string(head) + text + chain + "\n" + describe_waits();
    switch_context(t, block.launcher);    // the fibers of the block are dropped where they stand
    abort();
}

void fail(const char* format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    abandon(text, call_chain(me(), __builtin_frame_address(0)));
}

// ---- crashes and endless loops

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
Guard::Guard() {}    // the sanitizers report crashes themselves
Guard::~Guard() {}
#else
static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
static struct sigaction before_launch[5];
static stack_t stack_before_launch;
static itimerval timer_before_launch;
static pthread_t launching;
alignas(16) static char signal_stack[64 * 1024];

static void on_signal(int number, siginfo_t* info, void* raw) {
    if (number == SIGVTALRM) {
        if (!pthread_equal(pthread_self(), launching)) {
            pthread_kill(launching, number);
            return;
        }
        // The scheduler notices the limit first; a loop without any primitive never gets there and is stopped
        // here.
        ticks = ticks + 1;
        if (ticks < seconds_allowed + 2) return;
    } else if (!pthread_equal(pthread_self(), launching)) {
        sigaction(number, &before_launch[0], nullptr);
        raise(number);
        return;
    }
    auto& machine = static_cast<ucontext_t*>(raw)->uc_mcontext;
#if defined(__x86_64__)
    auto pc = reinterpret_cast<void*>(machine.gregs[REG_RIP]),
         frame = reinterpret_cast<void*>(machine.gregs[REG_RBP]);
#else
    auto pc = reinterpret_cast<void*>(machine.pc), frame = reinterpret_cast<void*>(machine.regs[29]);
#endif
    char text[200];
    if (number == SIGVTALRM)
        snprintf(text, sizeof text, "still running after the time limit of %d s of processor time",
                 seconds_allowed);
    else if (number == SIGFPE) snprintf(text, sizeof text, "integer division by zero");
    else if (number == SIGILL) snprintf(text, sizeof text, "illegal instruction");
    else {
        auto p = static_cast<char*>(info->si_addr);
        Thread& t = me();
        if (p >= t.stack - 4096 && p < t.stack) snprintf(text, sizeof text, "stack overflow");
        else snprintf(text, sizeof text, "invalid memory access at address %p", info->si_addr);
    }
    abandon(text,
            call_chain(me(), frame, static_cast<char*>(pc) + 1));    // + 1: the rest are return addresses
}

Guard::Guard() {
    launching = pthread_self();
    ticks = 0;
    stack_t alternative{};
    alternative.ss_sp = signal_stack;
    alternative.ss_size = sizeof signal_stack;
    sigaltstack(&alternative, &stack_before_launch);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags =
        SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;    // why NODEFER: abandon() never returns
    for (int i = 0; i < 5; i++) sigaction(kSignals[i], &action, &before_launch[i]);
    itimerval each_second{{1, 0}, {1, 0}};
    setitimer(ITIMER_VIRTUAL, &each_second, &timer_before_launch);
}
Guard::~Guard() {
    setitimer(ITIMER_VIRTUAL, &timer_before_launch, nullptr);
    for (int i = 0; i < 5; i++) sigaction(kSignals[i], &before_launch[i], nullptr);
    sigaltstack(&stack_before_launch, nullptr);
}
#endif

}    // namespace sim

extern "C" SIM_API const char* simulator_report() { return sim::text_of_report.c_str(); }
extern "C" SIM_API void simulator_configure(int policy, uint64_t seed, int seconds, int counting) {
    sim::block.policy = sim::Policy(policy);
    sim::set_seed(seed);
    sim::seconds_allowed = seconds;
    sim::block.counting = counting;
}
