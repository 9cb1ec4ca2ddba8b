// Streams run their work when something waits for it, and then no more than that needs.
#include "gpu.h"
#include <pthread.h>

namespace gpu {

std::vector<Graph*> captures;
thread_local int capture_mode = 0;

Stream* stream_of(void* handle) {
    Device& d = device();
    if (!handle || handle == CU_STREAM_LEGACY) return d.legacy;
    if (handle == CU_STREAM_PER_THREAD) {
        static thread_local std::map<int, Stream*> own;
        Stream*& s = own[d.ordinal];
        if (!s) d.streams.push_back(s = new Stream{d.ordinal, true});
        return s;
    }
    for (auto& any : devices())
        for (auto* s : any.streams)
            if (s == handle) return s;
    return nullptr;
}

void drain(Stream* s, uint64_t number) {
    while (s->done < number && !s->queue.empty()) {
        Operation op = std::move(s->queue.front());
        s->queue.pop_front();
        for (auto& point : op.after) drain(point.stream, point.number);
        if (op.work && !failed) {
            const int before = current;
            current = s->device;
            Opened opened(devices()[size_t(s->device)]);
            op.work();
            current = before;
        }
        s->done = op.number;
    }
}
void drain_device(Device& d) {
    drain(d.legacy, d.legacy->issued);
    for (auto* s : d.streams) drain(s, s->issued);
}
void forget(Stream* s) {
    auto let_go = [s](Stream* other) {
        for (auto& op : other->queue)
            std::erase_if(op.after, [s](const Point& at) { return at.stream == s; });
    };
    for (auto& d : devices()) {
        let_go(d.legacy);
        for (auto* other : d.streams) let_go(other);
        std::erase(d.streams, s);
    }
}

int enqueue(Stream* s, Work work, std::vector<Point> after) {
    if (failed) return failed;
    Device& d = devices()[size_t(s->device)];
    if (s->capture) {
        if (s->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (work) s->capture->work.push_back(std::move(work));
        return 0;
    }
    Operation op{s->issued + 1, std::move(after), std::move(work)};
    if (s == d.legacy) {
        for (auto* other : d.streams) {
            if (!other->blocking) continue;
            if (other->capture) {    // the legacy stream would have to wait for a capture
                other->capture->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
            if (other->done < other->issued) op.after.push_back({other, other->issued});
        }
    } else if (s->blocking && d.legacy->done < d.legacy->issued) {
        op.after.push_back({d.legacy, d.legacy->issued});
    }
    s->issued++;
    s->queue.push_back(std::move(op));
    return 0;
}
int forbidden_by_capture() {
    constexpr int kGlobal = 0, kThreadLocal = 1, kRelaxed = 2;
    if (capture_mode == kRelaxed) return 0;
    for (auto* g : captures)
        if (g->mode == kGlobal || (g->mode == kThreadLocal && g->thread == (unsigned long)pthread_self())) {
            g->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return 0;
}

}    // namespace gpu
