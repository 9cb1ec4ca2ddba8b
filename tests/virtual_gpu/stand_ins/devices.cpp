// Which devices there are, and what errors are called.
#include "gpu.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <pthread.h>
#include <sys/mman.h>

namespace gpu {

std::recursive_mutex lock;
thread_local int current = 0;
thread_local bool bound = false;
int failed = 0;

namespace {
constexpr size_t kBytes = size_t(8) << 30;    // of address space; what is not touched takes no memory
constexpr int kKiB = 1024;
const Model kModels[] = {
    {75, 40, 64 * kKiB, 64 * kKiB, 1024, "Virtual sm_75"},
    {80, 108, 163 * kKiB, 164 * kKiB, 2048, "Virtual sm_80"},
    {86, 84, 99 * kKiB, 100 * kKiB, 1536, "Virtual sm_86"},
    {89, 128, 99 * kKiB, 100 * kKiB, 1536, "Virtual sm_89"},
    {90, 132, 227 * kKiB, 228 * kKiB, 2048, "Virtual sm_90"},
    {100, 148, 227 * kKiB, 228 * kKiB, 2048, "Virtual sm_100"},
    {110, 20, 227 * kKiB, 228 * kKiB, 1536, "Virtual sm_110"},
    {120, 170, 99 * kKiB, 100 * kKiB, 1536, "Virtual sm_120"},
};
struct Error {
    int code;
    const char *name, *text;
};
const Error kErrors[] = {
    {0, "SUCCESS", "no error"},
    {1, "INVALID_VALUE", "invalid argument"},
    {2, "OUT_OF_MEMORY", "out of memory"},
    {3, "NOT_INITIALIZED", "initialization error"},
    {100, "NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "INVALID_DEVICE", "invalid device ordinal"},
    {200, "INVALID_IMAGE", "device kernel image is invalid"},
    {201, "INVALID_CONTEXT", "invalid device context"},
    {209, "NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {301, "FILE_NOT_FOUND", "file not found"},
    {400, "INVALID_HANDLE", "invalid resource handle"},
    {500, "NOT_FOUND", "named symbol not found"},
    {600, "NOT_READY", "device not ready"},
    {701, "LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {719, "LAUNCH_FAILED", "unspecified launch failure"},
    {801, "NOT_SUPPORTED", "operation not supported"},
    {900, "STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {905, "STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing one"},
};
const Error& known(int code) {
    static const Error other{-1, "UNKNOWN", "unrecognized error code"};
    const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                     [code](const Error& error) { return error.code == code; });
    return found == std::end(kErrors) ? other : *found;
}
}    // namespace

namespace {
bool in_child = false;
}
// why no question of getpid: it takes longer than all else of a call that does nothing.
bool forked() { return in_child; }
std::vector<Device>& devices() {
    static std::vector<Device> all;
    return all;
}
const char* error_name(int code) { return known(code).name; }
const char* error_text(int code) { return known(code).text; }
int refuse(int code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "virtual GPU: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    return code;
}

// Make the devices of these compute capabilities (80: sm_80); false if one is not known.
API int virtual_gpu_devices(const int* capabilities, int count) {
    auto& all = devices();
    static const int not_told = pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    if (not_told) return false;
    for (int i = 0; i < count; i++) {
        const auto* model = std::find_if(std::begin(kModels), std::end(kModels),
                                         [&](const Model& m) { return m.capability == capabilities[i]; });
        if (model == std::end(kModels)) return false;
        Device d{i, model};
        d.bytes = kBytes;
        d.base = static_cast<char*>(
            mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (d.base == MAP_FAILED) return false;
        // why: each access of the host opens and closes all of it, page by page.
        madvise(d.base, kBytes, MADV_HUGEPAGE);
        d.free[d.base] = d.bytes;
        d.legacy = new Stream{i, true};
        d.peers.resize(size_t(count));
        all.push_back(std::move(d));
    }
    return true;
}

}    // namespace gpu
