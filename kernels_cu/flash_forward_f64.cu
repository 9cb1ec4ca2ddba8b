// Attention forward in double precision on tensor cores, sm_80 and sm_90.
// Design note: docs/kernels/float64.md.
//
// Source: A1, Algorithm 1, as flash_forward has it; tags and signs are explained there.
//   [A1.4]  a block owns the rows Q_i of one head, a warp 16 of them
//   [A1.5]  O = 0, row_sum = 0, row_max = -inf
//   [A1.6]  for each block of keys that the band of the query tile reaches, from the last to the first
//   [A1.8]  S = scale Q_i K_j^T, -inf outside the band
//   [A1.9]  row_max rises; P = e^(S - row_max); row_sum = e^(old_max - row_max) row_sum + rowsum(P)
//   [A1.10] O = e^(old_max - row_max) O + P V_j
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys
//
// Grid:   x = ceil(seqlen_q / kBlockM) * heads_q * batch, in the order of lpt_query_tile. Packed: seqlen_q is the
//         longest; blocks past the end of their sequence return.
// Block:  kBlockM / 16 warps: no data passes between them but K and V.
// Shared: Q tile, then one tile of K and one of V.
//
// Assumes: last axes of q, k, v, o contiguous; seqlens below 2^30; row strides below 2^31 bytes.
// Not here: mask, bias, ALiBi, softcap, dropout, spans, one order of additions (simple_forward).
#include "attention/softmax.cuh"
#include "tile/double_products.cuh"
#include "tile/ring.cuh"
#include "tile/score_tile.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT double
#define CF_HEAD_DIM 128
#define CF_HEAD_DIM_V 128
#define CF_MASK band
#define CF_BLOCK_M 64
#define CF_BLOCK_N 32
#define CF_THREADS 128
#define CF_PRODUCT_ROWS 8
#define CF_SHARED_BYTES 131072
#endif
using Element = CF_ELEMENT;
constexpr int kProductRows = CF_PRODUCT_ROWS;    // of an instruction
constexpr int kHeadDim = CF_HEAD_DIM;            // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;         // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS;
constexpr int kN = kBlockN / 8, kNO = kHeadDimV / 8;
constexpr uint32_t kL2SectionBytes = 16 << 20;    // of K and V that should stay in L2
static_assert(kSame<Element, double> && kBlockM == kThreads / 32 * 16, "a warp owns 16 rows of doubles");

using QTile = Tile<Element, kBlockM, kHeadDim>;
using KTile = Tile<Element, kBlockN, kHeadDim>;
using VTile = Tile<Element, kBlockN, kHeadDimV>;
using Ring = KeyValueRing<KTile, VTile, kThreads, 2, false>;

struct SharedStorage {
    QTile q;
    Ring::Storage kv;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

CF_DEVICE void flash_forward_f64(const ForwardParams& p) {
    SharedStorage& s = shared_memory<SharedStorage>();

    // [A1.4]
    const int32_t tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = lpt_query_tile(blockIdx.x, tiles, p.shape, p.shape.heads_q,
                                          kL2SectionBytes / uint32_t(sizeof(Element)));
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t head = work.head, kv_head = head / (p.shape.heads_q / p.shape.heads_k);
    const int32_t m_first = work.tile * kBlockM, m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const int lane = threadIdx.x % 32, row_first = static_cast<int>(threadIdx.x) / 32 * 16;

    // Blocks of keys [first, first + blocks) hold a key for a query of the tile; from here on they count from first.
    const Band band(p.score, sequence);
    const Range keys = band.keys_of(m_first, m_end);
    const int32_t first = keys.first / kBlockN, blocks = cdiv(keys.end, kBlockN) - first;
    const int32_t first_key = first * kBlockN, keys_left = sequence.seqlen_k - first_key;
    const int64_t first_k = sequence.first_k + first_key;
    const int32_t whole_first = smaller(cdiv(band.first_key(m_end - 1), kBlockN) - first, blocks);
    const int32_t whole_blocks = larger(band.end_key(m_first) / kBlockN - first - whole_first, 0);

    // [A1.5]
    double rO[kNO][4] = {};
    RowSoftmax<double> softmax[2];

    if (blocks > 0) {
        const NarrowBand narrow_band(band);
        const TileLoader<QTile, kThreads> q_loader(
            {head_rows<Element>(p.q, work.batch, head, sequence.first_q + m_first), p.q.row,
             sequence.seqlen_q - m_first, p.shape.head_dim});
        // sync: in the first group of copies of the ring, whose first `next` waits for it.
        q_loader.start_once(smem_addr(s.q.data), 0);
        using Rows = GlobalRows<Element>;
        Ring ring(
            Rows{head_rows<Element>(p.k, work.batch, kv_head, first_k), p.k.row, keys_left, p.shape.head_dim},
            Rows{head_rows<Element>(p.v, work.batch, kv_head, first_k), p.v.row, keys_left,
                 p.shape.head_dim_v},
            s.kv);
        const auto place = [](int32_t step) { return step; };
        ring.begin(blocks - 1, place);
        const DoubleRowReader<QTile> rows_of_q(smem_addr(s.q.data), row_first);

        // [A1.6]
#pragma unroll 1
        for (int32_t block = blocks - 1; block >= 0; block--) {
            // [A1.8]
            double rS[1][kN][4] = {};
            const uint32_t sK = ring.next<Stream::key>(block, place);
            multiply_by_rows<kProductRows, kHeadDim / 8>(rS[0], rows_of_q, DoubleRowReader<KTile>(sK));
            const uint32_t sV = ring.next<Stream::value>(block, place);
            CF_UNROLL
            for (int n = 0; n < kN; n++) {
                CF_UNROLL
                for (int e = 0; e < 4; e++) rS[0][n][e] *= p.score.scale;
            }
            if (uint32_t(block - whole_first) >= uint32_t(whole_blocks)) {
                const Positions<false> at(m_first + row_first, first_key + block * kBlockN);
                mask_band(rS, at, narrow_band);
            }
            // [A1.9]
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                double highest = rS[0][0][2 * half];
                CF_UNROLL
                for (int n = 0; n < kN; n++) {
                    CF_UNROLL
                    for (int i = 0; i < 2; i++) highest = larger(highest, rS[0][n][2 * half + i]);
                }
                const double rescale = softmax[half].update_max(max_over_lanes<4>(highest));
                CF_UNROLL
                for (int n = 0; n < kN; n++) {
                    CF_UNROLL
                    for (int i = 0; i < 2; i++) {
                        double& x = rS[0][n][2 * half + i];
                        x = softmax[half].exp_and_sum(x);
                    }
                }
                CF_UNROLL
                for (int n = 0; n < kNO; n++) rO[n][2 * half] *= rescale, rO[n][2 * half + 1] *= rescale;
            }
            // [A1.10]
            multiply_by_columns<kProductRows>(rO, rS[0], DoubleColumnReader<VTile>(sV));
        }
    }

    // [A1.12] [A1.13]
    const int64_t first_row = sequence.first_q + m_first + row_first;
    const GlobalRows<Element> gO{head_rows<Element>(p.o, work.batch, head, first_row), p.o.row,
                                 m_end - m_first - row_first, p.shape.head_dim_v};
    const double sink =
        p.score.sinks ? static_cast<const double*>(p.score.sinks)[head * p.score.sinks_head] : -kInfinity;
    double normaliser[2];
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const FinalRow<double> end = softmax[half].finalize<4>(sink);
        normaliser[half] = end.normaliser;
        const int row = 8 * half + lane / 4;
        if (row < gO.rows && p.lse.data && lane % 4 == 0)
            st_global(head_rows<double>(p.lse, work.batch, head, first_row) + row * p.lse.row, end.lse);
    }
    store_rows(rO, normaliser, gO);
}

CF_KERNEL(ForwardParams, kThreads, 1, flash_forward_f64)
