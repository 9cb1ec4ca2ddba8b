// Tiles of matrices in shared memory: where an element stands, how tiles are filled from global memory, how warps read them.
//
// layout: a tile is kRows rows of kColumns elements, row after row. Chunk c (16 bytes) of row r stands at chunk c ^ twist(r) of
// that row. 8 rows of one chunk column then lie in 8 different groups of 4 banks, which is what makes ldmatrix (8 rows of one
// chunk per phase) free of bank conflicts; 8 consecutive chunks of a row stay 8 different groups, which does it for copies.
//   rows of 128 bytes or a multiple: a row starts at bank 0, so the twist is row % 8;
//   rows of 64 bytes or an odd multiple (widths 32 and 96 of 16-bit elements): two rows already differ, the twist is row / 2 % 4.
#pragma once
#include "abi.cuh"
#include "prim.cuh"

template <class Element_, int kRows_, int kColumns_>
struct Tile {
    using Element = Element_;
    static constexpr int kRows = kRows_, kColumns = kColumns_;
    static constexpr int kChunkElements = 16 / int(sizeof(Element));
    static constexpr int kChunks = kColumns / kChunkElements;    // per row
    static constexpr int kPitch = kColumns * int(sizeof(Element));
    static constexpr int kBytes = kRows * kPitch;
    static constexpr int kTwists = kChunks % 8 == 0 ? 8 : 4;     // chunks that change places among each other
    static_assert(kColumns % kChunkElements == 0 && kChunks % 4 == 0, "rows are whole groups of 64 bytes");
    static_assert(kRows % 8 == 0, "a tile is made of 8-row matrices");

    alignas(128) Element data[kRows * kColumns];

    CF_DEVICE static constexpr int twist(int row) { return kTwists == 8 ? row & 7 : row >> 1 & 3; }
    // Bytes from the start of the tile to chunk `chunk` of row `row`.
    CF_DEVICE static constexpr int offset(int row, int chunk) { return row * kPitch + (chunk ^ twist(row)) * 16; }
};

// Reads blocks of 16 rows x 32 bytes (16 columns of 16-bit elements, 8 of 32-bit) into registers, one ldmatrix each.
//
// layout: lane l gives the address of row l % 16, chunk l / 16, so the registers of a block are
//   r[0]: rows 0-7 of chunk 0    r[2]: rows 0-7 of chunk 1
//   r[1]: rows 8-15 of chunk 0   r[3]: rows 8-15 of chunk 1
// Lane (g = l / 4, t = l % 4) holds of each of them row g, bytes 4t .. 4t + 3; after load_transposed (16-bit elements) rows 2t
// and 2t + 1 of column g. Every operand of every product is a renaming of these four registers, see mma.cuh.
template <class T>
struct BlockReader {
    uint32_t lane_address;

    // The address of a tile in shared memory; any tile of the type can be read from there.
    CF_DEVICE explicit BlockReader(uint32_t tile_address) {
        const int lane = threadIdx.x % 32;
        lane_address = tile_address + T::offset(lane % 16, lane / 16);
    }
    // `row` is a multiple of 16, `column_block` counts blocks of 32 bytes.
    // why: the twist repeats every 8 rows and flips only the low bits of the chunk, so moving by a block is an exclusive or with
    // one of kTwists / 2 constants (one register each) and an immediate offset; nothing is computed per block.
    CF_DEVICE uint32_t address(int row, int column_block) const {
        constexpr int kPeriod = T::kTwists / 2;
        return (lane_address ^ (column_block % kPeriod * 32)) + (row * T::kPitch + column_block / kPeriod * kPeriod * 32);
    }
    CF_DEVICE void load(uint32_t (&r)[4], int row, int column_block) const { ldmatrix_x4(r, address(row, column_block)); }
    CF_DEVICE void load_transposed(uint32_t (&r)[4], int row, int column_block) const {
        static_assert(sizeof(typename T::Element) == 2, "ldmatrix transposes 16-bit elements only");
        ldmatrix_x4_trans(r, address(row, column_block));
    }
    CF_DEVICE BlockReader at(uint32_t byte_offset) const {
        BlockReader moved = *this;
        moved.lane_address += byte_offset;
        return moved;
    }
};

// Rows of a matrix in global memory, last axis contiguous and rows on 16-byte boundaries.
template <class Element>
struct AlignedRows {
    Element* data;
    int64_t stride;    // elements from row to row
    int rows;          // rows that exist; none beyond is ever touched
    int columns;       // columns that exist
};

// Fills tiles of type T from global memory with kThreads threads; rows and columns that do not exist become zeros.
//
// layout: kLane neighbouring threads copy neighbouring chunks of one row; thread t copies chunks t % kLane + kLane * i of rows
// t / kLane + kRowStep * j. Both steps are whole periods of the twist, so a thread's shared addresses differ by constants.
template <class T, int kThreads>
struct TileLoader {
    using Element = typename T::Element;
    static constexpr int kLane = T::kTwists;
    static constexpr int kRowStep = kThreads / kLane;
    static constexpr int kRowCopies = T::kRows / kRowStep, kChunkCopies = T::kChunks / kLane;
    static constexpr int kCopies = kRowCopies * kChunkCopies;    // 16-byte copies of one thread per tile
    static_assert(kRowStep % 8 == 0 && T::kRows % kRowStep == 0, "the threads cover a tile evenly");

    AlignedRows<Element> rows;
    const char* source;       // this thread's first chunk of row 0 of the matrix plus its row
    uint32_t shared_offset;

    CF_DEVICE explicit TileLoader(const AlignedRows<Element>& matrix) : rows(matrix) {
        const int row = threadIdx.x / kLane, chunk = threadIdx.x % kLane;
        source = reinterpret_cast<const char*>(matrix.data + row * matrix.stride + chunk * T::kChunkElements);
        shared_offset = T::offset(row, chunk);
    }

    // Starts the copy of rows first_row .. first_row + kRows - 1; the caller commits and waits.
    CF_DEVICE void start(uint32_t tile_address, int first_row) const {
        each_copy(first_row, [&](int, int offset, const char* from, int bytes) {
            cp_async16_part(tile_address + shared_offset + offset, from, bytes);
        });
    }
    // The same through registers, where there is no cp.async: fetch early, store when the tile is free.
    CF_DEVICE void fetch(uint4 (&r)[kCopies], int first_row) const {
        each_copy(first_row, [&](int copy, int, const char* from, int bytes) { r[copy] = load_chunk(from, bytes); });
    }
    CF_DEVICE void store(const uint4 (&r)[kCopies], uint32_t tile_address) const {
        CF_UNROLL
        for (int copy = 0; copy < kCopies; copy++)
            st_shared(tile_address + shared_offset + copy / kChunkCopies * kRowStep * T::kPitch + copy % kChunkCopies * kLane * 16,
                      r[copy]);
    }

  private:
    // Calls act(copy, shared offset, source, bytes) for this thread's chunks; bytes < 16 exist, the rest of a chunk is zero.
    // why: one uniform branch per tile leaves whole tiles without any predicate.
    template <class Act>
    CF_DEVICE void each_copy(int first_row, Act act) const {
        const char* from = source + int64_t(first_row) * rows.stride * int64_t(sizeof(Element));
        const int64_t step = kRowStep * rows.stride * int64_t(sizeof(Element));
        const bool whole = rows.columns == T::kColumns && first_row + T::kRows <= rows.rows;
        if (whole) {
            CF_UNROLL
            for (int j = 0; j < kRowCopies; j++, from += step) {
                CF_UNROLL
                for (int i = 0; i < kChunkCopies; i++)
                    act(j * kChunkCopies + i, j * kRowStep * T::kPitch + i * kLane * 16, from + i * kLane * 16, 16);
            }
        } else {
            const int rows_left = rows.rows - first_row - int(threadIdx.x / kLane);
            const int bytes_left = (rows.columns - int(threadIdx.x % kLane) * T::kChunkElements) * int(sizeof(Element));
            CF_UNROLL
            for (int j = 0; j < kRowCopies; j++, from += step) {
                CF_UNROLL
                for (int i = 0; i < kChunkCopies; i++) {
                    const int bytes = j * kRowStep < rows_left ? larger(0, smaller(16, bytes_left - i * kLane * 16)) : 0;
                    // why: an address that is not read still has to be a legal one for a source size of 0.
                    act(j * kChunkCopies + i, j * kRowStep * T::kPitch + i * kLane * 16,
                        bytes ? from + i * kLane * 16 : reinterpret_cast<const char*>(rows.data), bytes);
                }
            }
        }
    }
    CF_DEVICE static uint4 load_chunk(const char* from, int bytes) {
        uint4 chunk{0, 0, 0, 0};
        if (bytes == 16) {
            chunk = *reinterpret_cast<const uint4*>(from);
        } else {
            Element part[T::kChunkElements];
            CF_UNROLL
            for (int i = 0; i < T::kChunkElements; i++)
                part[i] = i * int(sizeof(Element)) < bytes ? reinterpret_cast<const Element*>(from)[i] : Element(0.0f);
            chunk = *reinterpret_cast<const uint4*>(part);
        }
        return chunk;
    }
};
