// What the forward kernels of Hopper share, whatever they multiply: tiles of queries and their order, the
// producer, the turns of consumers, from scores to weights, and how O and LSE leave.
//
// A kernel describes itself as a struct K:
//   Params                           with q_map k_map v_map o_map call
//   Storage                          with k v q_ring work[2][] k_ring v_ring, of kind spans seen[2][] of stages
//                                    of K, and of each stage of Q what a warpgroup has, q_tile(stage,
//                                    warpgroup), and a warp of O in its place, o(stage, warpgroup, warp)
//   QTile KTile VTile                what the producer fills; SwizzledTile
//   QRing KRing VRing                StageRing of q_ring, whose stages every warp frees, k_ring and v_ring
//   Product, Softmax                 Math and TileSoftmax of its scores
//   kMask kTurns kHeadDimV kBlockM kBlockN kConsumers
//   kScheduler                       a thread of its own runs Scheduler; Storage then has work_ring, a WorkRing of one
//                                    stage, from it to the producer. Else the producer is both
// The tags [A2....] are those of FlashAttention-3, Algorithm 2, see flash_forward_sm90.cu.
#pragma once
#include "attention/reach.cuh"
#include "hopper/hidden_pairs.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/warpgroup.cuh"
#include "tile/score_tile.cuh"
#include "tile/softmax_tile.cuh"

// What a score can meet. band: the end of the keys, causal, window. any: also softcap, ALiBi, scale <= 0. spans: a band,
// and spans and blocks; rows are then queries of one head.
enum class Mask { band, any, spans };

constexpr uint32_t kSectionBytes = 16 << 20;    // of K and V that should stay in L2
constexpr int32_t kNoTile = -1;                 // as Work::blocks: there is none left
constexpr int kTurn = 1;                        // the first named barrier of kConsumers, one per warpgroup

// How rows of tiles are numbered: row r is query r >> bits and head r % (1 << bits) of a group of heads of q,
// those that share a head of k. With 0 bits a group is one head, and rows are queries.
struct GroupedRows {
    int32_t bits = 0, heads = 1;    // heads of a group that exist, at most 1 << bits

    CF_DEVICE GroupedRows() {}
    CF_DEVICE explicit GroupedRows(const ForwardParams& call)
        : bits(call.head_bits), heads(bits ? call.shape.heads_q / call.shape.heads_k : 1) {}
    CF_DEVICE int32_t query(int32_t row) const { return row >> bits; }
    CF_DEVICE int32_t head(int32_t row) const { return row & ((1 << bits) - 1); }
    // Tiles of m rows of a group, and groups of a batch entry.
    CF_DEVICE int32_t tiles(int32_t seqlen_q, int m) const { return cdiv(seqlen_q << bits, m); }
    CF_DEVICE int32_t groups(const Shape& shape) const { return bits ? shape.heads_k : shape.heads_q; }
};

// A tile of queries. The scheduler finds out what it is, and consumers learn it with its Q, in shared memory.
// why: eight divisions are too many for every warp.
template <class K> struct Work {
    GroupedRows rows;
    Sequence sequence;
    int32_t group, kv_head, batch;
    int32_t first_row;
    int32_t first_key,
        blocks;    // blocks of keys from first_key on hold a key for a query of the tile; of kind
                   // spans so many blocks of any number do, which count from key 0

    // Makes it the tile of a group that `found` says. why in place and field by field: who does has registers for
    // little more.
    CF_DEVICE void become(const ForwardParams& call, const Sequence& of, const BlockWork& found) {
        rows = GroupedRows(call);
        group = found.head, batch = of.batch;
        kv_head = rows.bits ? group : group / (call.shape.heads_q / call.shape.heads_k);
        first_row = found.tile * K::kBlockM;
        sequence = of;
        if constexpr (K::kMask == Mask::spans) {
            const Reach* of_tile = reach(call);
            int32_t seen = 0;
#pragma unroll 4
            for (int32_t word = words(call.shape) - 1; word >= 0; word--) seen += __popc(of_tile[word].seen);
            first_key = 0, blocks = seen;
        } else {
            const Range keys =
                Band(call.score, sequence)
                    .keys_of(rows.query(first_row), rows.query(first_row + K::kBlockM - 1) + 1);
            first_key = keys.first / K::kBlockN * K::kBlockN;
            blocks = cdiv(keys.end - first_key, K::kBlockN);
        }
    }
    // Of kind spans: which blocks of keys the tile reaches.
    CF_DEVICE static int32_t words(const Shape& shape) { return cdiv(cdiv(shape.seqlen_k, K::kBlockN), 32); }
    CF_DEVICE const Reach* reach(const ForwardParams& call) const {
        return reach_of(call, batch, group, first_row / K::kBlockM);
    }
    // Where tensor maps of q and o have a row. why: packed tensors have one batch.
    CF_DEVICE int32_t row_of_q(int32_t row) const {
        return static_cast<int32_t>(sequence.first_q) + rows.query(row);
    }
    CF_DEVICE int32_t batch_of_rows(const Shape& shape) const { return shape.packed ? 0 : batch; }
    CF_DEVICE bool exists(int32_t row) const {
        return rows.query(row) < sequence.seqlen_q && rows.head(row) < rows.heads;
    }
    // The head of q that a row is of; rows of no head are as those of the group's last.
    CF_DEVICE int32_t head(int32_t row) const {
        return group * rows.heads + smaller(rows.head(row), rows.heads - 1);
    }
};

// A block of keys of kind spans as the producer hands it over, beside K: its number, and whether some of its pairs are
// hidden.
struct SeenBlock {
    uint32_t bits = 0;

    CF_DEVICE int32_t number() const { return static_cast<int32_t>(bits >> 1); }
    CF_DEVICE bool partial() const { return bits & 1; }
};

// The blocks that a tile reaches, from the last to the first.
struct SeenBlocks {
    const Reach* words;    // of the tile
    int32_t word;          // whose bits are left
    Reach left{};

    CF_DEVICE SeenBlock next() {
        while (!left.seen) left = words[--word];
        const int bit = 31 - __clz(static_cast<int>(left.seen));
        left.seen ^= 1u << bit;
        return {static_cast<uint32_t>(word * 32 + bit) << 1 | (left.partial >> bit & 1)};
    }
};

// Finds out which tiles this block works on, and what they are: a thread alone.
// why not the producer, where a warp is idle: it takes as long as a block of keys, and K of the next tile would
// wait for it.
template <class K> struct Scheduler {
    const ForwardParams& call;
    typename K::Storage& s;
    uint32_t tile = blockIdx.x, told = 0;
    // Of packed sequences: which one the tile before was of, and tiles of those before it.
    int32_t batch = 0;
    uint32_t before = 0;

    CF_DEVICE Scheduler(const ForwardParams& call, typename K::Storage& s) : call(call), s(s) {}
    // Of the number-th tile. It is free once Q of the tile before is on its way: its Q of two passes ago was
    // released before.
    CF_DEVICE static Work<K>& place(typename K::Storage& s, uint32_t number) {
        const auto at = K::QRing::at(number);
        return s.work[at.phase][at.stage];
    }
    // Whether the next tile exists; its place then says what it is, else kNoTile.
    CF_DEVICE bool tell() {
        if (told > 0) tile = call.next_tile ? gridDim.x + atomicAdd(call.next_tile, 1u) : tile + gridDim.x;
        Work<K>& work = place(s, told++);
        const Shape& shape = call.shape;
        const GroupedRows rows(call);
        const int32_t groups = rows.groups(shape);
        int32_t tiles = rows.tiles(shape.seqlen_q, K::kBlockM), batches = shape.batch;
        int32_t seqlen_k = shape.seqlen_k;
        // why each in turn: most have fewer tiles than the longest, and numbers without a tile cost as much to look at.
        if (shape.packed) {
            for (;; batch++) {
                if (batch == shape.batch) break;
                const Sequence sequence = sequence_of(shape, batch);
                tiles = rows.tiles(sequence.seqlen_q, K::kBlockM), seqlen_k = sequence.seqlen_k;
                const uint32_t here = static_cast<uint32_t>(tiles) * static_cast<uint32_t>(groups);
                if (tile - before < here) break;
                before += here;
            }
            batches = batch < shape.batch;
        }
        if (tile - before >= static_cast<uint32_t>(tiles) * static_cast<uint32_t>(groups * batches)) {
            work.blocks = kNoTile;
            return false;
        }
        const BlockWork found =
            work_in_sections(tile - before, tiles, shape, groups,
                             kSectionBytes / uint32_t(sizeof(typename K::KTile::Element)), batches, seqlen_k);
        work.become(call, sequence_of(shape, batch + found.batch), found);
        return true;
    }
    // A tile ahead of the producer.
    CF_DEVICE void run() {
#pragma unroll 1
        for (bool more = true; more;) {
            const auto at = K::WorkRing::at(told);
            // sync: the producer has the tile before, so that this one's place is free.
            mbar_wait(s.work_ring.empty[0], at.phase ^ 1);
            more = tell();
            mbar_arrive(s.work_ring.full[0]);
        }
    }
};

// Sends for what consumers will need, a thread alone.
template <class K> struct Producer {
    using QTile = typename K::QTile;
    using KTile = typename K::KTile;
    using VTile = typename K::VTile;
    // So many blocks before a tile ends the next one is looked for. why not earlier: whoever has spoken for a tile may
    // still be at a long one when others have nothing left to do.
    static constexpr int32_t kAhead = 3;
    const typename K::Params& p;
    typename K::Storage& s;
    // why counts: a cursor is two registers of the 24 that there are.
    uint32_t tiles = 0, blocks = 0;    // sent
    Scheduler<K> scheduler;            // where it has no thread of its own

    CF_DEVICE Producer(const typename K::Params& p, typename K::Storage& s)
        : p(p), s(s), scheduler(p.call, s) {}
    // By a thread, at the start: the first copies then do not wait for what describes their tensors.
    CF_DEVICE static void prefetch(const typename K::Params& p) {
        tma_prefetch(p.k_map), tma_prefetch(p.q_map), tma_prefetch(p.v_map), tma_prefetch(p.o_map);
    }
    CF_DEVICE int32_t batch(const Work<K>& work) const { return work.batch_of_rows(p.call.shape); }
    CF_DEVICE int32_t key_row(const Work<K>& work, int32_t block) const {
        return static_cast<int32_t>(work.sequence.first_k) + work.first_key + block * K::kBlockN;
    }
    // What the tile is that is sent next.
    CF_DEVICE const Work<K>& next_work() {
        // sync: the scheduler has written it.
        if constexpr (K::kScheduler) mbar_wait(s.work_ring.full[0], K::WorkRing::at(tiles).phase);
        else scheduler.tell();
        return Scheduler<K>::place(s, tiles);
    }
    // The scheduler may look for the next tile. Once for each, when its Q is sent.
    CF_DEVICE void look_ahead() {
        if constexpr (K::kScheduler) mbar_arrive(s.work_ring.empty[0]);
    }
    CF_DEVICE void send_q(const Work<K>& work) {
        // why here: every warp has then read its O of the tile before out of the shared memory of Q.
        const auto at = K::QRing::at(tiles);
        s.q_ring.acquire(at, K::kConsumers * QTile::kBytes);
        CF_UNROLL
        for (int i = 0; i < K::kConsumers; i++) {
            const int32_t row = work.first_row + 64 * i;
            load_tile(s.q_tile(at.stage, i), p.q_map, s.q_ring.full[at.stage], work.rows.head(row),
                      work.row_of_q(row), work.group, batch(work));
        }
        tiles++;
    }
    template <class T>
    CF_DEVICE void load(T& tile, const TensorMap& map, uint64_t& full, const Work<K>& work, int32_t block) {
        load_tile(tile, map, full, key_row(work, block), work.kv_head, batch(work));
    }
    CF_DEVICE void send_k(const Work<K>& work, int32_t block) {
        const auto at = K::KRing::at(blocks);
        s.k_ring.acquire(at, KTile::kBytes);
        load(s.k[at.stage], p.k_map, s.k_ring.full[at.stage], work, block);
    }
    CF_DEVICE void send_v(const Work<K>& work, int32_t block) {
        const auto at = K::VRing::at(blocks);
        s.v_ring.acquire(at, VTile::kBytes);
        load(s.v[at.stage], p.v_map, s.v_ring.full[at.stage], work, block);
        blocks++;
    }
    // Q of a tile of kind spans, and K and V of the blocks that it reaches. A block is told before its K is announced, in a place that nobody reads any
    // more: who has started O += P V of the last block there has looked at it, and that V is free before this K is sent.
    CF_DEVICE void send_seen(const Work<K>& work) {
        SeenBlocks seen{work.reach(p.call), Work<K>::words(p.call.shape)};
        const auto tell = [&](uint32_t number) -> SeenBlock& {
            const auto at = K::KRing::at(number);
            return s.seen[at.phase][at.stage];
        };
        if (work.blocks > 0) send_k(work, (tell(blocks) = seen.next()).number());
        send_q(work);
        if (work.blocks <= kAhead) look_ahead();
#pragma unroll 1
        for (int32_t left = work.blocks - 1; left >= 0; left--) {
            if (left == kAhead) look_ahead();
            send_v(work, tell(blocks).number());
            if (left > 0) send_k(work, (tell(blocks) = seen.next()).number());
        }
    }
    // [A2.p]
    CF_DEVICE void run() {
#pragma unroll 1
        for (;;) {
            const Work<K>& work = next_work();
            if (work.blocks == kNoTile) break;
            if constexpr (K::kMask == Mask::spans) {
                send_seen(work);
            } else {
                // why K before Q: its slots are free while consumers still write the O of the tile before.
                if (work.blocks > 0) send_k(work, work.blocks - 1);
                send_q(work);
                if (work.blocks <= kAhead) look_ahead();
#pragma unroll 1
                for (int32_t block = work.blocks - 1; block >= 0; block--) {
                    if (block == kAhead) look_ahead();
                    send_v(work, block);
                    if (block > 0) send_k(work, block - 1);
                }
            }
        }
        s.q_ring.acquire(K::QRing::at(tiles), 0);
    }
};

// From scores to weights, for the rows of a warpgroup.
template <class K> struct Weights {
    // why: of kind spans these are constants, and no register holds them.
    static constexpr bool kAlone = K::kMask == Mask::spans;
    TileScore<typename K::Product> score;
    float slope[2];    // of ALiBi, for the thread's two rows
    NarrowBand band;
    float unit_log2;    // from a score as the softmax finds it to log2
    // What a maximum may be exceeded by, in the unit of the scores. why not infinity, of a scale next to nothing: a first
    // score would not exceed -inf by it.
    float slack;
    GroupedRows rows;
    int32_t row, first_key;            // the thread's first row and the tile's first key
    int32_t whole_first, whole_end;    // blocks of keys in which every pair counts
    typename K::Softmax softmax;

    CF_DEVICE Weights(const Score& rule, const Work<K>& work, int32_t first, float unit_log2)
        : score(rule, work.sequence, work.head(first)),
          band(Band(rule, work.sequence)),
          unit_log2(unit_log2),
          slack(K::Softmax::kSlack ? of_warp(fminf(K::Softmax::kSlack * rcp(unit_log2), 3e38f)) : 0.0f),
          rows(kAlone ? GroupedRows() : work.rows),
          row(first + static_cast<int32_t>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4)),
          first_key(kAlone ? 0 : work.first_key) {
        const Band wide(rule, work.sequence);
        const int32_t last = smaller(rows.query(first + 63), work.sequence.seqlen_q - 1);
        whole_first = cdiv(wide.first_key(last) - first_key, K::kBlockN);
        whole_end = (wide.end_key(rows.query(first)) - first_key) / K::kBlockN;
        CF_UNROLL
        for (int half = 0; half < 2; half++)
            slope[half] = HeadScore<float>(rule, work.sequence, work.head(row + 8 * half)).slope;
    }
    // So many blocks of the tile, from its first on, reach the last key that a row of the warpgroup sees; at
    // least one. first: its first row.
    CF_DEVICE int32_t seen_blocks(const Work<K>& work, int32_t first) const {
        if (kAlone) return work.blocks;
        const int32_t last = smaller(work.rows.query(first + 63), work.sequence.seqlen_q - 1);
        const int32_t end = work.rows.query(first) > last ? 0 : band.end_key(last) - first_key;
        return of_warp(larger(1, smaller(work.blocks, cdiv(end, K::kBlockN))));
    }
    // -inf where the band hides a pair. key: of the thread's first column.
    CF_DEVICE void mask(float (&s)[1][K::kBlockN / 8][4], const NarrowBand& limits, int32_t key) const {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t query = rows.query(row + 8 * half);
            mask_row(s, 0, half, limits.first_key(query) - key, limits.end_key(query) - key);
        }
    }
    // Of kind spans, of a block that is partial: -inf where band, spans or blocks hide a pair.
    // why the band anew: no register holds it while blocks are whole.
    CF_DEVICE void hide(float (&rS)[K::kBlockN / 2], const Score& rule, const Work<K>& work, SeenBlock block) const {
        const int32_t first = block.number() * K::kBlockN, query = row & ~15;
        HiddenPairs<K::kBlockN>{rule, work.sequence, work.group, query, first}.hide(as_tile(rS));
        // why first: beside spans most calls have no band, and ask for the end of the keys alone. An offset is below 2^40.
        constexpr int64_t kOpen = int64_t(1) << 62;
        const bool open = rule.left >= kOpen && rule.right >= kOpen;
        if (open && first + K::kBlockN <= work.sequence.seqlen_k) return;
        const NarrowBand anew(Band(rule, work.sequence));
        const int32_t before = anew.first_key(query + 15) - first;
        const int32_t after = first + K::kBlockN - anew.end_key(query);
        // why opaque: or ptxas holds a predicate less while blocks are whole.
        if (static_cast<int32_t>(opaque(static_cast<uint32_t>(larger(before, after)))) > 0)
            mask(as_tile(rS), anew, first + static_cast<int32_t>(threadIdx.x) % 4 * 2);
    }
    CF_DEVICE Rise weigh(float (&rS)[K::kBlockN / 2], int32_t block) {
        auto& s = as_tile(rS);
        const int32_t key = first_key + block * K::kBlockN + static_cast<int32_t>(threadIdx.x) % 4 * 2;
        if constexpr (K::kMask == Mask::any) {
            score.cap(s);
            if (score.head.rule.alibi_slopes) {
                CF_UNROLL
                for (int half = 0; half < 2; half++)
                    score.add_alibi_row(
                        s, 0, half, slope[half],
                        static_cast<float>(rows.query(row + 8 * half) + score.head.offset - key));
            }
        }
        if constexpr (!kAlone) {
            if (block < whole_first || block >= whole_end) mask(s, band, key);
        }
        if constexpr (K::Softmax::kSlack > 0) return softmax.weigh_rows(s, 0, unit_log2, slack);
        else {
            const float upper = softmax.weigh_row(s, 0, 0, unit_log2);
            return {true, {upper, softmax.weigh_row(s, 0, 1, unit_log2)}};
        }
    }
};

// Products of one warpgroup run under the softmax of the others, in turns.
template <class K> CF_DEVICE void take_turn(int warpgroup) {
    // sync: the warpgroup before has started its products.
    if constexpr (K::kTurns) bar_sync(kTurn + warpgroup, 256);
}
template <class K> CF_DEVICE void pass_turn(int warpgroup) {
    if constexpr (K::kTurns) bar_arrive(kTurn + (warpgroup + 1) % K::kConsumers, 256);
}

// [A2.21] for the rows of a warpgroup: O, which leaves through its part of the shared memory of Q, and LSE.
// unit: from a score as the softmax has found it to natural units; value_unit: on O.
template <class K, class Output>
CF_DEVICE void finish(const typename K::Params& p, typename K::Storage& s, const Work<K>& tile, int warpgroup,
                      int q_stage, const typename K::Softmax& softmax, float unit, float value_unit,
                      float (&rO)[K::kHeadDimV / 2]) {
    const Work<K> work = tile;    // why: there are registers again, and it is read once
    const Score& rule = p.call.score;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t first_row = work.first_row + 64 * warpgroup + 16 * warp;
    const int64_t first_q = work.sequence.first_q;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t row = first_row + 8 * half + lane / 4, head = work.head(row);
        float sink = -kInfinity;
        // why: or ptxas keeps this constant from before the main loop, which has no register for it.
        if constexpr (K::kMask == Mask::spans) sink = __uint_as_float(opaque(__float_as_uint(-kInfinity)));
        if (rule.sinks) sink = static_cast<const float*>(rule.sinks)[head * rule.sinks_head];
        const auto end = softmax.finish(0, half, unit, sink);
        softmax.rescale_row(as_tile(rO), 0, half, end.normaliser * value_unit);
        if (p.call.lse.data && lane % 4 == 0 && work.exists(row))
            st_global(head_rows<float>(p.call.lse, work.batch, head, first_q + work.rows.query(row)),
                      end.lse);
    }
    uint32_t rounded[K::kHeadDimV / 16][4];
    to_fragments<Output>(rounded, rO);
    auto& sO = s.o(q_stage, warpgroup, warp);
    store_warp_fragments(sO, 0, 0, rounded);
    // sync: every lane's part of O is visible to the lanes of the warp and to the copy engine.
    fence_proxy_async();
    __syncwarp();
    const bool leader = elect_one();
    // why: rows past the end of a packed sequence are those of the next one; elsewhere what is beyond the queries is outside
    // the tensor, and dropped. why of_warp: where lanes might part, ptxas spills.
    const bool packed = p.call.shape.packed;
    if (packed && of_warp(work.rows.query(first_row + 15) - work.sequence.seqlen_q) >= 0) {
        const auto place = [&](int i) -> Output* {
            const int32_t row = first_row + i;
            if (!work.exists(row)) return nullptr;
            return head_rows<Output>(p.call.o, work.batch, work.head(row), first_q + work.rows.query(row));
        };
        copy_rows(place, sO, 16, p.call.shape.head_dim_v);
        // sync: every lane has read its part before the next Q comes.
        __syncwarp();
    } else if (leader) {
        store_tile(p.o_map, sO, work.rows.head(first_row), work.row_of_q(first_row), work.group,
                   packed ? 0 : work.batch);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
    if (leader) mbar_arrive(s.q_ring.empty[q_stage]);
}
