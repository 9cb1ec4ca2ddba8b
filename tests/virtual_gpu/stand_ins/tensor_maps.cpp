// cuTensorMapEncodeTiled: what the driver refuses, and a map as the simulator's copies read it.
#include "gpu.h"
#include <cstring>
using namespace gpu;

namespace {
constexpr int kItemBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};    // by CUtensorMapDataType
constexpr unsigned kMostAxes = 5;

// layout: struct Map of kernels_cu/simulator/bulk.cpp
struct Map {
    uint64_t address;
    uint8_t axes, item_bytes, swizzle, magic;
    uint32_t reserved;
    uint64_t shape[kMostAxes], strides[kMostAxes];
    uint32_t box[kMostAxes + 1];
    uint64_t end;
};
static_assert(sizeof(Map) == sizeof(CUtensorMap));
}    // namespace

API CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t axes,
                                    void* pointer, const cuuint64_t* shape, const cuuint64_t* strides,
                                    const cuuint32_t* box, const cuuint32_t* steps,
                                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (reinterpret_cast<uintptr_t>(out) % 64 || address % 16 || axes < 1 || axes > kMostAxes ||
        unsigned(type) >= std::size(kItemBytes) || interleave || unsigned(swizzle) > 3 ||
        device().model->capability < 90 || (!owner(pointer) && managed_by(pointer) < 0))
        return CUDA_ERROR_INVALID_VALUE;
    const auto item = uint64_t(kItemBytes[type]);
    Map map{address, uint8_t(axes), uint8_t(item), uint8_t(swizzle), 0xCF, 0, {}, {item}, {}, 0};
    for (unsigned i = 0; i < axes; i++) {
        if (!shape[i] || shape[i] > uint64_t(1) << 32 || !box[i] || box[i] > 256 || steps[i] < 1 ||
            steps[i] > 8)
            return CUDA_ERROR_INVALID_VALUE;
        map.shape[i] = shape[i];
        map.box[i] = box[i];
        if (i + 1 == axes) break;
        if (strides[i] % 16 || strides[i] >= uint64_t(1) << 40) return CUDA_ERROR_INVALID_VALUE;
        map.strides[i + 1] = strides[i];
    }
    if (box[0] * item % 16 || (swizzle && box[0] * item > (16u << swizzle))) return CUDA_ERROR_INVALID_VALUE;
    memcpy(out, &map, sizeof map);
    return CUDA_SUCCESS;
}
