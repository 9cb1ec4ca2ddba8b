// The keys of one warp of flash_decode: steps of 16 keys, every kWarps-th of a split, copied from the cache into a
// ring of stages that is the warp's own. So nothing passes between warps, and no barrier of the block is needed.
// Design note: docs/kernels/decode.md.
//
// K has to define
//   Loader                      WarpLoader of a tile of K or V as it is stored
//   KeyUnits ValueUnits         the scales and zeros of 4-bit codes, or NoUnits
//   kStages kWarps kTuring kCodes
//   kTileBytes kUnitBytes kOfKeys    of a stage: a tile of K or V; units of both; units of K, which come first
#pragma once
#include "cache/slots.cuh"

template <class K> struct KeyStream {
    const DecodeParams& p;
    const Sequence& sequence;
    int32_t batch, kv_head;
    typename K::Loader &k_loader, &v_loader;
    typename K::KeyUnits& k_units;
    typename K::ValueUnits& v_units;
    uint32_t k_ring, v_ring, unit_ring;    // addresses of the stages
    int32_t count, first_key;              // steps, and the first key of step 0
    int32_t slot;                          // of the step to load next, -1 for none
    uint32_t absent = 0;    // a bit for each step loaded, the last one's lowest: it has no slot

    CF_DEVICE int32_t key(int32_t step) const { return first_key + step * K::kWarps * kStepKeys; }
    // Starts the copies of a step; a group of copies is one step, empty ones included.
    CF_DEVICE void load(int32_t step) {
        if constexpr (K::kCodes && !K::kTuring) {
            if (step > 0) store_units(step - 1);
        }
        absent = absent << 1 | static_cast<uint32_t>(slot) >> 31;
        if (step < count) {
            const int32_t first = key(step), stage = step % K::kStages;
            if (slot >= 0) {
                const int32_t row = row_in_slot(p.cache, first), left = sequence.seqlen_k - first;
                // why the order: what Turing copies takes registers until it is stored.
                if constexpr (!K::kTuring) copy(stage, row, left);
                k_units.load(p.cache.k_units, slot, kv_head, row, left, p.shape.head_dim);
                v_units.load(p.cache.v_units, slot, kv_head, row, left, p.shape.head_dim_v);
                if constexpr (K::kTuring) store_units(step), copy(stage, row, left);
            }
            // why a step early: an entry of the table arrives while the products run.
            if (step + 1 < count) slot = slot_of(p.cache, batch, first + K::kWarps * kStepKeys);
        }
        if constexpr (!K::kTuring) cp_async_commit();
    }
    // Whether the step that is multiplied, `ahead` before the last one loaded, has no keys in the cache.
    CF_DEVICE bool is_absent(int ahead) const { return absent >> ahead & 1; }

  private:
    CF_DEVICE void copy(int32_t stage, int32_t row, int32_t left) {
        k_loader.copy(k_ring + stage * K::kTileBytes, slot, row, left);
        v_loader.copy(v_ring + stage * K::kTileBytes, slot, row, left);
    }
    // The scales and zeros that have come, of the step last loaded.
    CF_DEVICE void store_units(int32_t step) {
        const uint32_t to = unit_ring + step % K::kStages * K::kUnitBytes;
        k_units.store(to, step);
        v_units.store(to + K::kOfKeys, step);
    }
};
