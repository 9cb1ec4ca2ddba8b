// The interpreter of score functions: a graph that Python has traced, as instructions over the tiles of the core.
//
//   [F.1]  values per lane (head, query) and per key, once for each tile
//   [F.2]  values per pair, some keys at a time: every instruction is a loop of vectors over registers in L1
//   [F.3]  gradients of arguments: each slice of jobs sums its own in double; slices are added in their order
//
// Source: the graph is cupy_flash/program/graph.py's, its instructions are cupy_flash/program/machine.py's.
// Memory: registers of lanes have one row of kPanel, of keys as many reals as a tile has keys, of pairs kStrip rows.
#include "function.h"
#include "elementary.h"
#include "score.h"

#define ALWAYS __attribute__((always_inline)) inline    // of members

namespace {

constexpr int64_t kStrip = 16;    // keys at a time: a register has 2 KB of floats
constexpr int64_t kTileKeys = kSpanKeys;

template <class Real>
struct Machine {
    static constexpr int64_t w = W<Real>, panel = kPanel<Real>;
    using Reals = V<Real>;
    using Ints = I<Real>;

    const Score<Real>& score;
    const Panel<Real>& lanes;
    Call& call;
    const Function& f;
    const FunctionTile& t;
    Real *visible, *kept,
        *space;     // -inf where a pair is hidden, and null if all are seen; what gradients begin with
    bool checks;    // indices; derivatives read what values have read
    int64_t first = 0, rows = 1;    // of the keys at hand, and rows of what is being made
    Real* at[kMostRegisters];
    int64_t step[kMostRegisters];    // from row to row of pairs; 0 where there is but one

    explicit Machine(const FunctionTile& tile)
        : score(*static_cast<const Score<Real>*>(tile.score)),
          lanes(*static_cast<const Panel<Real>*>(tile.panel)), call(score.p), f(*call.function), t(tile),
          visible(static_cast<Real*>(tile.space)), kept(visible + kTileKeys * panel),
          space(kept + kTileKeys * panel), checks(!tile.gradient) {}

    static Ints ints(Reals x) { return (Ints)x; }
    static Ints of_32_bits(Ints x) {
        if constexpr (sizeof(Real) == 8) return (x << 32) >> 32;
        return x;
    }

    // ---- loops

    template <class Make>
    ALWAYS void each(const Instruction& x, Make make) {
        Real* to = at[x.to];
        for (int64_t r = 0; r < rows; ++r, to += panel)
            UNROLL for (int64_t j = 0; j < panel; j += w) store(to + j, (Reals)make(r, j));
    }
    Reals operand(int32_t of, int64_t r, int64_t j) const { return load(at[of] + r * step[of] + j); }
    template <class Make>
    ALWAYS void unary(const Instruction& x, Make make) {
        const Real* a = at[x.from[0]];
        int64_t a_step = step[x.from[0]];
        each(x, [&](int64_t r, int64_t j) { return make(load(a + r * a_step + j)); });
    }
    template <class Make>
    ALWAYS void binary(const Instruction& x, Make make) {
        const Real *a = at[x.from[0]], *b = at[x.from[1]];
        int64_t a_step = step[x.from[0]], b_step = step[x.from[1]];
        each(x,
             [&](int64_t r, int64_t j) { return make(load(a + r * a_step + j), load(b + r * b_step + j)); });
    }
    template <class Make>
    ALWAYS void of_ints(const Instruction& x, Make make) {
        binary(x, [&](Reals a, Reals b) { return make(ints(a), ints(b)); });
    }

    // ---- elements of arguments

    // Offsets of the elements that a vector of indices names, cut to the extents; `far` ones in `wide`.
    struct Places {
        Ints offset = {}, outside = {};
        int64_t wide[w] = {};
    };
    ALWAYS Places places(const Instruction& x, const FunctionArray& a, const int64_t* strides,
                         const int32_t* indices, int64_t r, int64_t j) {
        Places p;
        for (int n = 0; n < a.axes; ++n) {
            Ints index = ints(operand(indices[n], r, j)), last = Ints{} + Int<Real>(a.extents[n] - 1);
            Ints inside = index < 0 ? Ints{} : index;
            inside = inside > last ? last : inside;
            p.outside |= inside != index;
            p.offset += inside * Int<Real>(strides[n]);
            if (a.far)
                for (int l = 0; l < w; ++l) p.wide[l] += inside[l] * strides[n];
        }
        if (checks && any_bit(p.outside)) refuse(x, a, r, j);
        return p;
    }
    static Ints one_after_another() {
        Ints x;
        for (int l = 0; l < w; ++l) x[l] = l;
        return x;
    }

    template <class To, class From, class Convert>
    ALWAYS void load_as(const Instruction& x, const FunctionArray& a, Convert convert) {
        const From* data = static_cast<const From*>(a.data);
        const Ints up = one_after_another();
        each(x, [&](int64_t r, int64_t j) {
            Places p = places(x, a, a.strides, x.from, r, j);
            union {
                To element[w];
                Reals all;
            } y;
            if (a.far) {
                for (int l = 0; l < w; ++l) y.element[l] = To(convert(data[p.wide[l]]));
                return y.all;
            }
            const From* from = data + p.offset[0];
            // why: lanes are queries, so that a table by distance is read in one piece
            if (!any_bit(p.offset ^ (up + p.offset[0]))) {
                if constexpr (__is_same(To, From)) memcpy(&y, from, sizeof y);
                else
                    for (int l = 0; l < w; ++l) y.element[l] = To(convert(from[l]));
            } else
                for (int l = 0; l < w; ++l) y.element[l] = To(convert(data[p.offset[l]]));
            return y.all;
        });
    }
    void load_element(const Instruction& x) {
        const FunctionArray& a = f.arrays[x.array];
        using Whole = Int<Real>;
        const auto same = [](auto y) { return y; };
        switch (a.type) {
            case kOfF32: return load_as<Real, float>(x, a, same);
            case kOfF64: return load_as<Real, double>(x, a, same);
            case kOfF16: return load_as<Real, uint16_t>(x, a, from_f16);
            case kOfBf16: return load_as<Real, uint16_t>(x, a, from_bf16);
            case kOfInt32: return load_as<Whole, int32_t>(x, a, same);
            case kOfInt8: return load_as<Whole, int8_t>(x, a, same);
            case kOfUint8: return load_as<Whole, uint8_t>(x, a, same);
            default: return load_as<Whole, uint8_t>(x, a, [](uint8_t y) { return -(y != 0); });
        }
    }

    // Ends the call if a pair that is seen has one of these indices outside of its axis.
    __attribute__((noinline)) void refuse(const Instruction& x, const FunctionArray& a, int64_t r,
                                          int64_t j) {
        for (int n = 0; n < a.axes; ++n) {
            const Ints index = ints(operand(x.from[n], r, j));
            for (int64_t l = 0; l < w; ++l) {
                if (index[l] >= 0 && index[l] < a.extents[n]) continue;
                int64_t key = x.reach == kOfPairs ? first + r : x.reach == kOfKeys ? r * panel + j + l : -1;
                if (!seen(key, x.reach == kOfKeys ? -1 : j + l)) continue;
                State fine = kFine;
                if (__atomic_compare_exchange_n(&call.state, &fine, kOutside, false, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED)) {
                    Function& told = *call.function;
                    told.array = x.array, told.axis = n, told.index = int32_t(index[l]);
                }
            }
        }
    }
    // Whether any pair of a key and a lane is seen; -1 stands for all of them.
    bool seen(int64_t key, int64_t lane) const {
        int64_t k0 = key < 0 ? 0 : key, k1 = key < 0 ? t.keys : least(key + 1, t.keys);
        int64_t l0 = lane < 0 ? 0 : lane, l1 = lane < 0 ? lanes.lanes : least(lane + 1, lanes.lanes);
        for (int64_t k = k0; k < k1; ++k)
            for (int64_t l = l0; l < l1; ++l)
                if (!visible || visible[k * panel + l] == 0) return true;
        return false;
    }

    // ---- gradients

    void slope(const Instruction& x) {
        binary(x, [](Reals ds, Reals by) { return ds != zero<Real>() ? ds * by : ds; });
    }
    // Adds gradients to the elements that were read.
    void share(const Instruction& x) {
        if (!t.sums) return;
        const FunctionArray& a = f.arrays[x.array];
        double* sums = t.sums + a.sums;
        int64_t strides[kMostAxes], size = 1;
        for (int n = a.axes - 1; n >= 0; --n) strides[n] = size, size *= a.extents[n];
        const Real* ds = at[kGradient];
        const auto part = [&](int64_t r, int64_t j) {
            Reals y = load(ds + r * panel + j);
            // why: what hides a pair may have no derivative there.
            return y != zero<Real>() ? y * operand(x.from[0], r, j) : zero<Real>();
        };
        const auto add = [&](const Places& p, Reals y) {
            for (int l = 0; l < w; ++l) sums[a.far ? p.wide[l] : p.offset[l]] += double(y[l]);
        };
        const int32_t* indices = x.from + 1;
        if (x.reach == kOfPairs) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < panel; j += w) add(places(x, a, strides, indices, r, j), part(r, j));
        } else if (x.reach == kOfLanes) {
            for (int64_t j = 0; j < panel; j += w) {
                Reals all = zero<Real>();
                for (int64_t r = 0; r < rows; ++r) all += part(r, j);
                add(places(x, a, strides, indices, 0, j), all);
            }
        } else {
            for (int64_t r = 0; r < rows; ++r) {
                Reals all = zero<Real>();
                for (int64_t j = 0; j < panel; j += w) all += part(r, j);
                int64_t key = first + r;
                const Places p = places(x, a, strides, indices, key / panel, key % panel / w * w);
                sums[a.far ? p.wide[key % w] : p.offset[key % w]] += double(sum(all));
            }
        }
    }

    // ---- instructions

    template <class Lane>
    ALWAYS void leaf(const Instruction& x, Lane lane) {
        union {
            Int<Real> number[w];
            Reals all;
        } y;
        each(x, [&](int64_t r, int64_t j) {
            for (int64_t l = 0; l < w; ++l) y.number[l] = Int<Real>(lane(r * panel + j + l));
            return y.all;
        });
    }
    void spread(const Instruction& x) {
        const Int<Real>* from = reinterpret_cast<const Int<Real>*>(at[x.from[0]]) + first;
        each(x, [&](int64_t r, int64_t) { return Ints{} + from[r]; });
    }
    __attribute__((noinline)) void run(const Instruction& x) {
        const Ints one = (Ints)splat<Real>(1), sign = (Ints)splat<Real>(Real(-0.0));
        switch (x.op) {
            case kBatch: return leaf(x, [&](int64_t) { return score.s.batch; });
            case kHead: return leaf(x, [&](int64_t l) { return lanes.head[l]; });
            case kQuery: return leaf(x, [&](int64_t l) { return lanes.query[l]; });
            case kKey: return leaf(x, [&](int64_t l) { return t.from + l; });
            case kConstantFloat: return each(x, [&](int64_t, int64_t) { return splat<Real>(Real(x.value)); });
            case kConstantInt: return leaf(x, [&](int64_t) { return int64_t(x.value); });
            case kConstantBool: return leaf(x, [&](int64_t) { return x.value != 0 ? -1 : 0; });
            case kLoadFloat:
            case kLoadInt:
            case kLoadBool: return load_element(x);
            case kCopy: return unary(x, [](Reals a) { return a; });
            case kSpread: return spread(x);
            case kSlope: return slope(x);
            case kShare: return share(x);
            case kBoolToFloat: return unary(x, [&](Reals a) { return ints(a) & one; });
            case kBoolToInt: return unary(x, [&](Reals a) { return -ints(a); });
            case kIntToFloat:
                return unary(x, [](Reals a) { return __builtin_convertvector(ints(a), Reals); });
            case kAddFloat: return binary(x, [](Reals a, Reals b) { return a + b; });
            case kSubtractFloat: return binary(x, [](Reals a, Reals b) { return a - b; });
            case kMultiplyFloat: return binary(x, [](Reals a, Reals b) { return a * b; });
            case kDivideFloat: return binary(x, [](Reals a, Reals b) { return a / b; });
            case kNegativeFloat: return unary(x, [](Reals a) { return -a; });
            case kAbsoluteFloat: return unary(x, [&](Reals a) { return ints(a) & ~sign; });
            case kMinimumFloat:
                return binary(x, [](Reals a, Reals b) { return ((a <= b) | (a != a)) ? a : b; });
            case kMaximumFloat:
                return binary(x, [](Reals a, Reals b) { return ((a >= b) | (a != a)) ? a : b; });
            case kExp: return unary(x, [](Reals a) { return exact_exp<Real>(a); });
            case kLog: return unary(x, [](Reals a) { return exact_log<Real>(a); });
            case kTanh: return unary(x, [](Reals a) { return tanh_<Real>(a); });
            case kSqrt:
                return unary(x, [](Reals a) {
                    Reals y;
                    for (int l = 0; l < w; ++l)
                        if constexpr (sizeof(Real) == 4) y[l] = __builtin_sqrtf(a[l]);
                        else y[l] = __builtin_sqrt(a[l]);
                    return y;
                });
            case kAddInt: return of_ints(x, [](Ints a, Ints b) { return of_32_bits(a + b); });
            case kSubtractInt: return of_ints(x, [](Ints a, Ints b) { return of_32_bits(a - b); });
            case kMultiplyInt: return of_ints(x, [](Ints a, Ints b) { return of_32_bits(a * b); });
            case kFloorDivideInt:
                return of_ints(x, [](Ints a, Ints b) { return floor_quotient<Real>(a, b, &a); });
            case kRemainderInt:
                return of_ints(x, [](Ints a, Ints b) {
                    Ints left;
                    floor_quotient<Real>(a, b, &left);
                    return left;
                });
            case kNegativeInt: return unary(x, [](Reals a) { return of_32_bits(-ints(a)); });
            case kAbsoluteInt:
                return unary(x, [](Reals a) { return of_32_bits(ints(a) < 0 ? -ints(a) : ints(a)); });
            case kMinimumInt: return of_ints(x, [](Ints a, Ints b) { return a < b ? a : b; });
            case kMaximumInt: return of_ints(x, [](Ints a, Ints b) { return a > b ? a : b; });
            case kLessFloat: return binary(x, [](Reals a, Reals b) { return a < b; });
            case kLessEqualFloat: return binary(x, [](Reals a, Reals b) { return a <= b; });
            case kEqualFloat: return binary(x, [](Reals a, Reals b) { return a == b; });
            case kNotEqualFloat: return binary(x, [](Reals a, Reals b) { return a != b; });
            case kLessInt: return of_ints(x, [](Ints a, Ints b) { return a < b; });
            case kLessEqualInt: return of_ints(x, [](Ints a, Ints b) { return a <= b; });
            case kEqualInt: return of_ints(x, [](Ints a, Ints b) { return a == b; });
            case kNotEqualInt: return of_ints(x, [](Ints a, Ints b) { return a != b; });
            case kAnd: return of_ints(x, [](Ints a, Ints b) { return a & b; });
            case kOr: return of_ints(x, [](Ints a, Ints b) { return a | b; });
            case kNot: return unary(x, [](Reals a) { return ~ints(a); });
            case kWhere:
                return each(x, [&](int64_t r, int64_t j) {
                    return ints(operand(x.from[0], r, j)) != 0 ? operand(x.from[1], r, j)
                                                               : operand(x.from[2], r, j);
                });
        }
    }

    // Values of a tile; what its gradient will need is kept.
    void run_values() {
        Real* scores = static_cast<Real*>(t.scores);
        if (call.d_o.data && f.keeps == kScores) memcpy(kept, scores, size_t(t.keys * panel) * sizeof(Real));
        if (f.reads && (call.mask.data || lanes.cut(t.from, t.from + t.keys) || score.spans.there() ||
                        call.blocks.table)) {
            // why: of a pair that nobody sees, any index will do
            memset(visible, 0, size_t(t.keys * panel) * sizeof(Real));
            score.hide_unseen(lanes, t.from, t.keys, visible, static_cast<const Real*>(t.seen));
        } else {
            visible = nullptr;
        }
        run(f.value, scores);
    }
    void run_gradients() {
        if (f.slope.count[kOfPairs]) run(f.slope, kept);
    }

  private:
    void run(const FunctionProgram& g, Real* scores) {
        const int64_t sizes[] = {panel, up(kTileKeys, panel), kStrip * panel};
        int32_t number = kFirstRegister;
        for (int reach = kOfLanes; reach <= kOfPairs; ++reach)
            for (int64_t n = 0; n < g.registers[reach]; ++n, ++number, space += sizes[reach])
                at[number] = space, step[number] = reach == kOfLanes ? 0 : panel;
        const Instruction* x = g.code;
        for (int64_t n = 0; n < g.count[kOfLanes]; ++n) run(*x++);    // [F.1]
        rows = blocks_of(t.keys, panel);
        for (int64_t n = 0; n < g.count[kOfKeys]; ++n) run(*x++);
        step[kScore] = step[kResult] = step[kGradient] = step[kKept] = panel;
        for (first = 0; first < t.keys; first += kStrip) {    // [F.2]
            rows = least(kStrip, t.keys - first);
            at[kScore] = at[kResult] = scores + first * panel;
            at[kKept] = call.d_o.data ? kept + first * panel : kept;           // of a forward pass nobody's
            at[kGradient] = static_cast<Real*>(t.gradient) + first * panel;    // none of values
            for (int64_t n = 0; n < g.count[kOfPairs]; ++n) run(x[n]);
        }
    }
};

template <class Real>
void run(const FunctionTile& tile) {
    Machine<Real> machine(tile);
    tile.gradient ? machine.run_gradients() : machine.run_values();
}

// One element of a gradient, at a place of the array that gets it.
void write(const FunctionArray& a, int64_t place, double x) {
    constexpr Type types[] = {kF32, kF16, kBf16, kF64};
    narrow(a.gradient, place, &x, 1, 1, types[a.gradient_type]);
}

}    // namespace

void cupy_flash_function_float(const FunctionTile& tile) { run<float>(tile); }
void cupy_flash_function_double(const FunctionTile& tile) { run<double>(tile); }

int32_t cupy_flash_function_sums(Call* p) {
    const Function& f = *p->function;
    for (int64_t number = 0; number < f.array_count; ++number) {
        const FunctionArray& a = f.arrays[number];
        if (!a.gradient) continue;
        int64_t size = 1, index[kMostAxes] = {};
        for (int n = 0; n < a.axes; ++n) size *= a.extents[n];
        for (int64_t i = 0, place = 0; i < size; ++i) {
            double total = 0;
            for (int64_t slice = 0; slice < f.slices; ++slice)    // [F.3]
                total += f.sums[slice * f.sums_each + a.sums + i];
            write(a, place, total);
            for (int n = a.axes - 1; n >= 0; --n) {    // the next element
                place += a.gradient_strides[n];
                if (++index[n] < a.extents[n]) break;
                place -= index[n] * a.gradient_strides[n], index[n] = 0;
            }
        }
    }
    return p->state;
}
