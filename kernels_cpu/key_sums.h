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
    int64_t rows() const { return up(keys, kTile); }    // tiles may write behind the last key
    int64_t reals() const { return up(rows() * (wide + wide_v) + blocks_of(blocks, sizeof(Real)), W<Real>); }
    void place(Real* at) {
        dk = at, dv = at + rows() * wide;
        begun = reinterpret_cast<uint8_t*>(dv + rows() * wide_v);
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
    // What other rows have summed, of the block that key `first` begins, which both have begun.
    __attribute__((noinline)) void add(const KeySums& other, int64_t first) const {
        int64_t last = least(first + kSpanKeys, keys);
        for (int64_t i = first * wide; i < last * wide; i += W<Real>)
            store(dk + i, load(dk + i) + load(other.dk + i));
        for (int64_t i = first * wide_v; i < last * wide_v; i += W<Real>)
            store(dv + i, load(dv + i) + load(other.dv + i));
    }
    // Keys first to last of a head, rounded to the dtype of the result.
    __attribute__((noinline)) void write(const Call& p, const Sequence& s, int64_t head, int64_t first,
                                         int64_t last, const Tensor& to_k, const Tensor& to_v) {
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

// The rows of a key head in parts, each with sums of its own, which are added in order; the number of parts depends on the
// problem alone. A job has one part where key heads are few, else all parts of a head, one after the other.
struct KeyParts {
    const Call& p;
    bool apart;            // a job has one part
    int64_t heads;         // key heads of all sequences
    int64_t most_parts;    // of a key head of the longest sequence
    int64_t bytes;         // of the sums of a part
    char* sums;            // (heads, most_parts): dK, then dV; null if jobs have their own

    // sums is null, though jobs want it, if there is no memory for `times` as much; to be freed.
    template <class Real>
    static KeyParts of_call(const Call& p, int64_t times = 1) {
        int64_t rows = p.seqlen_q * (p.heads_q / p.heads_k);
        KeyParts x{p, false, p.batch * p.heads_k, 0, 0, nullptr};
        x.most_parts = x.of_rows(rows);
        x.apart = x.most_parts > 1 && x.heads < most(kWantedJobs, p.threads);
        x.bytes = up(KeySums<Real>(p, p.seqlen_k).reals() * int64_t(sizeof(Real)), 64);
        if (x.apart)
            x.sums =
                static_cast<char*>(allocate_aligned(64, size_t(times * x.heads * x.most_parts * x.bytes)));
        return x;
    }
    bool no_memory() const { return apart && !sums; }
    int64_t jobs_of_head() const { return apart ? most_parts : 1; }
    // Number of parts for this number of rows of a key head. why a reproducible call ignores the heads: its bits must not
    // depend on what else is computed.
    int64_t of_rows(int64_t rows) const {
        int64_t wanted = p.reproducible ? kWantedJobs : p.starts_q ? 1 : kWantedJobs / most(heads, 1);
        return most(1, least(wanted, rows / kLeastRows));
    }
    template <class Real>
    Real* of(int64_t head, int64_t part) const {
        return reinterpret_cast<Real*>(sums + (head * most_parts + part) * bytes);
    }
    // Adds up and writes what the jobs of a head have summed, for a block of kAdded keys.
    template <class Real>
    void add(int64_t head, int64_t block, const Tensor& to_k, const Tensor& to_v, int64_t time = 0) const {
        const Sequence s(p, head / p.heads_k);
        int64_t first = block * kAdded, parts = of_rows(s.queries * (p.heads_q / p.heads_k));
        if (first >= s.keys) return;
        KeySums<Real> total(p, s.keys), part(p, s.keys);
        total.place(of<Real>(time * heads + head, 0));
        bool found = false;    // why: what nobody has begun would be new pages of memory
        for (int64_t n = 0; n < parts; ++n) {
            part.place(of<Real>(time * heads + head, n));
            if (!part.has(first)) continue;
            if (found) total.add(part, first);
            else total = part, found = true;
        }
        total.write(p, s, head % p.heads_k, first, least(first + kAdded, s.keys), to_k, to_v);
    }
};
