// Products whose operands are parts of tiles in shared memory: any rows or columns, as A or as B, divided among the warps
// of a block.
// Design note: docs/kernels/backward.md.
//
// layout: columns are divided in blocks of 16: part `group` of kGroups has the blocks group, group + kGroups, ... So
// neighbouring blocks belong to different warps. kGroups is a power of two, so an address is that of the warp's first
// block, with one constant by exclusive or and another one added: see BlockReader::address. Rows are divided in one piece
// each. Registers of an operand are those of the table in mma.cuh. Columns of 32-bit elements come by single loads:
// ldmatrix moves such elements, but does not transpose them.
#pragma once
#include "tile/mma.cuh"

// A block of 16 columns of 8 rows of 32-bit elements, as A = tile^T or as B = tile.
template <class T>
struct FloatColumnReader {
    uint32_t base, lane_row, lane_chunk;

    CF_DEVICE explicit FloatColumnReader(uint32_t tile_address)
        : base(tile_address), lane_row(threadIdx.x % 4), lane_chunk(threadIdx.x % 32 / 4 / 4) {}
    // Rows row .. row + 7, columns 16 * column_block ..; r[slot][half] is column g of half of them.
    CF_DEVICE void load(uint32_t (&r)[2][2], int row, int column_block) const {
        CF_UNROLL
        for (int slot = 0; slot < 2; slot++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const uint32_t at = T::offset(lane_row + 4 * slot, 4 * column_block + 2 * half + lane_chunk);
                r[slot][half] =
                    ld_shared<uint32_t>(base + at + row * T::kPitch + threadIdx.x % 32 / 4 % 4 * 4);
            }
        }
    }
};

// A: rows row_first + 16 m .. of a tile; k runs along the row.
template <class T>
struct RowsAsA {
    BlockReader<T, Order::rows_first> reader;

    CF_DEVICE RowsAsA(uint32_t tile_address, int row_first) : reader(tile_address + row_first * T::kPitch) {}
    CF_DEVICE void load(uint32_t (&r)[4], int m, int step) const { reader.load(r, 16 * m, step); }
    CF_DEVICE void advance(int steps) { reader.advance(0, steps); }
};

// B = tile^T: rows row_first + 16 pair .. of a tile are two n8 columns, or their first 8 are one; k runs
// along the row.
template <class T>
struct RowsAsB {
    BlockReader<T, Order::chunks_first> reader;

    CF_DEVICE RowsAsB(uint32_t tile_address, int row_first) : reader(tile_address + row_first * T::kPitch) {}
    CF_DEVICE void load(uint32_t (&r)[4], int pair, int step, bool both) const {
        if (both) {
            reader.load(r, 16 * pair, step);
        } else {
            uint32_t first[2];
            ldmatrix_x2(first, reader.address(16 * pair, step));
            r[0] = first[0], r[1] = first[1], r[2] = r[3] = 0;
        }
    }
    CF_DEVICE void advance(int steps) { reader.advance(0, steps); }
};

// The same kept in registers, kN n8 columns of 16-bit elements: 2 kN kSteps of them.
template <int kN, int kSteps>
struct RegisterRowsAsB {
    uint32_t block[kSteps][cdiv(kN, 2)][4];

    template <class T>
    CF_DEVICE void fill(const RowsAsB<T>& source) {
        static_assert(sizeof(typename T::Element) == 2, "products of floats go in a loop, registers cannot");
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            CF_UNROLL
            for (int pair = 0; pair < cdiv(kN, 2); pair++)
                source.load(block[step][pair], pair, step, 2 * pair + 1 < kN);
        }
    }
    CF_DEVICE void load(uint32_t (&r)[4], int pair, int step, bool) const {
        CF_UNROLL
        for (int i = 0; i < 4; i++) r[i] = block[step][pair][i];
    }
};

// The columns of part `group` of kGroups; k runs down the rows. kOrder is chunks_first for A = tile^T and
// rows_first for B = tile.
template <class T, int kGroups, Order kOrder>
struct Columns {
    static constexpr bool kFloat = sizeof(typename T::Element) == 4;
    static_assert((kGroups & (kGroups - 1)) == 0 && T::kColumns % (16 * kGroups) == 0,
                  "every warp takes as many 16-column blocks");
    BlockReader<T, kOrder> reader;
    FloatColumnReader<T> float_reader;
    int group;

    CF_DEVICE Columns(uint32_t tile_address, int of_group)
        : reader(tile_address), float_reader(tile_address), group(of_group) {
        constexpr int kPeriod = T::kSwizzledChunks / 2;
        reader.lane_address = (reader.lane_address ^ (group % kPeriod * 32)) + group / kPeriod * kPeriod * 32;
    }
    CF_DEVICE void load(uint32_t (&r)[4], int block, int step, bool = true) const {
        if constexpr (kFloat) {
            uint32_t x[2][2];
            float_reader.load(x, 8 * step, block * kGroups + group);
            constexpr bool kA = kOrder == Order::chunks_first;
            r[0] = x[0][0], r[1] = kA ? x[0][1] : x[1][0], r[2] = kA ? x[1][0] : x[0][1], r[3] = x[1][1];
        } else {
            reader.load_transposed(r, 16 * step, block * kGroups);
        }
    }
    CF_DEVICE void advance(int steps) {
        if constexpr (kFloat) float_reader.base += 8 * steps * T::kPitch;
        else reader.advance(16 * steps, 0);
    }
};
template <class T, int kGroups> using ColumnsAsA = Columns<T, kGroups, Order::chunks_first>;
template <class T, int kGroups> using ColumnsAsB = Columns<T, kGroups, Order::rows_first>;

// The first column of n8 product n of part `group`.
template <int kGroups>
CF_DEVICE constexpr int grouped_column(int n, int group) {
    return 16 * (n / 2 * kGroups + group) + n % 2 * 8;
}

// No work to interleave with products.
struct NoWork {
    CF_DEVICE void operator()(Share) const {}
};

// d += A B over kSteps blocks of k; between the products, interleaved(share) is called for one share of work after another.
// why: B is loaded kAhead blocks early and A one step, which covers the latency of shared memory. A warp issues in
// order, so that work overlaps with products if it stands between them; but it takes registers.
template <class Math, int kSteps, int kM, int kN, class A, class B, class Interleaved>
CF_DEVICE void multiply_together(float (&d)[kM][kN][4], const A& a, const B& b, Interleaved interleaved) {
    constexpr int kPairs = cdiv(kN, 2), kBlocks = kSteps * kPairs,
                  kAhead = smaller(kBlocks, kSame<Interleaved, NoWork> ? 2 : 1);
    const auto load_b = [&](uint32_t (&r)[4], int i) {
        b.load(r, i % kPairs, i / kPairs, 2 * (i % kPairs) + 1 < kN);
    };
    uint32_t a_blocks[kSteps][kM][4], b_blocks[kBlocks][4];

    CF_UNROLL
    for (int m = 0; m < kM; m++) a.load(a_blocks[0][m], m, 0);
    CF_UNROLL
    for (int i = 0; i < kAhead; i++) load_b(b_blocks[i], i);
    CF_UNROLL
    for (int step = 0; step < kSteps; step++) {
        typename Math::Fragment a_step[kM];
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            a_step[m] = Math::prepare(a_blocks[step][m]);
            if (step + 1 < kSteps) a.load(a_blocks[step + 1][m], m, step + 1);
        }
        CF_UNROLL
        for (int pair = 0; pair < kPairs; pair++) {
            const int i = step * kPairs + pair, next = i + kAhead;
            if (next < kBlocks) load_b(b_blocks[next], next);
            const auto b_step = Math::prepare(b_blocks[i]);
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                Math::multiply(d[m][2 * pair], a_step[m], b_step, 0);
                if (2 * pair + 1 < kN)
                    Math::multiply(d[m][smaller(2 * pair + 1, kN - 1)], a_step[m], b_step, 1);
            }
            interleaved(Share{i, kBlocks});
        }
    }
}
// Not of floats, whose products may be in a loop.
template <class Math, int kSteps, int kM, int kN, class A, class B, class Interleaved>
CF_DEVICE void multiply(float (&d)[kM][kN][4], A a, B b, Interleaved interleaved) {
    constexpr int kTogether = steps_together<Math>(kSteps);
    if constexpr (!Math::kFloat) {
        static_assert(kTogether == kSteps);
        multiply_together<Math, kSteps>(d, a, b, interleaved);
    } else {
        static_assert(kSame<Interleaved, NoWork>);
#pragma unroll 1
        for (int step = 0; step < kSteps; step += kTogether) {
            multiply_together<Math, kTogether>(d, a, b, NoWork());
            a.advance(kTogether);
            b.advance(kTogether);
        }
    }
}
template <class Math, int kSteps, int kM, int kN, class A, class B>
CF_DEVICE void multiply(float (&d)[kM][kN][4], A a, B b) {
    multiply<Math, kSteps>(d, a, b, NoWork());
}

// Writes accumulators into a tile, as elements: rows row_first .., columns 8 column_block_n8 .. .
//
// layout: a lane writes its pair of columns 2t, 2t + 1; the 8 rows of a store lie in 8 different groups of
// banks.
template <class T>
struct AccumulatorWriter {
    using Element = typename T::Element;
    enum : int { kChunkStep = 8 / T::kChunkElements };    // chunks of an n8: 1, or 2 of 32-bit elements
    uint32_t lane_address;

    // The columns of the accumulator start at n8 column `n_first` of the tile, a multiple of kN (a power of
    // two) or of kSwizzledChunks.
    CF_DEVICE AccumulatorWriter(uint32_t tile_address, int row_first, int n_first) {
        const int g = threadIdx.x % 32 / 4, byte = threadIdx.x % 4 * 2 * int(sizeof(Element));
        lane_address = tile_address + T::offset(row_first + g, n_first * kChunkStep + byte / 16) + byte % 16;
    }
    // Columns 2t and 2t + 1 of row 16 m + 8 half + g, of n8 column n after the writer's, into a tile `bytes` after
    // the writer's.
    CF_DEVICE void store(float left, float right, int m, int n, int half, uint32_t bytes) const {
        const int chunk = n * kChunkStep;
        const uint32_t to = (lane_address ^ (chunk % T::kSwizzledChunks * 16)) +
                            (16 * m + 8 * half) * T::kPitch + bytes +
                            chunk / T::kSwizzledChunks * T::kSwizzledChunks * 16;
        if constexpr (sizeof(Element) == 4) st_shared(to, float2{left, right});
        else st_shared(to, pack<Element>(left, right));
    }
};
