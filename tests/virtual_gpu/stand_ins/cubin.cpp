// ELF, and the attributes in the sections .nv.info: facts that cuobjdump -elf prints.
#include "cubin.h"
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <cuda.h>
#include <elf.h>

namespace gpu {

namespace {
enum Attribute {    // names as cuobjdump prints them
    kMaxThreads = 0x05,
    kParamCbank = 0x0a,
    kFrameSize = 0x11,
    kKparamInfo = 0x17,
    kCbankParamSize = 0x19,
    kRegcount = 0x2f,
};
constexpr int kHasBytes = 4;    // format of an attribute that a size and as many bytes follow

class Reader {
  public:
    explicit Reader(const std::string& data) : data(data) {}
    // Whether the headers and every section lie in the file.
    bool sound() const {
        if (data.size() < sizeof(Elf64_Ehdr) || memcmp(head().e_ident, ELFMAG, SELFMAG)) return false;
        if (head().e_machine != kCuda || head().e_shentsize != sizeof(Elf64_Shdr)) return false;
        if (head().e_shoff > data.size() || head().e_shstrndx >= head().e_shnum) return false;
        if (head().e_shnum * sizeof(Elf64_Shdr) > data.size() - head().e_shoff) return false;
        return std::all_of(sections(), sections() + head().e_shnum, [&](const Elf64_Shdr& s) {
            return s.sh_type == SHT_NOBITS ||
                   (s.sh_offset <= data.size() && s.sh_size <= data.size() - s.sh_offset);
        });
    }
    const Elf64_Ehdr& head() const { return *reinterpret_cast<const Elf64_Ehdr*>(data.data()); }
    const Elf64_Shdr* sections() const {
        return reinterpret_cast<const Elf64_Shdr*>(data.data() + head().e_shoff);
    }
    std::string name(const Elf64_Shdr& s) const {
        return data.data() + sections()[head().e_shstrndx].sh_offset + s.sh_name;
    }
    const char* bytes(const Elf64_Shdr& s) const { return data.data() + s.sh_offset; }
    // Name of the symbol of this number; "" if there is none.
    std::string symbol(unsigned number) const {
        for (int i = 0; i < head().e_shnum; i++) {
            const auto& table = sections()[i];
            if (table.sh_type != SHT_SYMTAB || number >= table.sh_size / sizeof(Elf64_Sym)) continue;
            const auto& found = reinterpret_cast<const Elf64_Sym*>(bytes(table))[number];
            return bytes(sections()[table.sh_link]) + found.st_name;
        }
        return "";
    }

  private:
    static constexpr unsigned kCuda = 190;    // EM_CUDA
    const std::string& data;
};

struct Target {
    int made_for;
    bool exactly;    // such as sm_90a
};
Target target(const Elf64_Ehdr& head) {
    // layout of e_flags: since ABI 8 (CUDA 13) the architecture is in bits 8-15, before in 0-7.
    const bool newer = head.e_ident[EI_ABIVERSION] >= 8;
    return {int(newer ? head.e_flags >> 8 & 0xff : head.e_flags & 0xff),
            bool(newer ? head.e_flags & 8 : head.e_flags & 0x800)};
}

// why: the driver refuses what was not made for the device; NVRTC and the lookup of cubins are held to it.
bool runs_on(const Elf64_Ehdr& head, int capability) {
    const auto [made_for, exactly] = target(head);
    return exactly ? made_for == capability : made_for / 10 == capability / 10 && made_for <= capability;
}

void read_attributes(const Reader& file, const Elf64_Shdr& section, Entry* of, std::vector<Entry>& entries) {
    const auto* p = reinterpret_cast<const unsigned char*>(file.bytes(section));
    const auto* end = p + section.sh_size;
    auto by_symbol = [&](unsigned number) {
        return std::find_if(entries.begin(), entries.end(),
                            [name = file.symbol(number)](const Entry& e) { return e.name == name; });
    };
    while (p + 4 <= end) {
        const unsigned format = p[0], attribute = p[1], half = p[2] | unsigned(p[3]) << 8;
        const unsigned char* value = p + 4;
        p = value + (format == kHasBytes ? half : 0);
        if (p > end) return;
        auto word = [&](int n) {
            uint32_t x = 0;
            if (value + 4 * n + 4 <= p) memcpy(&x, value + 4 * n, 4);
            return x;
        };
        if (attribute == kRegcount || attribute == kFrameSize) {    // symbol, number
            const auto e = by_symbol(word(0));
            if (e != entries.end()) (attribute == kRegcount ? e->registers : e->local_bytes) = int(word(1));
        } else if (of && attribute == kKparamInfo) {    // index, ordinal | offset << 16, flags | size << 18
            const unsigned ordinal = word(1) & 0xffff;
            if (of->parameters.size() <= ordinal) of->parameters.resize(ordinal + 1);
            of->parameters[ordinal] = {word(1) >> 16, word(2) >> 18};
        } else if (of && attribute == kCbankParamSize) {
            of->parameter_bytes = half;
        } else if (of && attribute == kParamCbank) {    // symbol, base | bytes << 16
            of->parameter_base = word(1) & 0xffff;
        } else if (of && attribute == kMaxThreads) {
            of->max_threads = int(word(0) * word(1) * word(2));
        }
    }
}
}    // namespace

std::string target_of(const std::string& data) {
    const auto [made_for, exactly] = target(*reinterpret_cast<const Elf64_Ehdr*>(data.data()));
    return "sm_" + std::to_string(made_for) + (exactly ? "a" : "");
}

int read_cubin(const std::string& data, int capability, std::vector<Entry>& entries) {
    const Reader file(data);
    if (!file.sound()) return CUDA_ERROR_INVALID_IMAGE;
    if (!runs_on(file.head(), capability)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    const std::string text = ".text.", info = ".nv.info", shared = ".nv.shared.";
    auto each = [&](auto&& visit) {
        for (int i = 0; i < file.head().e_shnum; i++)
            visit(file.sections()[i], file.name(file.sections()[i]));
    };
    auto entry_of = [&](const std::string& name) -> Entry* {
        for (auto& e : entries)
            if (e.name == name) return &e;
        return nullptr;
    };
    each([&](const Elf64_Shdr&, const std::string& name) {
        if (name.starts_with(text)) entries.push_back({name.substr(text.size())});
    });
    // why: from sm_90 on the section of a kernel begins with the kilobyte of a block that is the system's. ptxas counts
    // 0 bytes there, and a device's limit is without it.
    int reserved = 0;
    each([&](const Elf64_Shdr&, const std::string& name) {
        if (name.starts_with(shared + "reserved.")) reserved = 1024;
    });
    each([&](const Elf64_Shdr& section, const std::string& name) {
        if (name.starts_with(shared)) {
            const int own = std::max(int(section.sh_size) - reserved, 0);
            if (Entry* e = entry_of(name.substr(shared.size()))) e->shared_bytes = own;
        } else if (name == info) {
            read_attributes(file, section, nullptr, entries);
        } else if (name.starts_with(info + ".")) {
            read_attributes(file, section, entry_of(name.substr(info.size() + 1)), entries);
        }
    });
    return entries.empty() ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

size_t elf_bytes(const void* image) {
    const auto* bytes = static_cast<const char*>(image);
    const auto& head = *static_cast<const Elf64_Ehdr*>(image);
    if (memcmp(head.e_ident, ELFMAG, SELFMAG)) return 0;
    size_t end = std::max(head.e_shoff + head.e_shnum * sizeof(Elf64_Shdr),
                          head.e_phoff + head.e_phnum * sizeof(Elf64_Phdr));
    const auto* sections = reinterpret_cast<const Elf64_Shdr*>(bytes + head.e_shoff);
    for (int i = 0; i < head.e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS)
            end = std::max(end, sections[i].sh_offset + sections[i].sh_size);
    return end;
}

}    // namespace gpu
