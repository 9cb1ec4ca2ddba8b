// dK and dV of a key head, summed over its rows, which several jobs may share.
//
// Sums begin block by block, when a row first sees one of its keys. why: of many documents in one sequence a job sees few
// blocks, and writing zeros to the others, and adding them, would take longer than the products.
#pragma once
#include "pool.h"
#include "score.h"

template <class Real>
struct KeySums {
    int64_t keys, wide, wide_v, blocks;
    Real *dk, *dv;
    uint8_t* begun;    // of each block of kSpanKeys keys: it has sums
    KeySums(const Call& p, int64_t count)
        : keys(count), wide(up(p.head_dim, W<Real>)), wide_v(up(p.head_dim_v, W<Real>)),
          blocks(blocks_of(count, kSpanKeys)) {}
    int64_t reals() const { return keys * (wide + wide_v) + blocks_of(blocks, sizeof(Real)); }
    void place(Real* at) {
        dk = at, dv = at + keys * wide;
        begun = reinterpret_cast<uint8_t*>(dv + keys * wide_v);
    }
    void begin_none() const { memset(begun, 0, size_t(blocks)); }
    bool has(int64_t j) const { return begun[j / kSpanKeys]; }
    // The block that key j is in.
    __attribute__((noinline)) void begin(int64_t j) const {
        if (has(j)) return;
        int64_t first = j / kSpanKeys * kSpanKeys, count = least(kSpanKeys, keys - first);
        memset(dk + first * wide, 0, size_t(count * wide) * sizeof(Real));
        memset(dv + first * wide_v, 0, size_t(count * wide_v) * sizeof(Real));
        begun[j / kSpanKeys] = 1;
    }
    // Keys first to last of a head, rounded to the dtype of the result.
    void write(const Call& p, const Sequence& s, int64_t head, int64_t first, int64_t last,
               const Tensor& to_k, const Tensor& to_v) {
        for (int64_t j = first; j < last; ++j) {
            begin(j);
            Real* row = dk + j * wide;
            // why + 0: as in write_panel, for rows that do not see the key.
            for (int64_t c = 0; c < wide; c += W<Real>)
                store(row + c, load(row + c) * splat<Real>(Real(p.scale)) + zero<Real>());
            for (int64_t c = 0; c < wide_v; c += W<Real>)
                store(dv + j * wide_v + c, load(dv + j * wide_v + c) + zero<Real>());
            int64_t at = s.first_k + j;
            narrow(to_k.data, s.batch * to_k.batch + head * to_k.head + at * to_k.row, row, p.head_dim,
                   to_k.column, to_k.type);
            narrow(to_v.data, s.batch * to_v.batch + head * to_v.head + at * to_v.row, dv + j * wide_v,
                   p.head_dim_v, to_v.column, to_v.type);
        }
    }
};

constexpr int64_t kAdded = kSpanKeys;    // keys of a job that adds up
constexpr int64_t kWantedJobs = 8, kLeastRows = 512;

// How many jobs share the rows of a key head, and the sums of each; `count` follows from the problem alone.
struct KeyParts {
    int64_t count, heads, bytes;    // of a key head; key heads of all sequences; of the sums of a job
    char* sums;                     // (heads, count): dK, then dV; null with one job, which has its own

    // With several jobs sums is null if there is no memory for so many `times` as much; to be freed.
    template <class Real>
    static KeyParts of_call(const Call& p, int64_t times = 1) {
        int64_t heads = p.batch * p.heads_k, rows = p.seqlen_q * (p.heads_q / p.heads_k);
        // why one: how many there are follows the batch, and each is a sum of its own.
        int64_t count = p.starts_q || p.reproducible
                            ? 1
                            : most(1, least(kWantedJobs / most(heads, 1), rows / kLeastRows));
        int64_t bytes = up(KeySums<Real>(p, p.seqlen_k).reals() * int64_t(sizeof(Real)), 64);
        size_t all = size_t(times * heads * count * bytes);
        return {count, heads, bytes, count > 1 ? static_cast<char*>(allocate_aligned(64, all)) : nullptr};
    }
    template <class Real>
    Real* of(int64_t head, int64_t part) const {
        return reinterpret_cast<Real*>(sums + (head * count + part) * bytes);
    }
    // Adds up and writes what the jobs of a head have summed, for a block of kAdded keys.
    template <class Real>
    void add(const Call& p, int64_t head, int64_t block, const Tensor& to_k, const Tensor& to_v,
             int64_t time = 0) const {
        const Sequence s(p, head / p.heads_k);
        int64_t first = block * kAdded, last = least(first + kAdded, s.keys);
        if (first >= last) return;
        KeySums<Real> total(p, s.keys), other(p, s.keys);
        total.place(of<Real>(time * heads + head, 0));
        bool found = false;    // why: what nobody has begun would be new pages of memory
        for (int64_t part = 0; part < count; ++part) {
            other.place(of<Real>(time * heads + head, part));
            if (!other.has(first)) continue;
            if (!found) {
                total = other, found = true;
                continue;
            }
            for (int64_t i = first * total.wide; i < last * total.wide; i += W<Real>)
                store(total.dk + i, load(total.dk + i) + load(other.dk + i));
            for (int64_t i = first * total.wide_v; i < last * total.wide_v; i += W<Real>)
                store(total.dv + i, load(total.dv + i) + load(other.dv + i));
        }
        total.write(p, s, head % p.heads_k, first, last, to_k, to_v);
    }
};
