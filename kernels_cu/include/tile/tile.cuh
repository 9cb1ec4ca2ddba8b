// Tiles of matrices in shared memory: the layout of elements, how tiles are filled from global memory, how
// warps read them.
// Design note: docs/kernels/forward.md.
//
// layout: a tile is kRows rows of kColumns elements, row after row. Chunk c (16 bytes) of row r stands at
// chunk c ^ swizzle(r) of that row. 8 rows of one chunk column then lie in 8 different groups of 4 banks, which
// is what makes ldmatrix (8 rows of one chunk per phase) free of bank conflicts; 8 consecutive chunks of a
// row stay 8 different groups, which does it for copies.
//   rows of 128 bytes or a multiple: a row starts at bank 0, so the swizzle is row % 8; for 32-bit elements,
//   r0 r1 r2 being the bits of the row, it has the bits r2, r0 ^ r2, r1. Then also two neighbouring chunks of
//   rows 0-3, 4-7, 0 2 4 6 or 1 3 5 7 lie in 8 different groups: pairs of an accumulator are stored, and
//   columns of elements read, without conflicts;
//   for 64-bit elements r1, r2, r0: four neighbouring chunks of two rows, and pair_chunk's of 0 2 4 6 or 1 3 5 7;
//   rows of 64 bytes or an odd multiple (widths 32 and 96 of 16-bit elements): two rows already differ, the
//   swizzle is row / 2 % 4;
//   rows of 32 bytes (4-bit codes): four rows already differ, the swizzle is row / 4 % 2.
#pragma once
#include "abi.cuh"
#include "prim.cuh"

template <class Element_, int kRows_, int kColumns_>
struct Tile {
    using Element = Element_;
    // why enumerators: NVRTC writes static members into the cubin, each with its name and a relocation; they were
    // a tenth of all kernels.
    enum : int {
        kRows = kRows_,
        kColumns = kColumns_,
        kChunkElements = 16 / int(sizeof(Element)),
        kChunks = kColumns / kChunkElements,    // per row
        kPitch = kColumns * int(sizeof(Element)),
        kBytes = kRows * kPitch,
        // Chunks that change places among each other.
        kSwizzledChunks = kChunks % 8 == 0 ? 8
        : kChunks % 4 == 0                 ? 4
                                           : 2
    };
    static_assert(kColumns % kChunkElements == 0 && (kChunks % 4 == 0 || kChunks == 2),
                  "rows are 32 bytes or whole groups of 64");
    static_assert(kRows % 8 == 0, "a tile is made of 8-row matrices");

    alignas(128) Element data[kRows * kColumns];

    CF_DEVICE static constexpr int swizzle(int row) {
        if (kSwizzledChunks == 2) return row >> 2 & 1;
        if (kSwizzledChunks == 4) return row >> 1 & 3;
        if (sizeof(Element) == 8) return (row >> 1 & 3) | (row & 1) << 2;
        return sizeof(Element) == 4 ? (row << 1 & 6) ^ (row >> 2 & 1) * 3 : row & 7;
    }
    // Bytes from the start of the tile to chunk `chunk` of row `row`.
    CF_DEVICE static constexpr int offset(int row, int chunk) {
        return row * kPitch + (chunk ^ swizzle(row)) * 16;
    }
};

// Reads blocks of 16 rows x 32 bytes (16 columns of 16-bit elements, 8 of 32-bit) into registers, one
// ldmatrix each.
//
// layout: a block is four matrices of 8 rows x 16 bytes, one per register, in one of two orders:
//              rows_first           chunks_first
//   r[0]   rows 0-7,  chunk 0    rows 0-7,  chunk 0
//   r[1]   rows 8-15, chunk 0    rows 0-7,  chunk 1
//   r[2]   rows 0-7,  chunk 1    rows 8-15, chunk 0
//   r[3]   rows 8-15, chunk 1    rows 8-15, chunk 1
// Lane (g = l / 4, t = l % 4) holds of each of them row g, bytes 4t .. 4t + 3; after load_transposed (16-bit
// elements) rows 2t and 2t + 1 of column g.
// why: the instructions want A in four and B in two consecutive registers. The order that a product asks for,
// see mma.cuh, puts them there; the other one would cost a move per register.
enum class Order { rows_first, chunks_first };
template <class T, Order kOrder>
struct BlockReader {
    uint32_t lane_address;

    // The address of a tile in shared memory; any tile of the type can be read from there.
    CF_DEVICE explicit BlockReader(uint32_t tile_address) {
        const int lane = threadIdx.x % 32, eight = lane / 8 % 2, sixteen = lane / 16;
        lane_address =
            opaque(tile_address + (kOrder == Order::rows_first ? T::offset(lane % 8 + 8 * eight, sixteen)
                                                               : T::offset(lane % 8 + 8 * sixteen, eight)));
    }
    // `row` is a multiple of 16, `column_block` counts blocks of 32 bytes.
    // why so: the swizzle repeats every 8 rows and flips only the low bits of the chunk. So another block is an exclusive
    // or with one of kSwizzledChunks / 2 constants, a register each, and an immediate offset. Nothing is computed per block.
    CF_DEVICE uint32_t address(int row, int column_block) const {
        constexpr int kPeriod = T::kSwizzledChunks / 2;
        return (lane_address ^ (column_block % kPeriod * 32)) +
               (row * T::kPitch + column_block / kPeriod * kPeriod * 32);
    }
    // Block 0 of the columns is to be this one; of those after it as many are read as divide its number.
    CF_DEVICE void begin_at(int column_block) {
        constexpr int kPeriod = T::kSwizzledChunks / 2;
        lane_address = (lane_address ^ (column_block % kPeriod * 32)) + column_block / kPeriod * kPeriod * 32;
    }
    // Goes on to the block so many further; `column_blocks` is a multiple of kSwizzledChunks / 2, `rows` of 8.
    CF_DEVICE void advance(int rows, int column_blocks) {
        lane_address += rows * T::kPitch + column_blocks * 32;
    }
    CF_DEVICE void load(uint32_t (&r)[4], int row, int column_block) const {
        ldmatrix_x4(r, address(row, column_block));
    }
    CF_DEVICE void load_transposed(uint32_t (&r)[4], int row, int column_block) const {
        static_assert(sizeof(typename T::Element) == 2, "ldmatrix transposes 16-bit elements only");
        ldmatrix_x4_trans(r, address(row, column_block));
    }
};

// Rows of a matrix in global memory, last axis contiguous.
template <class Element>
struct GlobalRows {
    Element* data;
    // Bytes from row to row. why: 32 bits times a 32-bit row is one multiplication with a 64-bit result.
    int32_t stride_bytes;
    int32_t rows;       // that exist; none beyond is ever touched
    int32_t columns;    // that exist

    CF_DEVICE GlobalRows(Element* first, int64_t stride, int32_t rows_, int32_t columns_)
        : data(first), stride_bytes(static_cast<int32_t>(stride * int64_t(sizeof(Element)))), rows(rows_),
          columns(columns_) {}
    CF_DEVICE GlobalRows of_rows(int32_t first) const {
        GlobalRows of = *this;
        of.data = row(first), of.rows -= first;
        return of;
    }
    // `count` columns from `first` on.
    CF_DEVICE GlobalRows of_columns(int32_t first, int32_t count) const {
        GlobalRows of = *this;
        of.data += first, of.columns = smaller(columns - first, count);
        return of;
    }
    // The widest copy that may begin at every row: 16 bytes, 8, 4, 2, or 1.
    CF_DEVICE int alignment() const {
        const uint32_t address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data));
        const uint32_t bits = opaque(address) | static_cast<uint32_t>(stride_bytes) | 16;
        return static_cast<int>(bits & -bits);
    }
    CF_DEVICE Element* row(int32_t row) const {
        return reinterpret_cast<Element*>(mad_wide(row, stride_bytes, reinterpret_cast<int64_t>(data)));
    }
};

// Fills tiles of type T from global memory with kThreads threads; rows and columns that do not exist become
// zeros.
//
// layout: kLane neighbouring threads copy neighbouring chunks of one row, one period of the swizzle or, in tiles
// of fewer rows, two; thread t copies chunks t % kLane + kLane * i of rows t / kLane + kRowStep * j. Both steps
// are whole periods of the swizzle, so a thread's shared addresses differ by constants.
template <class T, int kThreads>
struct TileLoader {
    using Element = typename T::Element;
    enum : int {
        kLane = T::kRows * T::kSwizzledChunks < kThreads ? 2 * T::kSwizzledChunks : T::kSwizzledChunks,
        kRowStep = kThreads / kLane,
        kRowCopies = T::kRows / kRowStep,
        kChunkCopies = T::kChunks / kLane,
        kCopies = kRowCopies * kChunkCopies    // 16-byte copies of one thread per tile
    };
    static_assert(kRowStep % 8 == 0 && T::kRows % kRowStep == 0 && T::kChunks % kLane == 0,
                  "the threads cover a tile evenly");

    // From this thread's first chunk on. Its `rows` are ~rows, a negative number, unless whole tiles of them can
    // go in 16-byte copies. why: whether a tile needs no test per chunk is then a single comparison, and no
    // answer has to live through a main loop.
    GlobalRows<Element> matrix;
    uint32_t shared_offset;

    CF_DEVICE explicit TileLoader(const GlobalRows<Element>& of) : matrix(of) {
        matrix.data += first_chunk() * T::kChunkElements;
        matrix.rows = larger(matrix.rows, 0);
        shared_offset = T::offset(thread_row(), first_chunk());
        mark();
    }
    // With a loader of as many rows: neither takes the fast way where the other cannot.
    // why: their counts are then one register.
    template <class Other> CF_DEVICE void agree(Other& other) {
        matrix.rows = other.matrix.rows = other.matrix.rows < 0 ? other.matrix.rows : matrix.rows;
    }
    // Goes on to the matrix that begins `elements` after this one.
    CF_DEVICE void advance(int64_t elements) {
        matrix.data += elements;
        matrix.rows = rows();
        mark();
    }

    // Starts the copy of rows first_row .. first_row + kRows - 1; the caller commits and waits.
    // why: whole tiles of rows on 16-byte boundaries carry no predicate; the others take a loop that is short
    // in code and registers, and so do those that are copied once (start_once).
    CF_DEVICE void start(uint32_t tile_address, int first_row) const {
        const uint32_t to = tile_address + shared_offset;
        if (is_whole(first_row)) {
            CF_UNROLL
            for (int copy = 0; copy < kCopies; copy++)
                cp_async16(to + shared_step(copy), source(first_row, copy));
        } else {
            start_once(tile_address, first_row);
        }
    }
    CF_DEVICE void start_once(uint32_t tile_address, int first_row) const {
        const uint32_t to = tile_address + shared_offset;
        const int width = matrix.alignment();
#pragma unroll 1
        for (int copy = 0; copy < kCopies; copy++)
            copy_chunk(to + shared_step(copy), source(first_row, copy), bytes_of(first_row, copy), width);
    }
    // The same through registers, where there is no cp.async: fetch early, store when the tile is free.
    template <int kRegisters>
    CF_DEVICE void fetch(uint4 (&r)[kRegisters], int first_row) const {
        static_assert(kRegisters >= kCopies);
        if (is_whole(first_row)) {
            CF_UNROLL
            for (int copy = 0; copy < kCopies; copy++)
                r[copy] = ld_global_nc(reinterpret_cast<const uint4*>(source(first_row, copy)));
        } else {
            const bool aligned = matrix.alignment() == 16;
            CF_UNROLL
            for (int copy = 0; copy < kCopies; copy++)
                r[copy] = load_chunk(source(first_row, copy), bytes_of(first_row, copy), aligned);
        }
    }
    template <int kRegisters>
    CF_DEVICE void store(const uint4 (&r)[kRegisters], uint32_t tile_address) const {
        CF_UNROLL
        for (int copy = 0; copy < kCopies; copy++)
            st_shared(tile_address + shared_offset + shared_step(copy), r[copy]);
    }

  private:
    CF_DEVICE static int thread_row() { return static_cast<int>(threadIdx.x) / kLane; }
    CF_DEVICE static int first_chunk() { return static_cast<int>(threadIdx.x) % kLane; }
    CF_DEVICE static int row_step(int copy) { return copy / kChunkCopies * kRowStep; }
    CF_DEVICE static int chunk_step(int copy) { return copy % kChunkCopies * kLane; }
    CF_DEVICE static int shared_step(int copy) { return row_step(copy) * T::kPitch + chunk_step(copy) * 16; }
    CF_DEVICE const Element* source(int first_row, int copy) const {
        GlobalRows<Element> from = matrix;
        from.data = matrix.row(first_row + static_cast<int>(opaque(threadIdx.x)) / kLane);
        return from.row(row_step(copy)) + chunk_step(copy) * T::kChunkElements;
    }
    CF_DEVICE bool is_whole(int first_row) const { return first_row + T::kRows <= matrix.rows; }
    CF_DEVICE int rows() const { return matrix.rows ^ matrix.rows >> 31; }
    CF_DEVICE void mark() {
        if (matrix.columns != T::kColumns || matrix.alignment() != 16) matrix.rows = ~matrix.rows;
    }
    // How much of a chunk exists, 0 to 16 bytes.
    CF_DEVICE int bytes_of(int first_row, int copy) const {
        const int thread = static_cast<int>(opaque(threadIdx.x));
        const int left = matrix.columns - (thread % kLane + chunk_step(copy)) * T::kChunkElements;
        const bool exists = first_row + thread / kLane + row_step(copy) < rows() && left > 0;
        return exists ? smaller(16, left * int(sizeof(Element))) : 0;
    }

  public:
    // The first `bytes` of a chunk, the rest zeros, in pieces of `width` bytes.
    CF_DEVICE static void copy_chunk(uint32_t to, const Element* from, int bytes, int width) {
        if (width == 16) {
            cp_async16_part(to, from, bytes);
        } else if (sizeof(Element) == 1 ? width < 4 : width == 2) {
            // sync: a plain store; the barrier after which the tile is read orders it as well as a copy.
            if constexpr (sizeof(Element) == 1) store_bytes(to, from, bytes);
            else st_shared(to, load_chunk(from, bytes, false));
        } else {
#pragma unroll 1
            for (int at = 0; at < 16; at += 4)
                cp_async4_part(to + at, reinterpret_cast<const char*>(from) + at,
                               larger(0, smaller(4, bytes - at)));
        }
    }
    // why four at a time: 16 in registers would make a main loop spill.
    CF_DEVICE static void store_bytes(uint32_t to, const Element* from, int bytes) {
#pragma unroll 1
        for (int at = 0; at < 16; at += 4) {
            uint32_t word = 0;
            CF_UNROLL
            for (int i = 0; i < 4; i++)
                if (at + i < bytes) word |= uint32_t(from[at + i].bits) << 8 * i;
            st_shared(to + at, word);
        }
    }
    CF_DEVICE static uint4 load_chunk(const Element* from, int bytes, bool aligned) {
        if (aligned && bytes == 16) return ld_global_nc(reinterpret_cast<const uint4*>(from));
        alignas(16) Element part[T::kChunkElements];
        CF_UNROLL
        for (int i = 0; i < T::kChunkElements; i++)
            part[i] = i * int(sizeof(Element)) < bytes ? from[i] : Element(0.0f);
        return reinterpret_cast<const uint4&>(part);
    }
};

// Copies rows 0 .. kRows - 1 into a tile that is filled once: by cp.async, which the caller commits and waits
// for, or through registers.
template <int kThreads, bool kRegisters, class T>
CF_DEVICE void load_tile(const GlobalRows<typename T::Element>& from, const T& to) {
    const TileLoader<T, kThreads> loader(from);
    if constexpr (kRegisters) {
        uint4 waiting[TileLoader<T, kThreads>::kCopies];
        loader.fetch(waiting, 0);
        loader.store(waiting, smem_addr(to.data));
    } else {
        loader.start_once(smem_addr(to.data), 0);
    }
}
