// Attention forward on the CPU: FlashAttention-2 with lanes along queries.
//
// Source: A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1. Erratum: its line 10 prints an inverse
// on diag(e^(m_old - m_new)) that must not be there (Dao-AILab/flash-attention issue 991).
//   [A1.4]  a job owns some panels of rows Q_i of one key head                        (lines 3 and 4)
//   [A1.5]  for each chunk of keys: O = 0, row_sum = 0, row_max = -inf
//   [A1.6]  for each block of it that band, spans and blocks reach, and each panel
//   [A1.8]  S^T = score(K_j Q_i^T), -inf where a pair is outside the band or masked
//   [A1.9]  row_max rises; P = e^(S - row_max); row_sum = e^(old_max - row_max) row_sum + rowsum(P);
//           O = e^(old_max - row_max) O
//   [A1.10] O^T = O^T + V_j^T dropout(P)^T
//   [D4]    O, row_sum and row_max of the chunk are merged with those of the chunks before it
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys                  (lines 13 to 15)
//
// Jobs:    (sequence, key head, some panels), all of a head one after the other, those with the most keys first; K
//          and V come into L2 once for all panels of a job, and stay in L3 from job to job.
// Scratch: Q^T and O^T of the panels, the latter twice if keys are more than a chunk, one tile of scores, of mask
//          and of bias, K and V of a block if they have to be copied: of at most 192 queries, 768 with AMX, whatever the lengths.
#include "chunk.h"
#include "lse.h"
#include "pool.h"
#include "score.h"
#include "softmax.h"
#include "triples.h"

namespace {

constexpr int64_t kKeys = kSpanKeys;    // of a block: its scores are 18 KB, K and V 36 KB each at 64 features
// Of a job, for which K and V come into L2 once. why more for tiles: each job transposes V, or splits K and V.
template <class Entry>
constexpr int64_t kMostPanels = (__is_same(Entry, Triples) ? 768
                                 : kTiles                  ? 384
                                                           : 192) /
                                kPanel<float>;

struct Forward {
    Call& p;
    int64_t panels;    // of a job, at most
    int64_t parts;     // jobs of a key head of the longest sequence
};

// A chunk of keys of a panel: its softmax, and O^T.
template <class Real>
struct Chunk : Softmax<Real> {
    Real* o;
    explicit Chunk(Real* o_) : o(o_) {}

    Rows<Real> rows(int j) const {
        return {load(this->row_max + j * W<Real>), load(this->row_sum + j * W<Real>)};
    }
    // [D4] It joins those before it, if it has any key, for `lanes` that are queries, and the next one begins.
    __attribute__((noinline)) void close(Chunk& before, int64_t lanes, int64_t features) {
        constexpr int w = W<Real>;
        if (this->fresh) return;
        Chunk chunk = *this;
        if (before.fresh) {
            *this = Chunk(before.o), before = chunk;
            return;
        }
        for (int j = 0; j * w < lanes; ++j) {
            Rows<Real> all = before.rows(j);
            merge(all, before.o + j * w, rows(j), o + j * w, features, kPanel<Real>);
            store(before.row_max + j * w, all.row_max), store(before.row_sum + j * w, all.row_sum);
        }
        *this = Chunk(o);
    }
};

// Keys whose page lies outside the cache.
template <class Real>
void hide_absent(const Keys<Real>& keys, int64_t from, int64_t count, Real* tile) {
    for (int64_t j = from; j < from + count;) {
        int64_t end = least(from + count, keys.page_end(j));
        if (keys.hidden(j))
            for (int64_t i = (j - from) * kPanel<Real>; i < (end - from) * kPanel<Real>; i += W<Real>)
                store(tile + i, splat<Real>(-kInfinity<Real>));
        j = end;
    }
}

// Computes a job; if it is of triples, `floats` becomes the lanes of each panel that need floats. Else, if it is given, only
// these are computed.
template <class Entry>
void attend(const Forward& f, int64_t number, uint32_t* floats) {
    using Real = RealOf<Entry>;
    constexpr int64_t panel = kPanel<Real>, half = W<Real>, depth = kDepth<Entry>;
    // Products of one vector of a panel. why not of doubles: it would be a tenth of this file's code.
    constexpr bool narrow = sizeof(Real) == sizeof(float);
    constexpr bool in_three = __is_same(Entry, Triples);
    Call& p = f.p;
    // [A1.4]
    int64_t part = f.parts - 1 - number % f.parts, head = number / f.parts, b = head / p.heads_k,
            head_k = head % p.heads_k;
    const Sequence s(p, b);
    int64_t group = p.heads_q / p.heads_k, rows = s.queries * group, d = p.head_dim, dv = p.head_dim_v;
    // why shares: a small job last in each head would leave its thread waiting for one of full size.
    int64_t all = blocks_of(rows, panel), parts = blocks_of(all, f.panels);
    if (part >= parts) return;
    const TileShapes shapes;
    int64_t r0 = part * all / parts * panel, r1 = least(rows, (part + 1) * all / parts * panel);
    int64_t count = blocks_of(r1 - r0, panel), q_space = Columns<Entry>::space(d),
            o_space = up(dv, in_three ? kTile : 1) * panel;
    Keys<Real> keys{p, p.k, s, head_k, d, p.rotate_cache != 0};
    const Keys<Real> values{p, p.v, s, head_k, dv};
    Operand<Entry> k_rows{keys}, v_columns{values};
    Real *q, *o, *o_before, *tile_space, *seen, *bias, *k_space, *v_space;
    Panel<Real>* panels;
    Chunk<Real>*chunks, *before;    // those at hand, and all before them
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(q, count * q_space), x.allocate(o, count * o_space);
        x.allocate(o_before, s.keys > kChunkKeys ? count * o_space : 0);
        x.allocate(tile_space, Columns<Entry>::space(kKeys) + p.function_reals),
            x.allocate(seen, Score<Real>::masked(p) ? kKeys * panel : 0);
        x.allocate(bias, p.bias.data ? kKeys * panel : 0);
        x.allocate(k_space, k_rows.space_of_rows(kKeys)),
            x.allocate(v_space, v_columns.space_of_columns(kKeys));
        x.allocate(panels, count), x.allocate(chunks, count), x.allocate(before, count);
        x.allocate(keys.cos_row, p.rotary / 2), x.allocate(keys.sin_row, p.rotary / 2);
    });
    if (!scratch) return;

    Real* tile = tile_space + Columns<Entry>::lead(kKeys);
    const Score<Real> score(p, s, head_k);
    int64_t begin = s.keys, end = 0;
    for (int64_t n = 0; n < count; ++n) {
        Panel<Real>& x = panels[n] = Panel<Real>(p, s, head_k * group, group, r0 + n * panel, r1);
        Real* columns = q + n * q_space;
        read_panel(columns + Columns<Entry>::lead(d), p.q, x.lanes, x.in(p.q, s), d,
                   score.factor_of_q(kRounds<Entry>));
        if constexpr (in_three) floats[n] = unusual_lanes(columns + Columns<Entry>::lead(d), d);
        else if (floats && !floats[n]) x.end = x.begin;
        Columns<Entry>::of(columns, d, d);
        chunks[n] = Chunk<Real>(o + n * o_space);    // [A1.5]
        before[n] = Chunk<Real>(o_before + n * o_space);
        if (x.begin < x.end) begin = least(begin, x.begin), end = most(end, x.end);
    }
    // why from a multiple of a pair, and of the block: then those of a panel, and so its bits, are the same in any job.
    begin -= begin % depth;
    int64_t chunk = 0;
    for (int64_t j0 = begin / kKeys * kKeys; j0 < end && !pool::stopped(p); j0 += kKeys) {    // [A1.6]
        bool reached = false;
        for (int64_t n = 0; n < count && !reached; ++n) reached = score.reach(panels[n], j0);
        if (!reached) continue;
        if (j0 / kChunkKeys != chunk)
            for (int64_t n = 0; n < count; ++n) chunks[n].close(before[n], panels[n].lanes, dv);
        chunk = j0 / kChunkKeys;
        int64_t from_block = most(j0, begin), to_block = least(j0 + kKeys, end), k_step, v_step;
        const Entry* k_block = k_rows.rows(from_block, to_block - from_block, k_space, &k_step);
        const Entry* v_block = v_columns.columns(from_block, to_block - from_block, v_space, &v_step);
        for (int64_t n = 0; n < count; ++n) {
            const Panel<Real>& x = panels[n];
            int64_t from = most(j0, x.begin), to = least(j0 + kKeys, x.end);
            score.trim(x, &from, &to);
            if (from < to) from -= (from - from_block) % depth;    // a pair begins where those of V do
            int64_t m = to - from;
            int64_t next = to_block + kKeys * n / count, behind = to_block + kKeys * (n + 1) / count;
            keys.fetch(next, least(behind, end)), values.fetch(next, least(behind, end));
            if (m <= 0 || !score.read_mask(x, from, m, seen, tile, tile + kKeys * panel)) continue;
            const Entry *k = k_block + (from - from_block) * k_step,
                        *q_n = reinterpret_cast<const Entry*>(q + n * q_space);
            Real* o_n = chunks[n].o;
            const auto pass = [&](auto vectors) {
                constexpr int w = decltype(vectors)::value;
                constexpr bool halves = narrow && w == kVectors;
                // Keys from here on only the second vector sees: half of what lies along the diagonal.
                int64_t behind = x.query[half - 1] + s.offset + p.right + 1;
                int64_t both = halves ? least(m, up(most(0, behind - from), depth)) : m;
                int64_t features = blocks_of(d, depth);
                product<Along::depth, w>(k, k_step, q_n, tile, both, features, false);    // [A1.8]
                if constexpr (halves)
                    if (both < m)
                        product<Along::depth, 1>(k + both * k_step, k_step, Columns<Entry>::second_lanes(q_n),
                                                 tile + both * panel + half, m - both, features, false);
                const Real unit = score.scale_or_leave(tile, m * panel, kRounds<Entry>);
                score.finish(x, from, m, tile, seen, bias, nullptr, tile + kKeys * panel);
                if (p.pages) hide_absent(keys, from, m, tile);
                if constexpr (in_three)
                    floats[n] |= k_rows.unusual_lanes(from - from_block, m, tile) |
                                 v_columns.unusual_lanes(from - from_block, m, tile);
                const auto follow = [&](const V<Real>* by) { scale_lanes<w>(o_n, dv, by); };
                chunks[n].template weigh<w, Entry>(tile, m, follow, unit);    // [A1.9]
                if (p.dropout_threshold) score.drop(x, from, m, tile);
                const Entry* weights = Columns<Entry>::of(tile_space, m, kKeys);
                product_of_keys<w>(v_block, v_step, from - from_block, weights, o_n, dv, both,
                                   !chunks[n].fresh);    // [A1.10]
                if constexpr (halves)
                    if (both < m)
                        product_of_keys<1>(v_block, v_step, from - from_block + both,
                                           Columns<Entry>::second_lanes(weights + both / depth * panel),
                                           o_n + half, dv, m - both, true);
            };
            // Few rows leave half of a panel empty.
            if (narrow && x.lanes <= half) pass(Constant<narrow ? 1 : kVectors>());
            else pass(Constant<kVectors>());
            chunks[n].fresh = false;
        }
    }
    Real unit = p.dropout_threshold ? Real(p.dropout_scale) : 1;
    if (p.v_scale.data) unit *= element<Real>(p.v_scale.data, b * p.v_scale.batch + head_k * p.v_scale.head);
    for (int64_t n = 0; n < count; ++n) {
        const Panel<Real>& x = panels[n];
        const Chunk<Real>& all = before[n];
        chunks[n].close(before[n], x.lanes, dv);
        Real factor[panel], lse[panel];
        for (int64_t l = 0; l < panel; ++l)    // [A1.12] [A1.13]
            finish_row(p, x.head[l], all.row_max[l], all.row_sum[l], unit, factor + l, lse + l);
        const Real* rows = all.fresh ? chunks[n].o : all.o;
        const LaneOffsets<Real> at_o = x.in(p.o, s), at_lse = x.in(p.lse, s);
        if constexpr (in_three) {
            for (int64_t l = 0; l < x.lanes; ++l) floats[n] |= uint32_t(!surely_near_0(all.row_max[l])) << l;
        }
        uint32_t lanes = x.mask();
        if (kTiles && !in_three && floats) write_lanes(rows, factor, p.o, lanes &= floats[n], at_o, dv);
        else write_panel(rows, factor, p.o, x.lanes, at_o, dv);
        for (int64_t l = 0; p.lse.data && l < x.lanes; ++l)
            if (lanes >> l & 1) static_cast<Real*>(p.lse.data)[at_lse.of[l]] = lse[l];
    }
}

template <class Entry>
void forward_job(void* what, int64_t number) {
    const Forward& f = *static_cast<Forward*>(what);
    if constexpr (__is_same(Entry, Triples)) {
        uint32_t floats[kMostPanels<Entry>] = {}, any = 0;
        attend<Entry>(f, number, floats);
        for (uint32_t lanes : floats) any |= lanes;
        if (any && !pool::stopped(f.p)) attend<float>(f, number, floats);
    } else attend<Entry>(f, number, nullptr);
}

template <class Entry>
RARE void forward(Call& p) {
    using Real = RealOf<Entry>;
    int64_t panels = blocks_of(p.seqlen_q * (p.heads_q / p.heads_k), kPanel<Real>),
            heads = p.batch * p.heads_k;
    int64_t each = kMostPanels<Entry>;
    // Enough jobs that one slow core does not leave the others waiting.
    while (each > 1 && heads * blocks_of(panels, each) < 4 * p.threads) --each;
    Forward f{p, each, blocks_of(panels, each)};
    pool::run(p, forward_job<Entry>, &f, heads * f.parts);
}

}    // namespace

int32_t cupy_flash_forward(Call* p) {
    if (few_rows(*p)) return cupy_flash_decode(p);
    const SpanTable spans(*p);
#if defined(__AMX_BF16__)    // a library of its own
    if (p->k.type == kBf16) forward<Pair>(*p);
    else forward<Triples>(*p);
#elif defined(__AVX512BF16__)    // and another
    forward<Pair>(*p);
#else
    if (p->wide) forward<double>(*p);
    else forward<float>(*p);
#endif
    return p->state;
}
