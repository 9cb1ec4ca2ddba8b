// The CUDA runtime's functions that CuPy calls: what their files share. CuPy's wheels have a runtime of their own
// linked in; redirect.py makes the functions there jump to these. Built with the headers of each CUDA major.
#pragma once
#include "gpu.h"
#include <cuda_runtime_api.h>

namespace gpu {

extern thread_local cudaError_t last;    // that cudaGetLastError returns
inline cudaError_t answer(int code) {
    if (code) last = cudaError_t(code);
    return cudaError_t(code);
}
inline Stream* find(cudaStream_t handle) { return stream_of(handle); }
Event* find(cudaEvent_t handle);

}    // namespace gpu

// What every function that touches the GPU begins with.
#define LOCK                                                                                                 \
    gpu::Guard guard(lock);                                                                                  \
    if (failed) return answer(failed)
