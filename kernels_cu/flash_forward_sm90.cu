// Attention forward on Hopper: TMA, wgmma, warp specialisation. FlashAttention-3 with exact scores of 16-bit
// inputs.
//
// Source: A2 = FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 2, consumer side with its overlap
// of products and softmax. Erratum: its line 21 prints an inverse on the last rescaling that must not be
// there.
//   [A2.p]  the producer keeps K_j and V_j of the blocks of keys coming, last block first
//   [A2.4]  S = Q K^T of the last block; wait
//   [A2.6]  S becomes P: score, mask, row_max rises, P = e^(S - row_max), row_sum
//   [A2.9]  S = Q K_j^T starts
//   [A2.11] O += P V of the block before starts
//   [A2.12] wait for S only
//   [A2.13] P of block j, while the tensor cores still add to O
//   [A2.14] wait for O; O = e^(old_max - row_max) O; the slots of K_j and of the V before are free
//   [A2.19] O += P V of the first block
//   [A2.21] O = O / row_sum, LSE = row_max + log(row_sum); 0 and -inf in a row without keys
//
// Grid:   x, any number of blocks. They share ceil(seqlen_q / kBlockM) * heads_q * batch tiles in the order of
//         work_in_sections, longest first, heads in sections of L2 size: each block takes the tile of its
//         number, then the next that nobody has (p.call.next_tile), or without that counter every gridDim.x-th.
//         Packed: seqlen_q is the longest; tiles past the end of their sequence are passed over.
// Block:  kConsumers warpgroups of 64 queries each, then one warpgroup of which one thread is the producer.
// Shared: Q, kConsumers tiles of 64 x kHeadDim (O leaves through them); kStages tiles of K, kBlockN x
//         kHeadDim; kStages of V, kBlockN x kHeadDimV; barriers.
//
// Assumes: what tensor maps ask for: base and strides of q, k, v multiples of 16 bytes, last axes contiguous;
//         rows of o start on 16-byte boundaries; seqlens below 2^30; scale > 0 unless kMask is any.
// Not here: mask, bias, dropout (flash_forward); splitting keys over blocks (flash_decode).
#include "pipeline.cuh"
#include "score_tile.cuh"
#include "softmax_tile.cuh"
#include "warpgroup.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 128
#define CF_THREADS 384
#define CF_STAGES 2
#define CF_TURNS 1
#define CF_SHARED_BYTES 164864
#endif
// What a score can meet. band: the end of the keys, causal, window. any: also softcap, ALiBi, scale <= 0.
enum class Mask { band, any };
using Element = CF_ELEMENT;
constexpr Mask kMask = Mask::CF_MASK;
constexpr bool kTurns = CF_TURNS;           // warpgroups take turns in starting products
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = CF_STAGES;
constexpr int kConsumers = kBlockM / 64;
constexpr uint32_t kSectionBytes = 16 << 20;    // of K and V that should stay in L2
static_assert(kThreads == 128 * (kConsumers + 1) && kConsumers >= 2 && kConsumers <= 3);
static_assert(kHeadDimV <= kHeadDim, "O leaves through the tile of Q");

using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, 64, kHeadDim>;
using KTile = SwizzledTile<Element, kBlockN, kHeadDim>;
using VTile = SwizzledTile<Element, kBlockN, kHeadDimV>;
using OTile = SwizzledTile<Element, 16, kHeadDimV>;    // of a warp
using Ring = StageRing<kStages>;

struct SharedStorage {
    QTile q[kConsumers];
    KTile k[kStages];
    VTile v[kStages];
    uint64_t q_full, q_empty;
    uint32_t tile;    // whose Q is here or coming; kNoTile: there is none left
    Ring k_ring, v_ring;
};
constexpr uint32_t kNoTile = 0xffffffff;
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// Named barriers, of kTurn one per warpgroup.
enum Barrier { kTurn = 1, kCleared = kTurn + kConsumers };

// A tile of queries.
struct Work {
    Sequence sequence;
    int32_t head, kv_head, batch;
    int32_t first_query;
    int32_t first_key, blocks;    // blocks of keys from first_key on hold a key for a query of the tile

    CF_DEVICE Work(const Shape& shape, const Score& score, uint32_t tile) {
        const BlockWork found = work_in_sections(tile, cdiv(shape.seqlen_q, kBlockM), shape,
                                                 kSectionBytes / uint32_t(sizeof(Element)));
        sequence = sequence_of(shape, found.batch);
        head = found.head, kv_head = head / (shape.heads_q / shape.heads_k), batch = found.batch;
        first_query = found.tile * kBlockM;
        const Range keys =
            Band(score, sequence).keys_of(first_query, smaller(first_query + kBlockM, sequence.seqlen_q));
        first_key = keys.first / kBlockN * kBlockN;
        blocks = cdiv(keys.end - first_key, kBlockN);
    }
    CF_DEVICE bool exists() const { return first_query < sequence.seqlen_q; }
};

// Sends for what consumers will need, a thread alone.
struct Producer {
    const HopperForwardParams& p;
    SharedStorage& s;
    typename Ring::Cursor k_at, v_at;
    int q_phase = 0;

    CF_DEVICE Producer(const HopperForwardParams& p, SharedStorage& s) : p(p), s(s) {}
    // why: packed tensors have one batch.
    CF_DEVICE int32_t batch(const Work& work) const { return p.call.shape.packed ? 0 : work.batch; }
    CF_DEVICE int32_t key_row(const Work& work, int32_t block) const {
        return static_cast<int32_t>(work.sequence.first_k) + work.first_key + block * kBlockN;
    }
    CF_DEVICE void send_tile(uint32_t tile, int bytes) {
        // sync: every warp has read its O of the tile before out of the shared memory of Q, and `tile`.
        mbar_wait(s.q_empty, q_phase ^ 1);
        st_shared(smem_addr(&s.tile), tile);
        mbar_arrive_expect_tx(s.q_full, bytes);
        q_phase ^= 1;
    }
    CF_DEVICE void send_q(const Work& work, uint32_t tile) {
        send_tile(tile, kConsumers * QTile::kBytes);
        const int32_t row = static_cast<int32_t>(work.sequence.first_q) + work.first_query;
        CF_UNROLL
        for (int i = 0; i < kConsumers; i++)
            load_tile(s.q[i], p.q_map, s.q_full, row + 64 * i, work.head, batch(work));
    }
    CF_DEVICE void send_k(const Work& work, int32_t block) {
        s.k_ring.acquire(k_at, KTile::kBytes);
        load_tile(s.k[k_at.stage], p.k_map, s.k_ring.full[k_at.stage], key_row(work, block), work.kv_head,
                  batch(work));
        k_at.advance();
    }
    CF_DEVICE void send_v(const Work& work, int32_t block) {
        s.v_ring.acquire(v_at, VTile::kBytes);
        load_tile(s.v[v_at.stage], p.v_map, s.v_ring.full[v_at.stage], key_row(work, block), work.kv_head,
                  batch(work));
        v_at.advance();
    }
    // [A2.p]
    CF_DEVICE void run() {
        const Shape& shape = p.call.shape;
        const uint32_t tiles = static_cast<uint32_t>(cdiv(shape.seqlen_q, kBlockM)) *
                               static_cast<uint32_t>(shape.heads_q * shape.batch);
        uint32_t tile = blockIdx.x;
#pragma unroll 1
        while (tile < tiles) {
            const Work work(shape, p.call.score, tile);
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
struct Weights {
    TileScore<Product> score;
    NarrowBand band;
    float unit_log2;
    int32_t first_query, first_key;
    int32_t whole_first, whole_end;    // blocks of keys in which every pair counts
    TileSoftmax<Product, 1> softmax;

    CF_DEVICE Weights(const Score& rule, const Work& work, int32_t first)
        : score(rule, work.sequence, work.head),
          band(Band(rule, work.sequence)),
          unit_log2(kMask == Mask::any ? kLog2e : static_cast<float>(rule.scale * 1.4426950408889634)),
          first_query(first + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16),
          first_key(work.first_key) {
        const Band wide(rule, work.sequence);
        const int32_t last = smaller(first + 64, work.sequence.seqlen_q) - 1;
        whole_first = cdiv(wide.first_key(last) - first_key, kBlockN);
        whole_end = (wide.end_key(first) - first_key) / kBlockN;
    }
    // Returns the factors that the two rows of O are waiting for.
    CF_DEVICE float2 weigh(float (&rS)[kBlockN / 2], int32_t block) {
        auto& s = as_tile(rS);
        const Positions<false> at(first_query, first_key + block * kBlockN);
        if constexpr (kMask == Mask::any) {
            score.cap(s);
            score.add_alibi(s, at);
        }
        if (block < whole_first || block >= whole_end) mask_band(s, at, band);
        const float upper = softmax.weigh_row(s, 0, 0, unit_log2);
        return {upper, softmax.weigh_row(s, 0, 1, unit_log2)};
    }
};

// Products of one warpgroup run under the softmax of the others, in turns.
CF_DEVICE void take_turn(int warpgroup) {
    // sync: the warpgroup before has started its products.
    if constexpr (kTurns) bar_sync(kTurn + warpgroup, 256);
}
CF_DEVICE void pass_turn(int warpgroup) {
    if constexpr (kTurns) bar_arrive(kTurn + (warpgroup + 1) % kConsumers, 256);
}

// Where a consumer stands in the rings, from tile to tile.
struct Place {
    typename Ring::Cursor k, v;
};

// [A2.21] for the rows of a warpgroup: O, which leaves through its Q, and LSE.
CF_DEVICE void finish(const HopperForwardParams& p, SharedStorage& s, const Work& work, int warpgroup,
                      const TileSoftmax<Product, 1>& softmax, float (&rO)[kHeadDimV / 2]) {
    const Score& rule = p.call.score;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t first_query = work.first_query + 64 * warpgroup + 16 * warp;
    const int32_t queries = work.sequence.seqlen_q - first_query;    // that exist for the warp
    const int64_t row = work.sequence.first_q + first_query;
    const float unit = kMask == Mask::any ? 1.0f : static_cast<float>(rule.scale);
    const float sink =
        rule.sinks ? static_cast<const float*>(rule.sinks)[work.head * rule.sinks_head] : -kInfinity;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const auto end = softmax.finish(0, half, unit, sink);
        const int32_t query = 8 * half + lane / 4;
        softmax.rescale_row(as_tile(rO), 0, half, end.normaliser);
        if (p.call.lse.data && lane % 4 == 0 && query < queries)
            st_global(head_rows<float>(p.call.lse, work.batch, work.head, row + query), end.lse);
    }
    uint32_t rounded[kHeadDimV / 16][4];
    to_fragments<Element>(rounded, rO);
    OTile& sO = reinterpret_cast<OTile*>(s.q[warpgroup].data)[warp];
    store_warp_fragments(sO, 0, 0, rounded);
    // sync: every lane's part of O is visible to the lanes of the warp and to the copy engine.
    fence_proxy_async();
    __syncwarp();
    // why: a tile that ends inside packed rows must not write those of the next sequence; elsewhere what is
    // beyond the queries is outside the tensor, and dropped.
    if (p.call.shape.packed) {
        copy_rows(head_rows<Element>(p.call.o, work.batch, work.head, row), p.call.o.row, sO,
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

// The queries of one warpgroup.
CF_DEVICE void attend(const HopperForwardParams& p, SharedStorage& s, const Work& work, int warpgroup,
                      Place& at) {
    const int32_t first_query = work.first_query + 64 * warpgroup;
    Weights weights(p.call.score, work, first_query);
    float rO[kHeadDimV / 2] = {};
    if (work.blocks > 0) {
        const ByRows<QTile> q(s.q[warpgroup]);
        const ByRows<KTile> k(s.k[0]);
        const ByColumns<VTile> v(s.v[0]);
        uint32_t rP[kBlockN / 16][4];
        {
            // [A2.4]
            float rS[kBlockN / 2];
            s.k_ring.wait(at.k);
            wgmma_own(rS);
            wgmma_fence();
            multiply(rS, q, k.of_tile(at.k.stage), false);
            wgmma_commit();
            // sync: S is in registers, K in use no more.
            wgmma_wait<0>();
            wgmma_own(rS);
            s.k_ring.release(at.k);
            at.k.advance();
            // [A2.6]
            weights.weigh(rS, work.blocks - 1);
            to_fragments<Element>(rP, rS);
        }
        // why: where the rows of V end before the tile other rows follow in memory, and 0 times NaN is NaN.
        const int32_t rows = work.sequence.seqlen_k - work.first_key - (work.blocks - 1) * kBlockN;
        if (rows < kBlockN && (p.call.shape.packed || p.call.shape.seqused_k)) {
            s.v_ring.wait(at.v);
            clear_rows(s.v[at.v.stage], rows, threadIdx.x, 128 * kConsumers);
            fence_proxy_async();
            // sync: all consumers have cleared their share before products of any read it.
            bar_sync(kCleared, 128 * kConsumers);
        }

#pragma unroll 1
        for (int32_t block = work.blocks - 2; block >= 0; block--) {
            // [A2.9]
            float rS[kBlockN / 2];
            s.k_ring.wait(at.k);
            take_turn(warpgroup);
            wgmma_own(rS);
            wgmma_fence();
            multiply(rS, q, k.of_tile(at.k.stage), false);
            wgmma_commit();
            // [A2.11]
            s.v_ring.wait(at.v);
            wgmma_own(rO);
            wgmma_fence();
            multiply(rO, rP, v.of_tile(at.v.stage), true);
            wgmma_commit();
            pass_turn(warpgroup);
            // [A2.12]
            // sync: S is in registers, K_j in use no more.
            wgmma_wait<1>();
            wgmma_own(rS);
            s.k_ring.release(at.k);
            at.k.advance();
            // [A2.13]
            const float2 rescale = weights.weigh(rS, block);
            // [A2.14]
            // sync: O is in registers, P and V in use no more.
            wgmma_wait<0>();
            wgmma_own(rO);
            s.v_ring.release(at.v);
            at.v.advance();
            to_fragments<Element>(rP, rS);
            weights.softmax.rescale_row(as_tile(rO), 0, 0, rescale.x);
            weights.softmax.rescale_row(as_tile(rO), 0, 1, rescale.y);
        }
        // [A2.19]
        s.v_ring.wait(at.v);
        wgmma_own(rO);
        wgmma_fence();
        multiply(rO, rP, v.of_tile(at.v.stage), true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_own(rO);
        s.v_ring.release(at.v);
        at.v.advance();
    }

    finish(p, s, work, warpgroup, weights.softmax, rO);
}

CF_DEVICE void consume(const HopperForwardParams& p, SharedStorage& s, int warpgroup) {
    Place at;
    if (warpgroup == kConsumers - 1) pass_turn(warpgroup);
#pragma unroll 1
    for (int q_phase = 0;; q_phase ^= 1) {
        // sync: Q has come, and with it the number of its tile.
        mbar_wait(s.q_full, q_phase);
        const uint32_t tile = ld_shared<uint32_t>(smem_addr(&s.tile));
        if (tile == kNoTile) break;
        attend(p, s, Work(p.call.shape, p.call.score, tile), warpgroup, at);
    }
    if (warpgroup == 0) take_turn(warpgroup);    // why: nobody else takes the last one that was passed
}

CF_DEVICE void flash_forward(const HopperForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warpgroup = warpgroup_of_thread();
    if (threadIdx.x == 0) {
        mbar_init(s.q_full, 1);
        mbar_init(s.q_empty, 4 * kConsumers);
        s.k_ring.init(kConsumers);
        s.v_ring.init(kConsumers);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<kConsumers == 2 ? 24 : 32>();
        if (threadIdx.x == 128 * kConsumers) Producer(p, s).run();
    } else {
        setmaxnreg_inc<kConsumers == 2 ? 240 : 160>();
        consume(p, s, warpgroup);
    }
}

CF_KERNEL(HopperForwardParams, kThreads, 1, flash_forward)
