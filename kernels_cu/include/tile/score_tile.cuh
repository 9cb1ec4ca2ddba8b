// What happens to scores between q k^T and the softmax: scale, softcap, score function, ALiBi, bias and masks, for the
// fragments of a tile that one thread holds.
// Design note: docs/kernels/forward.md.
//
// layout: s[m][n][e] as in mma.cuh. With kKeysInRows false (S) rows are queries and columns keys; with true
// (S^T) the other way.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"

// Positions of a thread's elements within the sequence.
template <bool kKeysInRows>
struct Positions {
    int32_t row, column;    // of element [0][0][0]

    // Of a warp whose 16-row blocks start at row_first, in a tile whose columns start at column_first.
    CF_DEVICE Positions(int32_t row_first, int32_t column_first)
        : row(row_first + threadIdx.x % 32 / 4), column(column_first + threadIdx.x % 4 * 2) {}
    CF_DEVICE static constexpr int row_step(int m, int e) { return 16 * m + 8 * (e / 2); }
    CF_DEVICE static constexpr int column_step(int n, int e) { return 8 * n + e % 2; }
    // Of n8 column n.
    CF_DEVICE Positions of_column(int n) const {
        Positions there = *this;
        there.column += 8 * n;
        return there;
    }
    CF_DEVICE int32_t query(int m, int n, int e) const {
        return kKeysInRows ? column + column_step(n, e) : row + row_step(m, e);
    }
    CF_DEVICE int32_t key(int m, int n, int e) const {
        return kKeysInRows ? row + row_step(m, e) : column + column_step(n, e);
    }
};

// Calls act(x, n) for each n8 column, given as float x[kM][1][4].
// why not unrolled: act is long code that few calls need. So it is compiled once, for column 0, and each column is moved
// there in turn, at one move per element.
template <int kM, int kN, class Act>
CF_DEVICE void column_by_column(float (&s)[kM][kN][4], Act act) {
    if constexpr (kN == 1) {
        act(s, 0);
    } else {
#pragma unroll 1
        for (int n = 0; n < kN; n++) {
            float x[kM][1][4];
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) x[m][0][e] = s[m][0][e];
            }
            act(x, n);
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) {
                    CF_UNROLL
                    for (int i = 0; i + 1 < kN; i++) s[m][i][e] = s[m][i + 1][e];
                    s[m][kN - 1][e] = x[m][0][e];
                }
            }
        }
    }
}

// The band with limits that fit 32 bits: query i keeps key j if i + low <= j <= i + high and j < seqlen_k.
// why: sequences are shorter than 2^30, so such a limit is open, its negative keeps nothing, and no sum of
// both wraps.
struct NarrowBand {
    static constexpr int32_t kFar = (1 << 30) - 1;
    int32_t low, high, seqlen_k;

    CF_DEVICE explicit NarrowBand(const Band& band)
        : low(narrow(band.low)), high(narrow(band.high)), seqlen_k(band.seqlen_k) {}
    CF_DEVICE static int32_t narrow(int64_t limit) {
        return static_cast<int32_t>(larger<int64_t>(-kFar, smaller<int64_t>(limit, kFar)));
    }
    CF_DEVICE int32_t first_key(int32_t query) const { return query + low; }
    CF_DEVICE int32_t end_key(int32_t query) const { return smaller(query + high + 1, seqlen_k); }
};

// -inf in one row of the thread, but for columns first .. end - 1 counted from the thread's first.
template <class Acc, int kM, int kN>
CF_DEVICE void mask_row(Acc (&s)[kM][kN][4], int m, int half, int32_t first, int32_t end) {
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const int column = 8 * n + i;
            const bool keep = column >= first && column < end;
            s[m][n][2 * half + i] = keep ? s[m][n][2 * half + i] : -Acc(kInfinity);
        }
    }
}

// -inf where the key lies outside the sequence or the band.
template <class Acc, int kM, int kN, bool kKeysInRows>
CF_DEVICE void mask_band(Acc (&s)[kM][kN][4], const Positions<kKeysInRows>& at, const NarrowBand& band) {
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            // why: limits relative to the thread's first key or query make every comparison one with a
            // constant.
            const int32_t row = at.row + 16 * m + 8 * half;
            const int32_t first = kKeysInRows ? row - band.high - at.column : band.first_key(row) - at.column;
            const int32_t end = kKeysInRows ? (row < band.seqlen_k ? row - band.low + 1 - at.column : 0)
                                            : band.end_key(row) - at.column;
            mask_row(s, m, half, first, end);
        }
    }
}

// -inf where a mask of keys, the same for all queries, forbids one. first: the key of the thread's first column.
template <int kM, int kN>
CF_DEVICE void mask_keys(float (&s)[kM][kN][4], const uint8_t* attend, int64_t stride, int32_t first,
                         int32_t last) {
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const bool keep = attend[smaller(first + 8 * n + i, last) * stride];
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                CF_UNROLL
                for (int half = 0; half < 2; half++)
                    s[m][n][2 * half + i] = keep ? s[m][n][2 * half + i] : -kInfinity;
            }
        }
    }
}

// tanh. why: accurate to 2^-22 of its range with two special functions, enough for scores of 16-bit
// products; float inputs get the library's, which is accurate near 0 too. (tanh.approx errs by 2^-11, times
// the cap: too much for either.)
template <bool kAccurate>
CF_DEVICE float bounded_tanh(float x) {
    if constexpr (kAccurate) return hyperbolic_tangent(x);
    return fmaf(-2.0f, rcp(1.0f + ex2(x * (2 * kLog2e))), 1.0f);
}

// The rules of HeadScore, in their order, with the tests on what is present outside the loops over elements.
// Elements outside the sequence or the band come out as anything; the caller masks them.
template <class Math>
struct TileScore {
    // why not of floats: beside their products no register is left, and with head dim 256 they spill.
    static constexpr bool kBlocks = !Math::kFloat;
    HeadScore<float> head;
    int32_t last_query, last_key;    // why: positions are clamped, no load leaves the mask or the bias

    CF_DEVICE TileScore(const Score& score, const Sequence& sequence, int32_t of_head)
        : head(score, sequence, of_head), last_query(sequence.seqlen_q - 1), last_key(sequence.seqlen_k - 1) {
    }

    // As of HeadScore.
    CF_DEVICE bool reach(int32_t query_first, int32_t query_end, int32_t key_first, int32_t key_end) const {
        if constexpr (kBlocks) return head.reach(query_first, query_end, key_first, key_end);
        return head.spans.reach(query_first, query_end, key_first, key_end);
    }

    // scale * q.k, capped.
    template <int kM, int kN>
    CF_DEVICE void apply_softcap(float (&s)[kM][kN][4]) const {
        if (head.softcap == 0) {
            each(s, [&](float& x, int, int, int) { x *= head.scale; });
        } else {
            const float inverse = head.scale / head.softcap;
            const auto bound = [&](float& x, int, int, int) {
                x = head.softcap * bounded_tanh<Math::kFloat>(x * inverse);
            };
            if constexpr (Math::kFloat) column_by_column(s, [&](auto& x, int) { each(x, bound); });
            else each(s, bound);
        }
    }
    template <int kM, int kN, bool kKeysInRows>
    CF_DEVICE void add_alibi(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at) const {
        if (head.rule.alibi_slopes) {
            const float distance = static_cast<float>(at.query(0, 0, 0) + head.offset - at.key(0, 0, 0));
            each(s, [&](float& x, int m, int n, int e) {
                using At = Positions<kKeysInRows>;
                const int step = At::row_step(m, e) - At::column_step(n, e);
                x = fmaf(-head.slope, fabsf(distance + static_cast<float>(kKeysInRows ? -step : step)), x);
            });
        }
    }
    // The same for one row with a slope of its own; distance: of the thread's first column.
    template <int kM, int kN>
    CF_DEVICE static void add_alibi_row(float (&s)[kM][kN][4], int m, int half, float slope, float distance) {
        CF_UNROLL
        for (int n = 0; n < kN; n++) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                float& x = s[m][n][2 * half + i];
                x = fmaf(-slope, fabsf(distance - static_cast<float>(8 * n + i)), x);
            }
        }
    }
    // The score function of each, + ALiBi + bias, -inf where mask or bias forbid.
    template <int kM, int kN, bool kKeysInRows>
    CF_DEVICE void apply_score_mod(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at) const {
#if defined(CF_FUNCTION)
        // why positions as they are: a function cuts its indices off.
        const auto call = [&](auto& x, const auto& there) {
            each(x, [&](float& y, int m, int n, int e) {
                y = head.function(y, there.query(m, n, e), there.key(m, n, e));
            });
        };
        // why not all in turns: what neighbours have in common is computed once, and a move per element is more
        // than a short function takes.
        if constexpr (kShortFunction) call(s, at);
        else column_by_column(s, [&](auto& x, int n) { call(x, at.of_column(n)); });
#endif
        add_alibi(s, at);
        if (head.rule.bias.data) add_bias(s, at, head.rule.bias, head.bias_first);
        if (head.rule.mask.data)
            each_of<uint8_t>(s, at, head.rule.mask, head.mask_first,
                             [](float& x, uint8_t attend) { x = attend ? x : -kInfinity; });
    }
    // + the bias, or an array that is like it, whose position (0, 0) is element `first`.
    template <int kM, int kN, bool kKeysInRows>
    CF_DEVICE void add_bias(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at, const Tensor& bias,
                            int64_t first) const {
        column_by_column(s, [&](auto& x, int n) {
            const auto there = at.of_column(n);
            switch (head.rule.bias_type) {
                case kBiasF16: add_stored<__half>(x, there, bias, first); break;
                case kBiasBF16: add_stored<__nv_bfloat16>(x, there, bias, first); break;
                case kBiasF32: add_stored<float>(x, there, bias, first); break;
                default: add_stored<double>(x, there, bias, first);
            }
        });
    }

    // Calls act(element, query, key), both within the sequence.
    template <int kM, int kN, bool kKeysInRows, class Act>
    CF_DEVICE void each_pair(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at, Act act) const {
        each(s, [&](float& x, int m, int n, int e) {
            act(x, smaller(at.query(m, n, e), last_query), smaller(at.key(m, n, e), last_key));
        });
    }

    // -inf where no interval of the spans, or no block, keeps a pair.
    template <int kM, int kN, bool kKeysInRows>
    CF_DEVICE void apply_mask(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at) const {
        if (head.spans.bounds) mask_unless(s, at, head.spans);
        if constexpr (kBlocks)
            if (head.blocks.table && !are_whole<kM, kN>(at)) mask_unless(s, at, head.blocks);
    }

  private:
    // -inf where `list` does not keep a pair.
    template <class List, int kM, int kN, bool kKeysInRows>
    CF_DEVICE void mask_unless(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at,
                               const List& list) const {
        column_by_column(s, [&](auto& x, int of) {
            each_pair(x, at.of_column(of), [&](float& y, int32_t query, int32_t key) {
                if (!list.keeps(query, key)) y = -kInfinity;
            });
        });
    }
    // Whether all blocks that the warp's scores lie in are seen as a whole. why one element of each 16 x 8: a block has
    // 16 queries and keys or more, and a warp's scores begin at a multiple of 16, so that all lanes see the same blocks.
    template <int kM, int kN, bool kKeysInRows> CF_DEVICE bool are_whole(
        const Positions<kKeysInRows>& at) const {
        bool all = true;
#pragma unroll 1
        for (int n = 0; n < kM * kN; n++)
            all = all && head.blocks.is_whole(smaller(at.query(n / kN, n % kN, 0), last_query),
                                              smaller(at.key(n / kN, n % kN, 0), last_key));
        return all;
    }
    template <class Bias, int kM, int kN, bool kKeysInRows>
    CF_DEVICE void add_stored(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at, const Tensor& tensor,
                              int64_t first) const {
        each_of<Bias>(s, at, tensor, first, [](float& x, Bias element) {
            const float bias = static_cast<float>(widen(element));
            x = bias == -kInfinity ? bias : x + bias;
        });
    }
    template <int kM, int kN, class Act>
    CF_DEVICE static void each(float (&s)[kM][kN][4], Act act) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) act(s[m][n][e], m, n, e);
            }
        }
    }
    // Calls act(score, element of the tensor at its position).
    template <class Stored, int kM, int kN, bool kKeysInRows, class Act>
    CF_DEVICE void each_of(float (&s)[kM][kN][4], const Positions<kKeysInRows>& at, const Tensor& tensor,
                           int64_t first, Act act) const {
        const Stored* data = static_cast<const Stored*>(tensor.data) + first;
        const int64_t row_stride = kKeysInRows ? tensor.column : tensor.row;
        const int64_t column_stride = kKeysInRows ? tensor.row : tensor.column;
        const int32_t last_row = kKeysInRows ? last_key : last_query;
        const int32_t last_column = kKeysInRows ? last_query : last_key;
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const Stored* row = data + smaller(at.row + 16 * m + 8 * half, last_row) * row_stride;
                CF_UNROLL
                for (int n = 0; n < kN; n++) {
                    CF_UNROLL
                    for (int i = 0; i < 2; i++)
                        act(s[m][n][2 * half + i],
                            row[smaller(at.column + 8 * n + i, last_column) * column_stride]);
                }
            }
        }
    }
};

// Sets the weights that dropout drops to zero. Keys along columns; the first key of the tile is a multiple of
// 4.
//
// why: the four words of one Philox call belong to four neighbouring keys of one query, which two lanes hold.
// So the even lane of a pair computes those of row g and the odd one those of row g + 8, and they exchange
// halves: one call for 4 elements, not for 2.
template <int kM, int kN>
CF_DEVICE void drop_weights(float (&p)[kM][kN][4], const Positions<false>& at, const Dropout& dropout) {
    const bool odd = threadIdx.x & 1;
    column_by_column(p, [&](auto& x, int of) {
        CF_UNROLL
        for (int m = 0; m < kM; m++) {
            const PhiloxWords words =
                dropout.words(at.row + 16 * m + (odd ? 8 : 0), (at.column + 8 * of) / 4);
            const uint32_t (&w)[4] = words.word;
            const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[2], 1);
            const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? w[1] : w[3], 1);
            const uint32_t drawn[4] = {odd ? first : w[0], odd ? second : w[1], odd ? w[2] : first,
                                       odd ? w[3] : second};
            CF_UNROLL
            for (int e = 0; e < 4; e++) x[m][0][e] = drawn[e] >= dropout.threshold ? x[m][0][e] : 0.0f;
        }
    });
}
