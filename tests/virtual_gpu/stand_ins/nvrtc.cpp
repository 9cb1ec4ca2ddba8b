// libnvrtc: CuPy's own kernels (fill, copy, sum, ...) compiled by g++ for this processor. What it hands out as a
// cubin is a shared library, which modules.cpp loads. build.py defines CUDA_MAJOR, and COMPILE: the command
// without CuPy's own options and the files.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#define API extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kFailed = 6;    // NVRTC_ERROR_COMPILATION
// Only asked for of an empty program: CuPy's cache knows a compiler by it.
constexpr char kPtx[] = "// g++\n";

struct Program {
    std::string source, log, code;
};
std::string content(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
// The source with a function beside each kernel that runs it over a grid, see cupy_kernels.h.
std::string for_this_processor(const std::string& source) {
    static const std::regex dynamic("extern\\s+__shared__\\s+(.*?)\\s*(\\w+)\\s*\\[\\s*\\]");
    static const std::regex kernel(
        "extern\\s+\"C\"\\s+__global__\\s+void\\s+(?:__launch_bounds__\\([^)]*\\)\\s*)?(\\w+)\\s*\\(");
    const bool threads_meet = source.find("__syncthreads") != std::string::npos;
    std::string text = "#include \"cupy_kernels.h\"\n" +
                       std::regex_replace(source, dynamic, "$1* $2 = ($1*)virtual_gpu::dynamic");
    std::string entries;
    for (std::sregex_iterator it(text.begin(), text.end(), kernel), end; it != end; ++it)
        entries += "VIRTUAL_GPU_KERNEL(" + (*it)[1].str() + ", " + (threads_meet ? "true" : "false") + ")\n";
    return text + "\n" + entries;
}
int compile(Program& p, const std::string& options) {
    std::string name = std::filesystem::temp_directory_path() / "virtual-gpu-XXXXXX";
    if (!mkdtemp(name.data())) return kFailed;
    const std::filesystem::path folder = name;
    std::ofstream(folder / "kernel.cpp") << for_this_processor(p.source);
    const std::string in = folder / "kernel.cpp", out = folder / "kernel.so", log = folder / "log";
    // why: what is preloaded into this process is not for the compiler.
    const int status = system(("env -u LD_PRELOAD -u LD_LIBRARY_PATH " COMPILE " -shared" + options + " '" +
                               in + "' -o '" + out + "' 2> '" + log + "'")
                                  .c_str());
    p.log = content(log);
    p.code = status ? "" : content(out);
    std::filesystem::remove_all(folder);
    return status ? kFailed : 0;
}
}    // namespace

API const char* nvrtcGetErrorString(int code) { return code ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }
API int nvrtcVersion(int* major, int* minor) {
    *major = CUDA_MAJOR;
    *minor = 0;
    return 0;
}
API int nvrtcGetNumSupportedArchs(int* count) {
    *count = 3;
    return 0;
}
API int nvrtcGetSupportedArchs(int* archs) {
    archs[0] = 80;
    archs[1] = 90;
    archs[2] = 120;
    return 0;
}
API int nvrtcCreateProgram(Program** out, const char* source, const char*, int, const char**, const char**) {
    *out = new Program{source, {}, {}};
    return 0;
}
API int nvrtcDestroyProgram(Program** p) {
    delete *p;
    *p = nullptr;
    return 0;
}
API int nvrtcAddNameExpression(Program*, const char*) { return 0; }
API int nvrtcGetLoweredName(Program*, const char* name, const char** out) {
    *out = name;
    return 0;
}
API int nvrtcCompileProgram(Program* p, int count, const char** options) {
    std::string taken;
    for (int i = 0; i < count; i++)
        if (!strncmp(options[i], "-I", 2) || !strncmp(options[i], "-D", 2))
            taken += std::string(" '") + options[i] + "'";
    return compile(*p, taken);
}
API int nvrtcGetPTXSize(Program*, size_t* bytes) {
    *bytes = sizeof kPtx;
    return 0;
}
API int nvrtcGetPTX(Program*, char* out) {
    memcpy(out, kPtx, sizeof kPtx);
    return 0;
}
API int nvrtcGetCUBINSize(Program* p, size_t* bytes) {
    *bytes = p->code.size();
    return 0;
}
API int nvrtcGetCUBIN(Program* p, char* out) {
    memcpy(out, p->code.data(), p->code.size());
    return 0;
}
API int nvrtcGetProgramLogSize(Program* p, size_t* bytes) {
    *bytes = p->log.size() + 1;
    return 0;
}
API int nvrtcGetProgramLog(Program* p, char* out) {
    memcpy(out, p->log.c_str(), p->log.size() + 1);
    return 0;
}
