// What the forward kernels of Hopper share, whatever they multiply: tiles of queries and their order, the
// producer, the turns of consumers, from scores to weights, and how O and LSE leave.
//
// A kernel describes itself as a struct K:
//   Params                           with q_map k_map v_map o_map call
//   Storage                          with k v q_full q_empty tile k_ring v_ring, and what a warpgroup has of
//                                    Q, q_tile(warpgroup), and a warp of O in its place, o(warpgroup, warp)
//   QTile KTile VTile                what the producer fills; SwizzledTile
//   KRing VRing                      StageRing of k_ring and v_ring
//   Product, Softmax                 Math and TileSoftmax of its scores
//   kMask kTurns kHeadDimV kBlockM kBlockN kConsumers
// The tags [A2....] are those of FlashAttention-3, Algorithm 2, see flash_forward_sm90.cu.
#pragma once
#include "pipeline.cuh"
#include "score_tile.cuh"
#include "softmax_tile.cuh"
#include "warpgroup.cuh"

// What a score can meet. band: the end of the keys, causal, window. any: also softcap, ALiBi, scale <= 0.
enum class Mask { band, any };

constexpr uint32_t kSectionBytes = 16 << 20;    // of K and V that should stay in L2
constexpr uint32_t kNoTile = 0xffffffff;        // in Storage::tile: there is none left
constexpr int kTurn = 1;                        // the first named barrier of kConsumers, one per warpgroup

// A tile of queries.
template <class K> struct Work {
    Sequence sequence;
    int32_t head, kv_head, batch;
    int32_t first_query;
    int32_t first_key, blocks;    // blocks of keys from first_key on hold a key for a query of the tile

    CF_DEVICE Work(const Shape& shape, const Score& score, uint32_t tile) {
        const BlockWork found =
            work_in_sections(tile, cdiv(shape.seqlen_q, K::kBlockM), shape,
                             kSectionBytes / uint32_t(sizeof(typename K::KTile::Element)));
        sequence = sequence_of(shape, found.batch);
        head = found.head, kv_head = head / (shape.heads_q / shape.heads_k), batch = found.batch;
        first_query = found.tile * K::kBlockM;
        const Range keys =
            Band(score, sequence).keys_of(first_query, smaller(first_query + K::kBlockM, sequence.seqlen_q));
        first_key = keys.first / K::kBlockN * K::kBlockN;
        blocks = cdiv(keys.end - first_key, K::kBlockN);
    }
    CF_DEVICE bool exists() const { return first_query < sequence.seqlen_q; }
};

// Sends for what consumers will need, a thread alone.
template <class K> struct Producer {
    using QTile = typename K::QTile;
    using KTile = typename K::KTile;
    using VTile = typename K::VTile;
    const typename K::Params& p;
    typename K::Storage& s;
    typename K::KRing::Cursor k_at;
    typename K::VRing::Cursor v_at;
    int q_phase = 0;

    CF_DEVICE Producer(const typename K::Params& p, typename K::Storage& s) : p(p), s(s) {}
    // why: packed tensors have one batch.
    CF_DEVICE int32_t batch(const Work<K>& work) const { return p.call.shape.packed ? 0 : work.batch; }
    CF_DEVICE int32_t key_row(const Work<K>& work, int32_t block) const {
        return static_cast<int32_t>(work.sequence.first_k) + work.first_key + block * K::kBlockN;
    }
    CF_DEVICE void send_tile(uint32_t tile, int bytes) {
        // sync: every warp has read its O of the tile before out of the shared memory of Q, and `tile`.
        mbar_wait(s.q_empty, q_phase ^ 1);
        st_shared(smem_addr(&s.tile), tile);
        mbar_arrive_expect_tx(s.q_full, bytes);
        q_phase ^= 1;
    }
    CF_DEVICE void send_q(const Work<K>& work, uint32_t tile) {
        send_tile(tile, K::kConsumers * QTile::kBytes);
        const int32_t row = static_cast<int32_t>(work.sequence.first_q) + work.first_query;
        CF_UNROLL
        for (int i = 0; i < K::kConsumers; i++)
            load_tile(s.q_tile(i), p.q_map, s.q_full, row + 64 * i, work.head, batch(work));
    }
    CF_DEVICE void send_k(const Work<K>& work, int32_t block) {
        s.k_ring.acquire(k_at, KTile::kBytes);
        load_tile(s.k[k_at.stage], p.k_map, s.k_ring.full[k_at.stage], key_row(work, block), work.kv_head,
                  batch(work));
        k_at.advance();
    }
    CF_DEVICE void send_v(const Work<K>& work, int32_t block) {
        s.v_ring.acquire(v_at, VTile::kBytes);
        load_tile(s.v[v_at.stage], p.v_map, s.v_ring.full[v_at.stage], key_row(work, block), work.kv_head,
                  batch(work));
        v_at.advance();
    }
    // [A2.p]
    CF_DEVICE void run() {
        const Shape& shape = p.call.shape;
        const uint32_t tiles = static_cast<uint32_t>(cdiv(shape.seqlen_q, K::kBlockM)) *
                               static_cast<uint32_t>(shape.heads_q * shape.batch);
        uint32_t tile = blockIdx.x;
#pragma unroll 1
        while (tile < tiles) {
            const Work<K> work(shape, p.call.score, tile);
            if (work.exists()) {
                // why K before Q: its slots are free while consumers still write the O of the tile before.
                if (work.blocks > 0) send_k(work, work.blocks - 1);
                send_q(work, tile);
#pragma unroll 1
                for (int32_t block = work.blocks - 1; block >= 0; block--) {
                    send_v(work, block);
                    if (block > 0) send_k(work, block - 1);
                }
            }
            tile = p.call.next_tile ? gridDim.x + atomicAdd(p.call.next_tile, 1u) : tile + gridDim.x;
        }
        send_tile(kNoTile, 0);
    }
};

// From scores to weights, for the rows of a warpgroup.
template <class K> struct Weights {
    TileScore<typename K::Product> score;
    NarrowBand band;
    float unit_log2;    // from a score as the softmax finds it to log2
    int32_t first_query, first_key;
    int32_t whole_first, whole_end;    // blocks of keys in which every pair counts
    typename K::Softmax softmax;

    CF_DEVICE Weights(const Score& rule, const Work<K>& work, int32_t first, float unit_log2)
        : score(rule, work.sequence, work.head),
          band(Band(rule, work.sequence)),
          unit_log2(unit_log2),
          first_query(first + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16),
          first_key(work.first_key) {
        const Band wide(rule, work.sequence);
        const int32_t last = smaller(first + 64, work.sequence.seqlen_q) - 1;
        whole_first = cdiv(wide.first_key(last) - first_key, K::kBlockN);
        whole_end = (wide.end_key(first) - first_key) / K::kBlockN;
    }
    // Returns the factors that the two rows of O are waiting for.
    CF_DEVICE float2 weigh(float (&rS)[K::kBlockN / 2], int32_t block) {
        auto& s = as_tile(rS);
        const Positions<false> at(first_query, first_key + block * K::kBlockN);
        if constexpr (K::kMask == Mask::any) {
            score.cap(s);
            score.add_alibi(s, at);
        }
        if (block < whole_first || block >= whole_end) mask_band(s, at, band);
        const float upper = softmax.weigh_row(s, 0, 0, unit_log2);
        return {upper, softmax.weigh_row(s, 0, 1, unit_log2)};
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
CF_DEVICE void finish(const typename K::Params& p, typename K::Storage& s, const Work<K>& work, int warpgroup,
                      const typename K::Softmax& softmax, float unit, float value_unit,
                      float (&rO)[K::kHeadDimV / 2]) {
    const Score& rule = p.call.score;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t first_query = work.first_query + 64 * warpgroup + 16 * warp;
    const int32_t queries = work.sequence.seqlen_q - first_query;    // that exist for the warp
    const int64_t row = work.sequence.first_q + first_query;
    const float sink =
        rule.sinks ? static_cast<const float*>(rule.sinks)[work.head * rule.sinks_head] : -kInfinity;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const auto end = softmax.finish(0, half, unit, sink);
        const int32_t query = 8 * half + lane / 4;
        softmax.rescale_row(as_tile(rO), 0, half, end.normaliser * value_unit);
        if (p.call.lse.data && lane % 4 == 0 && query < queries)
            st_global(head_rows<float>(p.call.lse, work.batch, work.head, row + query), end.lse);
    }
    uint32_t rounded[K::kHeadDimV / 16][4];
    to_fragments<Output>(rounded, rO);
    auto& sO = s.o(warpgroup, warp);
    store_warp_fragments(sO, 0, 0, rounded);
    // sync: every lane's part of O is visible to the lanes of the warp and to the copy engine.
    fence_proxy_async();
    __syncwarp();
    // why: a tile that ends inside packed rows must not write those of the next sequence; elsewhere what is
    // beyond the queries is outside the tensor, and dropped.
    if (p.call.shape.packed) {
        copy_rows(head_rows<Output>(p.call.o, work.batch, work.head, row), p.call.o.row, sO,
                  smaller(queries, 16), p.call.shape.head_dim_v);
        // sync: every lane has read its part before the next Q comes.
        __syncwarp();
    } else if (lane == 0) {
        store_tile(p.o_map, sO, static_cast<int32_t>(row), work.head, work.batch);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
    if (lane == 0) mbar_arrive(s.q_empty);
}
