// [D1] New keys and values of a cache, and queries, rotated. Jobs are heads of a sequence.
#pragma once
#include "panel.h"
#include "pool.h"

// Stores the new keys and values of a key head behind those in use; keys are rotated first unless reads rotate them.
template <class Real>
RARE void append_job(void* what, int64_t unit) {
    Call& p = *static_cast<Call*>(what);
    int64_t b = unit / p.heads_k, head = unit % p.heads_k;
    const Sequence s(p, b);
    int64_t start = least(most(p.used_k[b * p.used_step], 0), p.seqlen_k);
    int64_t first = p.starts_new ? p.starts_new[b] : 0;
    int64_t first_position = p.rotary_starts ? p.rotary_starts[b] : start;
    Real *row, *cos_row, *sin_row;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(row, most(p.head_dim, p.head_dim_v)), x.allocate(cos_row, p.rotary / 2),
            x.allocate(sin_row, p.rotary / 2);
    });
    if (!scratch) return;
    auto append = [&](const Tensor& from, const Tensor& to, const Tensor& scale, int64_t width,
                      bool rotated) {
        const Keys<Real> cache{p, to, s, head, width};
        const Real unit_of =
            scale.data ? element<Real>(scale.data, b * scale.batch + head * scale.head) : Real(1);
        for (int64_t j = start; j < s.keys; ++j) {
            if (cache.hidden(j)) continue;
            int64_t fresh = j - start;
            widen(row, from.data, b * from.batch + head * from.head + (first + fresh) * from.row, width,
                  from.column, from.type);
            if (rotated) rotate(p, row, first_position + fresh, cos_row, sin_row);
            for (int64_t i = 0; scale.data && i < width; ++i) row[i] /= unit_of;
            if (to.type == kCodes) cache.write_codes(row, j);
            else narrow(to.data, cache.at(j), row, width, to.column, to.type);
        }
    };
    append(p.new_k, p.k, p.k_scale, p.head_dim, p.rotary && !p.rotate_cache);
    append(p.new_v, p.v, p.v_scale, p.head_dim_v, false);
}

struct Rotation {
    Call& p;
    Tensor q;    // the rotated ones
};

// Rotates the queries of a head, and rounds them to their dtype.
template <class Real>
RARE void rotate_job(void* what, int64_t unit) {
    const Rotation& to = *static_cast<Rotation*>(what);
    Call& p = to.p;
    int64_t b = unit / p.heads_q, head = unit % p.heads_q, d = p.head_dim;
    const Sequence s(p, b);
    const int64_t first_position = p.rotary_starts ? p.rotary_starts[b] : s.offset;
    Real *row, *cos_row, *sin_row;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(row, d), x.allocate(cos_row, p.rotary / 2), x.allocate(sin_row, p.rotary / 2);
    });
    if (!scratch) return;
    for (int64_t i = 0; i < s.queries; ++i) {
        auto in = [&](const Tensor& t) { return b * t.batch + head * t.head + (s.first_q + i) * t.row; };
        widen(row, p.q.data, in(p.q), d, p.q.column, p.q.type);
        rotate(p, row, first_position + i, cos_row, sin_row);
        narrow(to.q.data, in(to.q), row, d, 1, p.q.type);
    }
}

// The queries of the call become rotated ones, in memory that the caller frees.
template <class Real>
RARE void* rotate_queries(Call& p) {
    int64_t of_head = (p.starts_q ? p.starts_q[p.batch] : p.seqlen_q) * p.head_dim;
    int64_t of_batch = p.starts_q ? 0 : p.heads_q * of_head, batches = p.starts_q ? 1 : p.batch;
    void* memory = malloc(size_t(batches * p.heads_q * of_head * bytes_of(p.q.type)) + 1);
    if (!memory) {
        p.state = kNoMemory;
        return nullptr;
    }
    Rotation to{p, {memory, of_batch, of_head, p.head_dim, 1, p.q.type, 0}};
    pool::run(p, rotate_job<Real>, &to, p.batch * p.heads_q);
    p.q = to.q;
    return memory;
}
