// cuModule* and cuFunc*: cubins are read, and the code that runs for them is found.
#include "modules.h"
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <elf.h>
#include <fstream>
#include <iterator>
#include <unistd.h>
using namespace gpu;

namespace {
constexpr int kSharedByDefault = 48 << 10;    // what a launch may use without asking

// The simulator's library and symbol of a kernel in a cubin; 0 if there is none.
using Resolve = int (*)(const char* path, const char* kernel, char* library, char* symbol);
Resolve resolve = nullptr;

void* load_library(const std::string& data) {
    char file[] = "/tmp/virtual-gpu-XXXXXX";
    const int handle = mkstemp(file);
    if (handle < 0) return nullptr;
    const bool written = write(handle, data.data(), data.size()) == ssize_t(data.size());
    close(handle);
    void* library = written ? dlopen(file, RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(file);
    return library;
}
template <class F> void symbol(void* library, const std::string& name, F& out) {
    out = reinterpret_cast<F>(dlsym(library, name.c_str()));
}
int load(CUmodule* out, const std::string& data, const std::string& path) {
    auto m = std::make_unique<Module>();
    m->path = path;
    m->device = current;
    const auto* head = reinterpret_cast<const Elf64_Ehdr*>(data.data());
    if (data.size() >= sizeof *head && head->e_machine == EM_X86_64) {    // of our NVRTC
        m->host = load_library(data);
        if (!m->host) return refuse(CUDA_ERROR_INVALID_IMAGE, "a kernel of CuPy's: %s", dlerror());
    } else {
        std::vector<Entry> entries;
        if (int error = read_cubin(data, device().model->capability, entries)) return error;
        for (auto& entry : entries) {
            auto f = std::make_unique<Function>();
            f->entry = entry;
            f->module = m.get();
            f->max_dynamic_shared = kSharedByDefault - entry.shared_bytes;
            m->functions[entry.name] = std::move(f);
        }
        if (path.empty())
            m->path = target_of(data) + "/of_memory.cubin";    // the resolver looks at the folder
    }
    *out = reinterpret_cast<CUmodule>(m.release());
    return CUDA_SUCCESS;
}
int find_in_library(Module& m, const std::string& name) {
    auto& f = m.functions[name];
    if (f) return CUDA_SUCCESS;
    f = std::make_unique<Function>();
    f->entry.name = name;
    f->module = &m;
    f->max_dynamic_shared = kSharedByDefault;
    symbol(m.host, "virtual_gpu_run_" + name, f->run);
    symbol(m.host, "virtual_gpu_sizes_" + name, f->sizes);
    return f->run && f->sizes ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
int find_simulated(Module& m, const std::string& name) {
    const auto it = m.functions.find(name);
    if (it == m.functions.end()) return CUDA_ERROR_NOT_FOUND;
    Function& f = *it->second;
    if (f.simulate) return CUDA_SUCCESS;
    char library[4096], entry[1024];
    if (!resolve || !resolve(m.path.c_str(), name.c_str(), library, entry))
        return refuse(CUDA_ERROR_NOT_FOUND, "nothing to simulate %s of %s with", name.c_str(),
                      m.path.c_str());
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return refuse(CUDA_ERROR_NOT_FOUND, "%s", dlerror());
    symbol(handle, entry, f.simulate);
    symbol(handle, "simulator_configure", f.configure);
    symbol(handle, "simulator_report", f.report);
    if (f.simulate && f.configure && f.report) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_NOT_FOUND, "%s does not hold %s", library, entry);
}
}    // namespace

// ---- what tests ask

API void virtual_gpu_resolver(Resolve f) { resolve = f; }
API int virtual_gpu_parameters(CUfunction f) {
    return int(reinterpret_cast<Function*>(f)->entry.parameters.size());
}
API unsigned virtual_gpu_parameter_bytes(CUfunction f) {
    return reinterpret_cast<Function*>(f)->entry.parameter_bytes;
}

// ---- the driver's interface

API CUresult cuModuleLoad(CUmodule* out, const char* path) {
    Guard guard(lock);
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    std::ifstream file(path, std::ios::binary);
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    return CUresult(load(out, {std::istreambuf_iterator<char>(file), {}}, path));
}
API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
    Guard guard(lock);
    if (!bound) return CUDA_ERROR_INVALID_CONTEXT;
    const size_t bytes = elf_bytes(image);
    if (!bytes) return CUDA_ERROR_INVALID_IMAGE;
    return CUresult(load(out, std::string(static_cast<const char*>(image), bytes), ""));
}
// why nothing: launches that still have to run hold its functions.
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
// why no guard: resolving runs Python, which another thread may hold while it waits for the guard.
API CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
    auto& m = *reinterpret_cast<Module*>(module);
    if (int error = m.host ? find_in_library(m, name) : find_simulated(m, name)) return CUresult(error);
    *out = reinterpret_cast<CUfunction>(m.functions[name].get());
    return CUDA_SUCCESS;
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char* name) {
    return CUresult(refuse(CUDA_ERROR_NOT_FOUND, "there are no global variables, such as %s", name));
}
API CUresult cuFuncGetParamInfo(CUfunction function, size_t i, size_t* offset, size_t* size) {
    const auto& parameters = reinterpret_cast<Function*>(function)->entry.parameters;
    if (i >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = parameters[i].offset;
    if (size) *size = parameters[i].size;
    return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction function) {
    const auto& f = *reinterpret_cast<Function*>(function);
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = f.entry.max_threads; break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *out = f.entry.shared_bytes; break;
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *out = f.entry.local_bytes; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *out = f.entry.registers; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *out = f.max_dynamic_shared; break;
        default: *out = 0;
    }
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    auto& f = *reinterpret_cast<Function*>(function);
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    if (value < 0 || value + f.entry.shared_bytes > devices()[size_t(f.module->device)].model->shared_optin)
        return CUDA_ERROR_INVALID_VALUE;
    f.max_dynamic_shared = value;
    return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction, int, size_t) {
    *out = 1;
    return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction, CUoccupancyB2DSize, size_t,
                                              int) {
    *grid = 64;
    *block = 256;
    return CUDA_SUCCESS;
}
