// Attention forward on mma.sync tensor cores with warp roles, sm_120: one warp sends for Q, K and V by bulk
// copies, the others do nothing but multiply and weigh.
//
// Source: A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1, with the producer of A2 =
// FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 2. Errata: line 10 of the one and line 21 of the
// other print an inverse on a rescaling that must not be there.
//   [A2.p]  the producer keeps K_j and V_j of the blocks of keys coming, last block first
//   [A1.4]  a warp owns 16 rows of Q_i                                            (lines 3 and 4)
//   [A1.6]  for each block of keys that the tile of queries reaches; a warp whose rows do not passes over it
//   [A1.8]  S = Q_i K_j^T, -inf where a pair is outside the band
//   [A1.9]  row_max rises; P = e^(S - row_max); row_sum = e^(old_max - row_max) row_sum + rowsum(P);
//           O = e^(old_max - row_max) O
//   [A1.10] O = O + P V_j
//   [A2.21] O = O / row_sum, LSE = row_max + log(row_sum); 0 and -inf in a row without keys
//
// Grid:   as of flash_forward_sm90, without clusters.
// Block:  4 kConsumers warps, each with 16 rows of its own, then one warp of which one thread is the producer.
//         No barrier of the block in the loop: a warp waits for K and V to come, and says when it has read them.
// Shared: kQStages of Q, kConsumers tiles of 64 x kHeadDim each (O leaves through them); kStages tiles of K,
//         kBlockN x kHeadDim; kStages of V, kBlockN x kHeadDimV; barriers.
//
// Assumes: what tensor maps ask for: base and strides of q, k, v multiples of 16 bytes, last axes contiguous;
//         rows of o start on 16-byte boundaries; seqlens below 2^30; scale > 0.
// Not here: what a score meets beside a band (flash_forward); splitting keys over blocks (flash_decode).
#include "hopper/forward.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 64
#define CF_THREADS 288
#define CF_STAGES 2
#define CF_Q_STAGES 1
#define CF_Q_IN_REGISTERS 0
#define CF_SHARED_BYTES 99328
#endif
using Element = CF_ELEMENT;
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS, kStages = CF_STAGES;
constexpr int kQStages = CF_Q_STAGES;    // 2: Q of the next tile comes while this one is worked on
constexpr bool kQInRegisters = CF_Q_IN_REGISTERS;
constexpr int kConsumers = kBlockM / 64;    // of four warps each
constexpr int kConsumerWarps = 4 * kConsumers;
static_assert(kThreads == 32 * (kConsumerWarps + 1) && kBlockM % 64 == 0);
static_assert(kHeadDimV <= kHeadDim, "O leaves through the tile of Q");

using Product = Math<Element, 1, false>;
using QTile = SwizzledTile<Element, 64, kHeadDim>;
using KTile = SwizzledTile<Element, kBlockN, kHeadDim>;
using VTile = SwizzledTile<Element, kBlockN, kHeadDimV>;
using OTile = SwizzledTile<Element, 16, kHeadDimV>;    // of a warp
using Ring = StageRing<kStages>;
using QRing = StageRing<kQStages>;

// A block of columns of a tile, as products of warps read it: the swizzle of bulk copies is theirs.
template <class T> using Columns = Tile<Element, T::kRows, T::kBlockColumns>;
template <class T> CF_DEVICE constexpr bool swizzled_alike() {
    for (int row = 0; row < 16; row++)
        for (int chunk = 0; chunk < Columns<T>::kChunks; chunk++)
            if (T::offset(row, chunk) != Columns<T>::offset(row, chunk)) return false;
    return true;
}
static_assert(swizzled_alike<QTile>() && swizzled_alike<KTile>() && swizzled_alike<VTile>());

struct Kernel;
struct SharedStorage {
    QTile q[kQStages][kConsumers];
    KTile k[kStages];
    VTile v[kStages];
    QRing q_ring;
    Work<Kernel> work[2][kQStages];    // by phase and stage of Q, whose Q is here or coming, or next
    Ring k_ring, v_ring;

    CF_DEVICE QTile& q_tile(int stage, int warpgroup) { return q[stage][warpgroup]; }
    CF_DEVICE OTile& o(int stage, int warpgroup, int warp) {
        return reinterpret_cast<OTile*>(q[stage][warpgroup].data)[warp];
    }
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

constexpr int kRowsRead = kTurn;                // the first named barrier of kConsumers
constexpr int kCleared = kTurn + kConsumers;    // a named barrier

// What hopper/forward.cuh asks for.
struct Kernel {
    using Params = HopperForwardParams;
    using Storage = SharedStorage;
    using QTile = ::QTile;
    using KTile = ::KTile;
    using VTile = ::VTile;
    using QRing = ::QRing;
    using KRing = Ring;
    using VRing = Ring;
    using Product = ::Product;
    // why 8: weights up to 256 are as exact in 16 bits.
    using Softmax = TileSoftmax<Product, 1, 0, 8>;
    static constexpr Mask kMask = Mask::CF_MASK;
    static constexpr bool kTurns = false, kScheduler = false;
    static constexpr int kHeadDimV = ::kHeadDimV;
    static constexpr int kBlockM = ::kBlockM, kBlockN = ::kBlockN, kConsumers = ::kConsumers, kCluster = 1;
};
static_assert(Kernel::kMask == Mask::band);

// Where a consumer stands in the rings, from tile to tile.
struct Place {
    QRing::Cursor q;
    Ring::Cursor keys;    // of K and V
};

// A warp has read a stage.
CF_DEVICE void release(uint64_t& empty) {
    // sync: every lane of the warp has.
    __syncwarp();
    if (elect_one()) mbar_arrive(empty);
}

// The 16 rows of a warp, which is of `warpgroup`, four warps of 64 rows.
CF_DEVICE void attend(const HopperForwardParams& p, SharedStorage& s, const Work<Kernel>& work, int warpgroup,
                      Place& at) {
    const double scale = p.call.score.scale;
    Weights<Kernel> weights(p.call.score, work, work.first_row + 64 * warpgroup,
                            static_cast<float>(scale * 1.4426950408889634));
    float rO[kHeadDimV / 2] = {};
    if (work.blocks > 0) {
        // [A1.4]
        const int32_t warp_row = static_cast<int32_t>(threadIdx.x) / 32 % 4 * 16;
        const uint32_t sQ = smem_addr(s.q_tile(at.q.stage, warpgroup).data);
        const auto shared_q = [&](int columns) {
            return SharedRows<Product, Columns<QTile>>(sQ + columns * QTile::kBlockBytes, warp_row);
        };
        RegisterRows<1, kQInRegisters ? QTile::kBlockColumns / 16 : 1> rQ[QTile::kBlocks];
        if constexpr (kQInRegisters) {
    CF_UNROLL
            for (int i = 0; i < QTile::kBlocks; i++) rQ[i].fill(shared_q(i));
        }
        // why: where the rows of V end before the tile other rows follow in memory, and 0 times NaN is NaN.
        const int32_t rows = work.sequence.seqlen_k - work.first_key - (work.blocks - 1) * kBlockN;
        if (rows < kBlockN && (p.call.shape.packed || p.call.shape.seqused_k)) {
            s.v_ring.wait(at.keys);
            clear_rows(s.v[at.keys.stage], rows, threadIdx.x, 32 * kConsumerWarps);
            // sync: the copy that comes here next comes after these writes.
            fence_proxy_async();
            // sync: all consumers have cleared their share before any reads it.
            bar_sync(kCleared, 32 * kConsumerWarps);
        }
        // Blocks of keys in which the warp's rows see a key.
        const int32_t first_row = work.first_row + 64 * warpgroup + warp_row;
        const Range seen = Band(p.call.score, work.sequence)
                               .keys_of(work.rows.query(first_row), work.rows.query(first_row + 15) + 1);
        const int32_t first = (seen.first - work.first_key) / kBlockN;
        const int32_t end = cdiv(seen.end - work.first_key, kBlockN);
        // [A1.6]
#pragma unroll 1
        for (int32_t block = work.blocks - 1; block >= 0; block--, at.keys.advance()) {
            const int stage = at.keys.stage;
            const bool reached = block >= first && block < end;
            // [A1.8]
            float rS[kBlockN / 2] = {};
            s.k_ring.wait(at.keys);
            if (reached) {
                CF_UNROLL
                for (int i = 0; i < KTile::kBlocks; i++) {
                    const uint32_t sK = smem_addr(s.k[stage].data) + i * KTile::kBlockBytes;
                    if constexpr (kQInRegisters)
                        multiply_by_rows<Product, Columns<KTile>>(as_tile(rS), rQ[i], sK);
                    else multiply_by_rows<Product, Columns<KTile>>(as_tile(rS), shared_q(i), sK);
                }
            }
            release(s.k_ring.empty[stage]);
            // [A1.9]
            if (reached) weights.softmax.follow_rise(as_tile(rO), 0, weights.weigh(rS, block));
            // [A1.10]
            s.v_ring.wait(at.keys);
            if (reached) {
                constexpr int kPart = VTile::kBlockColumns / 2;    // of rO
                CF_UNROLL
                for (int i = 0; i < VTile::kBlocks; i++)
                    multiply_by_columns<Product, Columns<VTile>>(
                        as_tile(reinterpret_cast<float(&)[kPart]>(rO[i * kPart])), as_tile(rS),
                        smem_addr(s.v[stage].data) + i * VTile::kBlockBytes);
            }
            release(s.v_ring.empty[stage]);
        }
    }
    // sync: four warps have read Q, and O of each takes the place of Q of others.
    bar_sync(kRowsRead + warpgroup, 128);
    finish<Kernel, Element>(p, s, work, warpgroup, at.q.stage, weights.softmax, static_cast<float>(scale),
                            1.0f, rO);
}

CF_DEVICE void consume(const HopperForwardParams& p, SharedStorage& s, int warpgroup) {
    Place at;
#pragma unroll 1
    for (;; at.q.advance()) {
        // sync: Q has come, and with it what its tile is.
        s.q_ring.wait(at.q);
        const Work<Kernel>& work = s.work[at.q.phase][at.q.stage];
        if (work.blocks == kNoTile) break;
        attend(p, s, work, warpgroup, at);
    }
}

CF_DEVICE void flash_forward(const HopperForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const int warpgroup = warpgroup_of_thread();
    if (threadIdx.x == 0) {
        Producer<Kernel>::prefetch(p);
        s.q_ring.init(kConsumerWarps);
        s.k_ring.init(kConsumerWarps);
        s.v_ring.init(kConsumerWarps);
        mbar_init_fence();
    }
    // sync: barriers are initialised before anyone uses them.
    __syncthreads();
    if (warpgroup < kConsumers) consume(p, s, warpgroup);
    else if (elect_one()) Producer<Kernel>(p, s).run();
}

CF_KERNEL(HopperForwardParams, kThreads, 1, flash_forward)
