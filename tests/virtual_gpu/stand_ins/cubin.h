// What a cubin says of itself: for whom it is, its entries, and what parameters each takes.
#pragma once
#include <string>
#include <vector>

namespace gpu {

struct Parameter {
    unsigned offset = 0, size = 0;
};
struct Entry {
    std::string name;
    std::vector<Parameter> parameters;
    unsigned parameter_bytes = 0, parameter_base = 0;    // in the constant bank
    int registers = 0, shared_bytes = 0, local_bytes = 0, max_threads = 1024;
};

// Read a cubin for a device of this compute capability; CUresult, an error if it is damaged or for another.
int read_cubin(const std::string& data, int capability, std::vector<Entry>& entries);
// What a cubin was compiled for, such as sm_80 or sm_90a.
std::string target_of(const std::string& data);
// Bytes of an ELF image whose size nobody tells; 0 if it is none.
size_t elf_bytes(const void* image);

}    // namespace gpu
