// Code that the Hopper backward kernels share: the work of a block, its shared memory, the helper warps next to its two
// consumer warpgroups, and its start. `Kernel` is a struct of constants that each of them defines:
//   Element, kAny                    as in TransposedGradient
//   kHeadDim, kHeadDimV              the largest head dims of q and k, and of v
//   kBlockM, kBlockN                 queries and keys of a block
//   kSwizzleOfK                      the swizzle of K, see SwizzledTile
//   kSumsDQ                          whether dQ of each step is added to sums in global memory
//   kDOStages                        stages of dO: kStages, or 1
//   kSubtracted                      whether the products subtract LSE and delta. Then these have one stage, which is
//                                    free when dO is. Else they have kStages, which are free when dO is, or if dO has
//                                    one stage, when Q is
//   kPairTiles                       tiles of keys by queries (of P, dS) that the kernel keeps in shared memory
//   kSpans                           kind spans: whether tiles are skipped as flash_reach says, see SeenStep
// Design note: docs/kernels/backward_sm90.md.
#pragma once
#include "attention/reach.cuh"
#include "backward/gradient_sums.cuh"
#include "hopper/consumers.cuh"
#include "hopper/kept_pairs.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/query_terms.cuh"
#include "hopper/dq_order.cuh"
#include "hopper/transposed_gradient.cuh"
#include "tile/mma.cuh"

// What a block works on.
// why in shared memory: the little that loops need of it is read there again, and takes no registers.
struct WorkTile {
    Sequence sequence;
    NarrowBand band;
    int32_t batch, kv_head, first_head, end_head;    // query heads that read K and V
    int32_t first_key;
    Range tiles, whole;    // tiles of queries that see a key of the block; in which every pair counts
    DqOrder order;         // over them
};
// The bits of a partial tile, in kernels of kind spans only. why a base: in others it takes no bytes.
template <bool kSpans, int kQueries, int kKeys> struct KeptStorage {};
template <int kQueries, int kKeys> struct KeptStorage<true, kQueries, kKeys> {
    KeptPairs<kStages, kQueries, kKeys> kept;
};
template <class Kernel> struct HopperBackward {
    using Element = typename Kernel::Element;
    static constexpr int kHeadDim = Kernel::kHeadDim, kHeadDimV = Kernel::kHeadDimV;
    static constexpr int kBlockM = Kernel::kBlockM, kBlockN = Kernel::kBlockN;
    static constexpr int kDOStages = Kernel::kDOStages;
    static constexpr bool kSingleDO = kDOStages == 1, kSumsDQ = Kernel::kSumsDQ;
    static_assert(kDOStages == kStages || (kSingleDO && !Kernel::kSubtracted));
    using Product = Math<Element, 1, false>;
    using QTile = SwizzledTile<Element, kBlockM, kHeadDim>;
    using DOTile = SwizzledTile<Element, kBlockM, kHeadDimV>;
    using KTile = SwizzledTile<Element, kBlockN, kHeadDim, Kernel::kSwizzleOfK>;
    using VTile = SwizzledTile<Element, kBlockN, kHeadDimV>;
    // Of P and dS: rows are keys, or queries where these are no whole blocks of columns.
    static constexpr bool kQueryRows = kBlockM % 64 != 0;
    using PairTile = SwizzledTile<Element, kQueryRows ? kBlockM : kBlockN, kQueryRows ? kBlockN : kBlockM>;
    using Sums = GradientSums<kBlockM, kHeadDim, 256>;    // as flash_backward.cu has them
    using Terms = typename TermsOf<Kernel::kSubtracted, Element, kStages, kBlockM>::Type;
    static constexpr bool kSpans = Kernel::kSpans;
    using Gradient = TransposedGradient<Product, Kernel::kAny, kBlockM, Kernel::kSubtracted, !kSpans>;

    // A query head and a tile of its queries, and where their stages are: all roles take these steps in one order.
    struct BandStep {
        const WorkTile& work;
        int32_t head, tile;
        typename StageRing<kStages>::Cursor at;
        typename StageRing<kDOStages>::Cursor of_single;    // of dO, if it has one

        CF_DEVICE BandStep(const BackwardParams&, const WorkTile& of)
            : work(of), head(of.first_head), tile(of.order.start) {}
        CF_DEVICE const auto& do_at() const {
            if constexpr (!kSingleDO) return at;
            else return of_single;
        }
        CF_DEVICE bool exists() const { return head < work.end_head; }
        CF_DEVICE void advance() {
            if (tile == work.order.stop) tile = work.order.start, head++;
            else tile = work.order.after(tile);
            at.advance();
            if constexpr (kSingleDO) of_single.advance();
        }
    };
    // The same of kind spans: only tiles that reach the block, which words of flash_reach list, 32 tiles to a word. There is
    // one at least.
    // why every role reads the words: the first to do so brings them into L1 for the others, and none waits for another.
    struct SeenStep {
        const BackwardParams& call;
        const WorkTile& work;
        int32_t head, tile;
        uint32_t left =
            0;    // bits of the word that holds `tile`: this tile and those that are still to come
        typename StageRing<kStages>::Cursor at;

        CF_DEVICE SeenStep(const BackwardParams& params, const WorkTile& of)
            : call(params), work(of), head(of.first_head), tile(end_tile()) {
            static_assert(!kSingleDO);
            find();
        }
        CF_DEVICE const auto& do_at() const { return at; }
        CF_DEVICE bool exists() const { return head < work.end_head; }
        // Some pairs of the tile do not count.
        // why opaque: the compiler would keep the address in registers for `find`.
        CF_DEVICE bool partial() const {
            const uint32_t own_tile = opaque(static_cast<uint32_t>(tile));
            const auto own_head = static_cast<int32_t>(opaque(static_cast<uint32_t>(head)));
            const Reach* words = reach_of(call, work.batch, own_head, work.first_key / kBlockN);
            return words[own_tile / 32].partial >> own_tile % 32 & 1;
        }
        CF_DEVICE void advance() {
            left ^= 1u << tile % 32;
            find();
            at.advance();
        }

      private:
        CF_DEVICE int32_t end_tile() const { return cdiv(work.tiles.end, 32) * 32; }
        CF_DEVICE const Reach& word(int32_t number) const {
            return reach_of(call, work.batch, head, work.first_key / kBlockN)[number];
        }
        CF_DEVICE void find() {
#pragma unroll 1
            while (left == 0) {
                // No tile of this word is left: go to the word before, or to the last one of the next head.
                tile = tile / 32 * 32 - 1;
                if (tile < work.tiles.first / 32 * 32) {
                    if (++head == work.end_head) return;
                    tile = end_tile() - 1;
                }
                left = word(tile / 32).seen;
            }
            tile = tile / 32 * 32 + 31 - __clz(static_cast<int>(left));
        }
    };
    template <bool, class> struct StepOf {
        using Type = BandStep;
    };
    template <class Any> struct StepOf<true, Any> {
        using Type = SeenStep;
    };
    using Step = typename StepOf<kSpans, void>::Type;

    struct SharedStorage : KeptStorage<kSpans, kBlockM, kBlockN> {
        KTile k;
        VTile v;
        QTile q[kStages];
        DOTile d_o[kDOStages];
        PairTile pairs[Kernel::kPairTiles];
        float dq[kSumsDQ ? kBlockM * kHeadDim
                         : 4];    // layout: Sums; without, 16 bytes that keep what follows aligned
        Terms terms;
        StageRing<kStages> q_ring;
        StageRing<kDOStages> do_ring;
        uint64_t statistics[kStages];    // LSE and delta have come
        uint64_t keys_full;              // K and V have come
        uint64_t dq_full, dq_empty;      // dQ is complete; has left. Phase: the stage
        uint32_t number;                 // of the block, with counters
        WorkTile work;
        uint32_t partial
            [kStages];    // of kind spans: whether KeptPairs has words for the tile; else all of its pairs count
    };

    // ---- helpers

    CF_DEVICE static void load_tiles(const HopperBackwardParams& p, SharedStorage& s, const WorkTile& work) {
        const int32_t batch = p.call.shape.packed ? 0 : work.batch;    // why: packed tensors have one batch
        const int32_t first_q = static_cast<int32_t>(work.sequence.first_q);
        const int32_t first_k = static_cast<int32_t>(work.sequence.first_k) + work.first_key;
        mbar_arrive_expect_tx(s.keys_full, KTile::kBytes + VTile::kBytes);
        load_tile(s.k, p.k_map, s.keys_full, first_k, work.kv_head, batch);
        load_tile(s.v, p.v_map, s.keys_full, first_k, work.kv_head, batch);
#pragma unroll 1
        for (Step step(p.call, work); step.exists(); step.advance()) {
            const int stage = step.at.stage, row = first_q + step.tile * kBlockM;
            s.q_ring.acquire(step.at, QTile::kBytes);
            load_tile(s.q[stage], p.q_map, s.q_ring.full[stage], row, step.head, batch);
            s.do_ring.acquire(step.do_at(), DOTile::kBytes);
            const int do_stage = step.do_at().stage;
            load_tile(s.d_o[do_stage], p.do_map, s.do_ring.full[do_stage], row, step.head, batch);
        }
    }

    // Waits until the consumers have read LSE and delta of the step whose memory this step reuses.
    template <class Storage> CF_DEVICE static void wait_for_place(Storage& s, const Step& step) {
        const int stage = step.at.stage, phase = step.at.phase;
        // sync: they have released the dO of the step before, after S and dP were in registers. Before the first step
        // nothing has to be released: a wait for the other parity of a fresh barrier passes.
        if constexpr (Kernel::kSubtracted) mbar_wait(s.do_ring.empty[stage ^ 1], phase ^ stage ^ 1);
        // sync: or the Q or dO of the step before that.
        else mbar_wait(kSingleDO ? s.q_ring.empty[stage] : s.do_ring.empty[stage], phase ^ 1);
    }

    // LSE or delta, by a warp each. why: one warp with both has too few registers. Storage: SharedStorage, or another
    // with the same terms, statistics and rings.
    template <class Params, class Storage>
    CF_DEVICE static void load_term(const Params& p, const Rows& rows, bool is_lse, Storage& s,
                                    const WorkTile& work) {
        constexpr int kEach = cdiv(kBlockM, 32);
        if (is_lse) s.terms.end();
        const float missing = is_lse ? Terms::kWithoutKeys : 0.0f;
        // why opaque: helpers of kind spans have no register for a thread index that stays the same.
        const auto thread = [] {
            if constexpr (kSpans) return opaque(threadIdx.x);
            else return threadIdx.x;
        };
#pragma unroll 1
        for (Step step(p.call, work); step.exists(); step.advance()) {
            const int stage = step.at.stage;
            if constexpr (kSpans) {
                static_assert(Kernel::kSubtracted);
                // why here: consumers of the step before have yet to begin, and those of the step before that have read
                // the words of this place: LSE and delta waited for their dO.
                const bool partial = step.partial();
                if (is_lse && thread() % 32 == 0)
                    st_shared(smem_addr(s.partial + stage), static_cast<uint32_t>(partial));
                if (partial)
                    s.kept.make(p.call.score, work.sequence, work.band, step.head, step.tile, work.first_key,
                                stage, is_lse);
            }
            float terms[kEach];
            const int32_t lane = thread() % 32, first = step.tile * kBlockM + lane;
            const int32_t end = smaller(work.sequence.seqlen_q - step.tile * kBlockM, kBlockM) - lane;
            const float* from = head_rows<float>(rows, work.batch, step.head, work.sequence.first_q + first);
            CF_UNROLL
            for (int i = 0; i < kEach; i++) {
                terms[i] = 32 * i < end ? ld_global(from) : -kInfinity;
                from += 32 * rows.row;
            }
            wait_for_place(s, step);
            const int32_t place = thread() % 32;
            const float unit = is_lse ? Terms::unit_of_lse(static_cast<float>(p.call.score.scale)) : 1.0f;
            CF_UNROLL
            for (int i = 0; i < kEach; i++) {
                const float x = terms[i] == -kInfinity ? missing : unit * terms[i];
                s.terms.put(is_lse, stage, 32 * i + place, x);
            }
            // sync: all lanes have stored before one arrives for the consumers.
            __syncwarp();
            if (thread() % 32 == 0) mbar_arrive(s.statistics[stage]);
        }
    }

    // S of pairs of a partial tile that do not count, of a warp whose first key is `warp_key` of the block.
    template <int n> CF_DEVICE static void apply_mask(const SharedStorage& s, float (&rS)[n], int stage,
                                                      int warp_key) {
        if constexpr (kSpans)
            if (ld_shared<uint32_t>(smem_addr(s.partial + stage))) s.kept.apply(rS, stage, warp_key);
    }

    CF_DEVICE static void add_dq(const HopperBackwardParams& p, SharedStorage& s, const WorkTile& work) {
#pragma unroll 1
        for (Step step(p.call, work); step.exists(); step.advance()) {
            const int64_t number = Sums::number(p.call.shape, work.sequence, step.tile, step.head) *
                                       DqOrder::chains(p.call.dq_wave) +
                                   work.order.chain(step.tile);
            // sync: every consumer warp has stored its share.
            mbar_wait(s.dq_full, step.at.stage);
            float* sums = Sums::tile(p.call.dq_accumulator, number);
            uint32_t turn = 1;
            if (p.call.dq_turns) {
                const int32_t first = step.tile * kBlockM, queries = work.sequence.seqlen_q;
                const Range seen =
                    blocks_seen(work.band, {first, smaller(first + kBlockM, queries)}, kBlockN);
                turn = work.order.before(step.tile, seen, cdiv(queries, kBlockM));
            }
            if (turn == 0) {
                // why: the first block stores instead of adding, so no kernel has to zero the sums.
                bulk_store(sums, s.dq, sizeof s.dq);
            } else {
                if (p.call.dq_turns) {
                    // sync: what blocks of earlier keys store and add is in memory, and comes before what is added here.
                    semaphore_wait(p.call.dq_turns + number, turn);
                    fence_proxy_async_global();
                }
                bulk_reduce_add(sums, s.dq, sizeof s.dq);
            }
            tma_store_commit();
            // sync: dQ has been read, its place is free; in the end: no copy reads shared memory any more.
            tma_store_wait_read<0>();
            mbar_arrive(s.dq_empty);
            if (p.call.dq_turns) {
                // sync: it has been added before the next block may add.
                tma_store_wait<0>();
                semaphore_release(p.call.dq_turns + number);
            }
        }
    }

    // The work of the block with this number, without keys if they begin past the end of their sequence. item: bytes of
    // an element of Q and dO.
    CF_DEVICE static WorkTile work_of(const BackwardParams& call, uint32_t block,
                                      uint32_t item = sizeof(Element)) {
        const Shape& shape = call.shape;
        const TileCoord mine =
            lpt_key_tile(block, cdiv(shape.seqlen_k, kBlockN), shape, kL2SectionBytes / item);
        const Sequence sequence = sequence_of(shape, mine.batch);
        const Band band(call.score, sequence);
        DqOrder order(mine.tile, cdiv(shape.seqlen_k, kBlockN), call.dq_wave, band);
        const int32_t first_key = order.block * kBlockN, group = shape.heads_q / shape.heads_k;
        const Range queries = band.queries_of(first_key, first_key + kBlockN);
        const Range tiles{queries.first / kBlockM, cdiv(queries.end, kBlockM)};
        order.set_tiles(tiles);
        return {sequence,
                NarrowBand(band),
                mine.batch,
                mine.head,
                mine.head * group,
                (mine.head + 1) * group,
                first_key,
                tiles,
                Gradient::whole_tiles(band, first_key, kBlockN),
                order};
    }

    // The whole kernel; consume(s, work, warpgroup) is what the consumers do.
    template <class Consume> CF_DEVICE static void run(const HopperBackwardParams& p, Consume consume) {
        SharedStorage& s = shared_memory<SharedStorage>();
        uint32_t block = blockIdx.x;
        if (p.call.next_block) {
            // why: a block waits for blocks with lower numbers only, and a block that has a number is running. In which
            // order blocks start is the hardware's business.
            if (threadIdx.x == 0) s.number = take_ticket(p.call.next_block);
            // sync: all threads see the number.
            __syncthreads();
            block = s.number;
        }
        const WorkTile work = work_of(p.call, block);
        if (work.first_key >= work.sequence.rows_k) return;

        const int warpgroup = warpgroup_index();
        if (threadIdx.x == 0) {
            tma_prefetch(p.k_map), tma_prefetch(p.v_map), tma_prefetch(p.q_map), tma_prefetch(p.do_map);
            s.work = work;
            s.q_ring.init(kConsumers);
            s.do_ring.init(kConsumers);
            CF_UNROLL
            for (int i = 0; i < kStages; i++) mbar_init(s.statistics[i], 2);
            mbar_init(s.keys_full, 1);
            mbar_init(s.dq_full, kConsumerThreads / 32);
            mbar_init(s.dq_empty, 1);
            mbar_init_fence();
        }
        // sync: barriers are initialised before anyone uses them.
        __syncthreads();
        if (warpgroup < kConsumers) {
            setmaxnreg_inc<kConsumerRegisters>();
            consume(s, s.work, warpgroup);
        } else {
            setmaxnreg_dec<kHelperRegisters>();
            if (work.tiles.first == work.tiles.end) return;
            const int warp = threadIdx.x / 32 % 4;
            const auto is = [=](int number) {
                if constexpr (kSpans) return static_cast<int>(opaque(threadIdx.x) / 32 % 4) == number;
                else return warp == number;
            };
            if (is(0) && elect_one()) load_tiles(p, s, s.work);
            if (is(1)) load_term(p, p.call.lse, true, s, s.work);
            if (is(2)) load_term(p, p.call.delta, false, s, s.work);
            if constexpr (kSumsDQ)
                if (is(3) && elect_one()) add_dq(p, s, s.work);
        }
    }
};
