// Attention forward of 8-bit floats (e4m3) on mma.sync, sm_89 and sm_120: flash_forward with half the products
// and half the bytes. O has 16 bits.
// Design note: docs/kernels/float8.md.
//
// Sources: A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1, as in flash_forward.cu. Weights brought to
// where e4m3 is finest: FlashAttention-3 (Shah et al., arXiv:2407.08608), section 3.3. Second level of sums:
// SageAttention2 (Zhang et al., arXiv:2411.10958). Products with scales that are all 1: PTX ISA 8.7, block scaling of mma.
//   [A1.4]  a block owns the rows Q_i of one head, a warp 16 kM of them          (lines 3 and 4)
//   [A1.5]  O = 0, row_sum = 0, row_max = -inf
//   [A1.6]  for each block of keys that the band of the query tile reaches, from the last to the first
//   [A1.8]  S = score(Q_i K_j^T), -inf where a pair is outside the band
//   [A1.9]  row_max rises; P = 2^8 e^(S - row_max); row_sum = e^(old_max - row_max) row_sum + rowsum(P); P rounded
//           to e4m3
//   [A1.10] T = P V_j, a sum over this block of keys alone; O = e^(old_max - row_max) O + T, in float
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys              (lines 13 to 15)
//
// Scales: a value is the stored number times q_scale, k_scale or v_scale of its batch and key head; the first two
// join the scale of scores, the third the normaliser of O.
//
// Grid:   x = ceil(seqlen_q / kBlockM) * heads_q * batch, in the order of lpt_query_tile: longest first,
//         heads in sections of L2 size. Packed: seqlen_q is the longest; blocks past the end of their
//         sequence return.
// Block:  kWarps warps, each with rows of its own from Q K^T to the end: no data passes between warps but K
//         and V.
// Shared: Q tile, kBlockM x kHeadDim bytes, and in its place O, kBlockM x kHeadDimV twice as wide; then two tiles
//         of K or V, kBlockN x kHeadDim bytes; 128 bytes.
//
// Assumes: last axes of q, k, v, o contiguous; seqlens below 2^30; row strides below 2^31 bytes; scale, and scales
//         of q and k, > 0 unless kMask is any.
#include "tile/ring.cuh"
#include "tile/score_tile.cuh"
#include "tile/online_softmax.cuh"
#include "tile/value_products.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT E4M3
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 64
#define CF_THREADS 128
#define CF_Q_IN_REGISTERS 0
#define CF_BLOCK_SCALE 0
#define CF_MIN_BLOCKS 2
#define CF_SHARED_BYTES 49280
#endif
// What a score can meet. band: the end of the keys, causal, window. any: also softcap, ALiBi, scale <= 0.
enum class Mask { band, any };
using Element = CF_ELEMENT;
constexpr Mask kMask = Mask::CF_MASK;
constexpr bool kQInRegisters = CF_Q_IN_REGISTERS;
constexpr bool kBlockScale = CF_BLOCK_SCALE;    // products of the family of sm_120
constexpr int kHeadDim = CF_HEAD_DIM;           // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;        // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS;
constexpr int kWarpRows = kBlockM / (kThreads / 32), kM = kWarpRows / 16, kN = kBlockN / 8;
constexpr uint32_t kL2SectionBytes = 16 << 20;    // of K and V that should stay in L2
static_assert(kWarpRows * (kThreads / 32) == kBlockM && kWarpRows % 16 == 0,
              "a warp owns whole 16-row blocks");
static_assert(kBlockN % 32 == 0 && sizeof(Element) == 1, "keys come in groups of 32");

// why scales, all 1: products with them have twice the rate, as others measured on an RTX 5090.
struct UnitScaled : Math<Element, 1, false> {
    CF_DEVICE static void multiply(float (&d)[4], const Fragment& a, const Fragment& b, int half) {
        constexpr uint32_t kOne = 0x7f7f7f7f;
        mma_m16n8k32_e4m3_scaled(d, a.part[0], b.part[0][2 * half], b.part[0][2 * half + 1], kOne, kOne);
    }
};
using Product = Select<kBlockScale, UnitScaled, Math<Element, 1, false>>::Type;
using QTile = Tile<Element, kBlockM, kHeadDim>;
using KTile = Tile<Element, kBlockN, kHeadDim>;
using VTile = Tile<Element, kBlockN, kHeadDimV>;
using OTile = Tile<__nv_bfloat16, kBlockM, kHeadDimV>;    // of either 16-bit type
using Ring = KeyValueRing<KTile, VTile, kThreads, 2, false>;
using QLoader = TileLoader<QTile, kThreads>;

// What the main loop seldom needs, or only the epilogue. why: in registers it would make the main loop spill.
struct Saved {
    int64_t first_q;                      // row of q of the tile's first query
    int32_t batch, head, queries;         // that exist in the tile
    int32_t first_query, first_key;       // positions of the tile and of block 0 of keys
    int32_t whole_first, whole_blocks;    // the first in which every pair counts, how many there are
    float unit;                           // from a score as the softmax finds it to natural units
    float value;                          // v_scale
    NarrowBand band;
};
struct SharedStorage {
    union {
        QTile q;
        OTile o;
    };
    Ring::Storage kv;
    alignas(128) Saved saved;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

// The first row of this warp in the tile. why opaque: rows of masks and of the epilogue are computed where they are
// needed, and none waits in a register through the loop.
CF_DEVICE int32_t warp_row() { return static_cast<int32_t>(opaque(threadIdx.x)) / 32 * kWarpRows; }

// What stored numbers are multiplied by.
CF_DEVICE float scale_of(const Scales& scales, int32_t batch, int32_t kv_head) {
    return scales.data ? scales.data[batch * scales.batch + kv_head * scales.head] : 1.0f;
}

// The rows of this warp, o * factor, through its part of the shared memory of O.
template <class Output>
CF_DEVICE void leave(const Tensor& o, const Saved& saved, int32_t columns,
                     const float (&rO)[kM][kHeadDimV / 8][4], const float (&factor)[kM][2], uint32_t sO) {
    Output* first = head_rows<Output>(o, saved.batch, saved.head, saved.first_q + warp_row());
    const GlobalRows<Output> gO(first, o.row, saved.queries - warp_row(), columns);
    store_value_rows(rO, factor, gO, sO + warp_row() * OTile::kPitch);
}

CF_DEVICE void flash_forward(const Fp8ForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();
    const Shape& shape = p.call.shape;
    const Score& rule = p.call.score;

    // [A1.4]
    const TileCoord work =
        lpt_query_tile(blockIdx.x, cdiv(shape.seqlen_q, kBlockM), shape, shape.heads_q, kL2SectionBytes);
    const Sequence sequence = sequence_of(shape, work.batch);
    const int32_t head = work.head, kv_head = head / (shape.heads_q / shape.heads_k);
    const int32_t m_first = work.tile * kBlockM, m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const GlobalRows<Element> gQ{head_rows<Element>(p.call.q, work.batch, head, sequence.first_q + m_first),
                                 p.call.q.row, sequence.seqlen_q - m_first, shape.head_dim};

    // Blocks of keys [first, first + blocks) hold a key for a query of the tile. why: after this they count
    // from first, which then needs no register.
    const Band band(rule, sequence);
    const Range keys = band.keys_of(m_first, m_end);
    const int32_t first = keys.first / kBlockN, blocks = cdiv(keys.end, kBlockN) - first;
    const int32_t first_key = first * kBlockN, keys_left = sequence.seqlen_k - first_key;
    const int64_t first_k = sequence.first_k + first_key;
    const GlobalRows<Element> gK{head_rows<Element>(p.call.k, work.batch, kv_head, first_k), p.call.k.row,
                                 keys_left, shape.head_dim};
    const GlobalRows<Element> gV{head_rows<Element>(p.call.v, work.batch, kv_head, first_k), p.call.v.row,
                                 keys_left, shape.head_dim_v};
    const float stored = scale_of(p.q_scale, work.batch, kv_head) * scale_of(p.k_scale, work.batch, kv_head);
    if (threadIdx.x == 0) {
        const int32_t whole_first = smaller(cdiv(band.first_key(m_end - 1), kBlockN) - first, blocks);
        const int32_t whole_end = band.end_key(m_first) / kBlockN - first;
        s.saved = {sequence.first_q + m_first,
                   work.batch,
                   head,
                   m_end - m_first,
                   m_first,
                   first_key,
                   whole_first,
                   larger(whole_end - whole_first, 0),
                   kMask == Mask::any ? 1.0f : static_cast<float>(rule.scale) * stored,
                   scale_of(p.v_scale, work.batch, kv_head),
                   NarrowBand(band)};
    }

    // [A1.5]
    float rO[kM][kHeadDimV / 8][4] = {};
    OnlineSoftmax<Product, kM, 8> softmax;    // why 8: the largest e4m3 is 448
    TileScore<Product> score(rule, sequence, head);
    if constexpr (kMask == Mask::any) score.head.scale *= stored;

    if (blocks > 0) {
        Ring ring(gK, gV, s.kv);
        const QLoader q_loader(gQ);
        const uint32_t sQ = smem_addr(s.q.data);
        q_loader.start(sQ, 0);
        cp_async_commit();
        const auto place = [](int32_t n) { return n; };
        ring.begin(blocks - 1, place);

        const SharedRows<Product, QTile> shared_q(sQ, warp_row());
        RegisterRows<kM, kQInRegisters ? kHeadDim / Product::kDepth : 1> register_q;
        if constexpr (kQInRegisters) {
            cp_async_wait<Ring::kAhead>();
            // sync: Q is in shared memory, copied by all threads (read from there, it is covered by the first
            // ring.next).
            __syncthreads();
            register_q.fill(shared_q);
        }
        const Saved& saved = s.saved;

        // [A1.6]
        for (int32_t block = blocks - 1; block >= 0; block--) {
            // [A1.8]
            float rS[kM][kN][4] = {};
            const uint32_t sK = ring.template next<Stream::key>(block, place);
            if constexpr (kQInRegisters) multiply_by_rows<Product, KTile>(rS, register_q, sK);
            else multiply_by_rows<Product, KTile>(rS, SharedRows<Product, QTile>(sQ, warp_row()), sK);
            const uint32_t sV = ring.template next<Stream::value>(block, place);

            const auto at = [&] {
                return Positions<false>(saved.first_query + warp_row(), saved.first_key + block * kBlockN);
            };
            if constexpr (kMask == Mask::any) {
                score.apply_softcap(rS);
                score.add_alibi(rS, at());
            }
            // why a branch: it is the same for the whole block of threads and stands between the products, where
            // a barrier splits the code anyway.
            if (uint32_t(block - saved.whole_first) >= uint32_t(saved.whole_blocks))
                mask_band(rS, at(), saved.band);
            // [A1.9]
            const float unit_log2 = kMask == Mask::any ? kLog2e : saved.unit * kLog2e;
            float rescale[kM][2];
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                CF_UNROLL
                for (int half = 0; half < 2; half++)
                    rescale[m][half] = softmax.softmax_row(rS, m, half, unit_log2);
            }
            // [A1.10]
            add_values<Product, VTile>(rO, rS, rescale, sV);
        }
    }

    // [A1.12] [A1.13]
    // sync: `saved` is visible, also to a block that had no keys and no other barrier; all are done with Q,
    // whose memory O is staged in.
    __syncthreads();
    const Saved saved = s.saved;
    const float sink =
        rule.sinks ? static_cast<const float*>(rule.sinks)[saved.head * rule.sinks_head] : -kInfinity;
    float* gLse = head_rows<float>(p.call.lse, saved.batch, saved.head, saved.first_q);
    float factor[kM][2];
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const auto row = softmax.finalize(m, half, saved.unit, sink);
            const int32_t query = warp_row() + 16 * m + 8 * half + threadIdx.x % 32 / 4;
            factor[m][half] = row.normaliser * saved.value;
            if (p.call.lse.data && threadIdx.x % 4 == 0 && query < saved.queries)
                st_global(gLse + query * p.call.lse.row, row.lse);
        }
    }
    if (p.o_type == kBiasF16)
        leave<__half>(p.call.o, saved, shape.head_dim_v, rO, factor, smem_addr(s.o.data));
    else leave<__nv_bfloat16>(p.call.o, saved, shape.head_dim_v, rO, factor, smem_addr(s.o.data));
}

CF_KERNEL(Fp8ForwardParams, kThreads, CF_MIN_BLOCKS, flash_forward)
