// Products of tiles on the tensor cores: a warp multiplies its rows of A (registers or shared memory) by a
// tile in shared memory.
// Design note: docs/kernels/forward.md.
//
// layout: lane l of a warp, g = l / 4, t = l % 4. The accumulator of 16 kM rows by 8 kN columns is float
// d[kM][kN][4]; element e of d[m][n] stands in row 16 m + 8 (e / 2) + g and column 8 n + 2 t + e % 2 of the
// product. So each row lives in the 4 lanes of a quad, and a thread holds 2 kM rows. (Products with 32-bit V,
// see multiply_by_columns, permute the columns: output_column says how.)
//
// An operand of depth 32 bytes (k = 32 of 8-bit elements, 16 of 16-bit ones, 8 of tf32) is one block of 16 rows x 32 bytes, in
// the four registers of a BlockReader. A takes all four in their order; B takes two for each of two n8
// columns, r[0] r[1] and r[2] r[3].
//   A, rows of the tile are rows of A            rows_first,    load                Q of Q K^T
//   A = tile^T, rows of the tile are k           chunks_first,  load_transposed
//   B = tile^T, rows of the tile are columns     chunks_first,  load                K of Q K^T
//   B = tile, rows of the tile are k             rows_first,    load_transposed     V of P V
//   A from an accumulator                        Math::from_accumulator             P of P V
// (ldmatrix transposes 16-bit elements only; RowPairReader reads V of 32-bit ones, value_products.cuh of 8-bit.)
#pragma once
#include "tile/tile.cuh"

// How elements are multiplied: __half, __nv_bfloat16, float, E4M3 (sm_89). kProducts is 1, or 3 for float by tf32x3; kTuring has no m16n8k16 and no tf32.
template <class Element_, int kProducts, bool kTuring>
struct Math {
    using Element = Element_;
    static constexpr bool kFloat = sizeof(Element) == 4;
    enum : int {
        kDepth = 32 / int(sizeof(Element)),    // k of one step
        kParts = kProducts == 3 ? 2 : 1
    };
    static_assert(kProducts == 1 || (kProducts == 3 && kFloat), "only float is split");
    static constexpr bool kOnTuring = kTuring;
    static_assert(!kTuring || kSame<Element, __half>, "Turing multiplies f16 only");

    // One block of an operand, ready to multiply: part 0 as it is (rounded to tf32 if float), part 1 what
    // part 0 leaves.
    struct Fragment {
        uint32_t part[kParts][4];
    };

    // why: a tensor core reads 10 bits of mantissa of a float and drops the rest, so x is split as hi =
    // round(x), lo = x - hi. x y = hi hi + hi lo + lo hi up to 2^-22 of it, the accuracy of a float product
    // within a factor of 4. Rounding to nearest (not down) gives lo a random sign, so what the hardware drops
    // of it does not add up. The split rounds with two integer operations, where ptxas makes five of
    // cvt.rna.tf32 for the sake of NaN; here NaN that an addition would turn into a number stays in lo.
    CF_DEVICE static void prepare(Fragment& f, int i, uint32_t r) {
        if constexpr (!kFloat) {
            f.part[0][i] = r;
        } else if constexpr (kParts == 1) {
            f.part[0][i] = to_tf32(__uint_as_float(r));
        } else {
            f.part[0][i] = (r + 0x1000u) & 0xffffe000u;
            f.part[1][i] = __float_as_uint(__uint_as_float(r) - __uint_as_float(f.part[0][i]));
        }
    }
    CF_DEVICE static Fragment prepare(const uint32_t (&r)[4]) {
        Fragment f;
        CF_UNROLL
        for (int i = 0; i < 4; i++) prepare(f, i, r[i]);
        return f;
    }
    // Columns kDepth * step .. of an accumulator as the A operand of a product over them.
    // layout: 16-bit: the pair of columns 2t, 2t + 1 of one n8 is exactly a register of A. tf32: A wants
    // columns t and t + 4 where the accumulator has 2t and 2t + 1, so slot t stands for column 2t and slot t
    // + 4 for 2t + 1: B is read in the same order, and a sum does not care. 8-bit: see value_products.cuh.
    template <int kN>
    CF_DEVICE static Fragment from_accumulator(const float (&d)[kN][4], int step) {
        if constexpr (kFloat) {
            const uint32_t r[4] = {__float_as_uint(d[step][0]), __float_as_uint(d[step][2]),
                                   __float_as_uint(d[step][1]), __float_as_uint(d[step][3])};
            return prepare(r);
        } else if constexpr (sizeof(Element) == 1) {
            Fragment f;
            CF_UNROLL
            for (int i = 0; i < 4; i++) {
                const float (&left)[4] = d[4 * step + i / 2 * 2];
                const float (&right)[4] = d[4 * step + i / 2 * 2 + 1];
                const int row = i % 2 * 2;
                f.part[0][i] = pack_e4m3(left[row], left[row + 1]) |
                               uint32_t(pack_e4m3(right[row], right[row + 1])) << 16;
            }
            return f;
        } else {
            const float (&left)[4] = d[2 * step];
            const float (&right)[4] = d[2 * step + 1];
            return {{{pack<Element>(left[0], left[1]), pack<Element>(left[2], left[3]),
                      pack<Element>(right[0], right[1]), pack<Element>(right[2], right[3])}}};
        }
    }
    // d += a b for the n8 columns of B in registers 2 half and 2 half + 1 of b.
    CF_DEVICE static void multiply(float (&d)[4], const Fragment& a, const Fragment& b, int half) {
        const int b0 = 2 * half, b1 = b0 + 1;
        if constexpr (kTuring) {
            const uint32_t low[2] = {a.part[0][0], a.part[0][1]}, high[2] = {a.part[0][2], a.part[0][3]};
            mma_m16n8k8<Element>(d, low, b.part[0][b0]);
            mma_m16n8k8<Element>(d, high, b.part[0][b1]);
        } else if constexpr (sizeof(Element) == 1) {
            mma_m16n8k32_e4m3(d, a.part[0], b.part[0][b0], b.part[0][b1]);
        } else if constexpr (!kFloat) {
            mma_m16n8k16<Element>(d, a.part[0], b.part[0][b0], b.part[0][b1]);
        } else {
            if constexpr (kParts == 2) {
                mma_m16n8k8_tf32(d, a.part[1], b.part[0][b0], b.part[0][b1]);
                mma_m16n8k8_tf32(d, a.part[0], b.part[1][b0], b.part[1][b1]);
            }
            mma_m16n8k8_tf32(d, a.part[0], b.part[0][b0], b.part[0][b1]);
        }
    }
};

// The A operand of multiply_by_rows when it is re-read from shared memory: rows row_first + 16 m of a tile.
template <class Math, class T>
struct SharedRows {
    static constexpr bool kInRegisters = false;
    BlockReader<T, Order::rows_first> reader;

    CF_DEVICE SharedRows(uint32_t tile_address, int row_first)
        : reader(tile_address + row_first * T::kPitch) {}
    CF_DEVICE void load(uint32_t (&r)[4], int m, int step) const { reader.load(r, 16 * m, step); }
    CF_DEVICE void advance(int steps) { reader.advance(0, steps); }
};

// The same kept in registers, unsplit: 4 kM kSteps of them.
template <int kM, int kSteps>
struct RegisterRows {
    static constexpr bool kInRegisters = true;
    uint32_t block[kSteps][kM][4];

    template <class Source>
    CF_DEVICE void fill(const Source& source) {
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            CF_UNROLL
            for (int m = 0; m < kM; m++) source.load(block[step][m], m, step);
        }
    }
    CF_DEVICE void load(uint32_t (&r)[4], int m, int step) const {
        CF_UNROLL
        for (int i = 0; i < 4; i++) r[i] = block[step][m][i];
    }
    CF_DEVICE void advance(int) {}
};

// How many of the steps of a product stand in the code one after the other; the rest is a loop around them.
// why: floats take three products and two splits per step, so that a wide head dim was half of what all kernels
// of an architecture take on disk. A turn of the loop costs an addition per operand, a comparison and a branch,
// and the latency of its first operands, once in 8 steps.
template <class Math>
constexpr int steps_together(int steps) {
    return !Math::kFloat ? steps : steps % 8 == 0 ? 8 : steps % 4 == 0 ? 4 : steps;
}

// d += A B^T over the whole row of the tile B: S = Q K^T. B has 8 kN rows; `a` is SharedRows or RegisterRows.
// why: with kM 1 a block of B is asked for two pairs of columns early, to cover the latency of ldmatrix. With
// kM 2 ptxas finds the registers it can spare for that itself; asked to, it spills on some architecture.
template <class Math, class TileB, int kM, int kN, class RowsA>
CF_DEVICE void multiply_by_rows(float (&d)[kM][kN][4], RowsA a, uint32_t b_address) {
    constexpr int kAllSteps = TileB::kPitch / 32;
    constexpr int kSteps = RowsA::kInRegisters ? kAllSteps : steps_together<Math>(kAllSteps);
    constexpr int kPairs = kN / 2, kBlocks = kSteps * kPairs, kAhead = kM == 1 && !Math::kFloat ? 2 : 0;
    static_assert(TileB::kRows == 8 * kN && kN % 2 == 0, "one block of B makes two n8 columns");
    BlockReader<TileB, Order::chunks_first> b(b_address);
#pragma unroll 1
    for (int done = 0; done < kAllSteps; done += kSteps) {
        uint32_t b_blocks[kBlocks][4];
        CF_UNROLL
        for (int i = 0; i < kAhead; i++) b.load(b_blocks[i], i % kPairs * 16, i / kPairs);
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            typename Math::Fragment a_step[kM];
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                uint32_t a_block[4];
                a.load(a_block, m, step);
                a_step[m] = Math::prepare(a_block);
            }
            CF_UNROLL
            for (int pair = 0; pair < kPairs; pair++) {
                const int i = step * kPairs + pair, next = i + kAhead;
                if (next < kBlocks) b.load(b_blocks[next], next % kPairs * 16, next / kPairs);
                const auto b_step = Math::prepare(b_blocks[i]);
                CF_UNROLL
                for (int m = 0; m < kM; m++) {
                    Math::multiply(d[m][2 * pair], a_step[m], b_step, 0);
                    Math::multiply(d[m][2 * pair + 1], a_step[m], b_step, 1);
                }
            }
        }
        a.advance(kSteps);
        b.advance(0, kSteps);
    }
}

// Reads a tile of floats as the B operand of a product over its rows, in the key order of
// Math::from_accumulator.
//
// layout: lane (g, t) reads chunk c of rows 2t and 2t + 1 of 8 rows, c = g / 2 for even and (g / 2) ^ 5 for odd
// g: for a group of 32 columns two 16-byte loads, whose four elements are column g of four n8 products. So n8
// product n of the group stands for columns 4 c + n. The 8 lanes of a phase (two chunks, rows 0 2 4 6 or 1 3 5
// 7) meet 8 different groups of 4 banks.
// why: an accumulator then holds, in its columns 2t of a quad, chunks 0 to 3 of the group, and 5 4 7 6 in 2t +
// 1: whole 32-byte sectors of a row, so that it can leave without an exchange.
CF_DEVICE constexpr int pair_chunk(int g) { return g % 2 == 0 ? g / 2 : g / 2 ^ 5; }
template <class T>
struct RowPairReader {
    uint32_t even_address, odd_address;

    CF_DEVICE explicit RowPairReader(uint32_t tile_address) {
        static_assert(sizeof(typename T::Element) == 4 && T::kSwizzledChunks == 8);
        const int lane = threadIdx.x % 32;
        const int chunk = pair_chunk(lane / 4);
        even_address = tile_address + T::offset(lane % 4 * 2, chunk);
        odd_address = tile_address + T::offset(lane % 4 * 2 + 1, chunk);
    }
    // Registers b0 of the four n8 products of columns 32 * group .. into even, b1 into odd; `row` is a
    // multiple of 8.
    CF_DEVICE void load(uint32_t (&even)[4], uint32_t (&odd)[4], int row, int group) const {
        const uint4 first = ld_shared<uint4>(even_address + row * T::kPitch + group * 128);
        const uint4 second = ld_shared<uint4>(odd_address + row * T::kPitch + group * 128);
        even[0] = first.x, even[1] = first.y, even[2] = first.z, even[3] = first.w;
        odd[0] = second.x, odd[1] = second.y, odd[2] = second.z, odd[3] = second.w;
    }
};

// d += A B over kRows of the tile B, with A the accumulator of an earlier product: O += P V. B is 8 kN columns
// from `b_address` on, of a tile of as many or, at a multiple of 128 bytes, of more; or, of 16-bit elements, from the
// part of so many columns whose number is given.
template <class Math, class TileB, int kM, int kN, int kNA>
CF_DEVICE void multiply_by_columns(float (&d)[kM][kN][4], const float (&a)[kM][kNA][4], uint32_t b_address,
                                   int part = 0) {
    static_assert(TileB::kRows == 8 * kNA, "A has a column for each row of B");
    static_assert(TileB::kColumns % (8 * kN) == 0, "B is whole parts of its tile");
    constexpr int kSteps = TileB::kRows / Math::kDepth;
    if constexpr (Math::kFloat) {
        const RowPairReader<TileB> b(b_address);
        constexpr int kGroups = kN / 4;
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            typename Math::Fragment a_step[kM];
            CF_UNROLL
            for (int m = 0; m < kM; m++) a_step[m] = Math::from_accumulator(a[m], step);
            CF_UNROLL
            for (int group = 0; group < kGroups; group++) {
                // why: with 128 sums the compiler would spill to read ahead.
                // sync: orders nothing that needs it, but no load of shared memory is moved across.
                if constexpr (kN >= 32) __syncwarp();
                uint32_t even[4], odd[4];
                b.load(even, odd, step * 8, group);
                CF_UNROLL
                for (int i = 0; i < 4; i++) {
                    typename Math::Fragment column;    // registers 0 and 1: b0 and b1 of n8 product i
                    Math::prepare(column, 0, even[i]);
                    Math::prepare(column, 1, odd[i]);
                    CF_UNROLL
                    for (int m = 0; m < kM; m++) Math::multiply(d[m][4 * group + i], a_step[m], column, 0);
                }
            }
        }
    } else {
        BlockReader<TileB, Order::rows_first> b(b_address);
        b.begin_at(part * (kN / 2));
        constexpr int kPairs = kN / 2, kBlocks = kSteps * kPairs, kAhead = kM == 1 && !Math::kFloat ? 2 : 0;
        uint32_t b_blocks[kBlocks][4];
        CF_UNROLL
        for (int i = 0; i < kAhead; i++) b.load_transposed(b_blocks[i], i / kPairs * 16, i % kPairs);
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            typename Math::Fragment a_step[kM];
            CF_UNROLL
            for (int m = 0; m < kM; m++) a_step[m] = Math::from_accumulator(a[m], step);
            CF_UNROLL
            for (int pair = 0; pair < kPairs; pair++) {
                const int i = step * kPairs + pair, next = i + kAhead;
                if (next < kBlocks) b.load_transposed(b_blocks[next], next / kPairs * 16, next % kPairs);
                const auto b_step = Math::prepare(b_blocks[i]);
                CF_UNROLL
                for (int m = 0; m < kM; m++) {
                    Math::multiply(d[m][2 * pair], a_step[m], b_step, 0);
                    Math::multiply(d[m][2 * pair + 1], a_step[m], b_step, 1);
                }
            }
        }
    }
}

// The column of element e of d[m][n] after multiply_by_columns.
template <class Math>
CF_DEVICE int output_column(int n, int e) {
    const int t = threadIdx.x % 4;
    return Math::kFloat ? n / 4 * 32 + pair_chunk(2 * t + e % 2) * 4 + n % 4 : 8 * n + 2 * t + e % 2;
}
