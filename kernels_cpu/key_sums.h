// dK and dV of a key head, summed over its rows, which several jobs may share.
#pragma once
#include "pool.h"
#include "score.h"

template <class Real>
struct KeySums {
    int64_t keys, wide, wide_v;
    Real *dk, *dv;
    KeySums(const Call& p, int64_t count)
        : keys(count), wide(up(p.head_dim, W<Real>)), wide_v(up(p.head_dim_v, W<Real>)) {}
    int64_t reals() const { return keys * (wide + wide_v); }
    void place(Real* at) { dk = at, dv = at + keys * wide; }
    // Keys first to last of a head, rounded to the dtype of the result.
    void write(const Call& p, const Sequence& s, int64_t head, int64_t first, int64_t last,
               const Tensor& to_k, const Tensor& to_v) {
        for (int64_t j = first; j < last; ++j) {
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

constexpr int64_t kAdded = 288;    // keys of a job that adds up
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
        for (int64_t part = 1; part < count; ++part) {
            other.place(of<Real>(time * heads + head, part));
            for (int64_t i = first * total.wide; i < last * total.wide; i += W<Real>)
                store(total.dk + i, load(total.dk + i) + load(other.dk + i));
            for (int64_t i = first * total.wide_v; i < last * total.wide_v; i += W<Real>)
                store(total.dv + i, load(total.dv + i) + load(other.dv + i));
        }
        total.write(p, s, head % p.heads_k, first, last, to_k, to_v);
    }
};
