// Causal flash attention over documents (2205.14135) and its gradients, for training on a CPU.
//
// A thread computes one head of one document (or of the output a piece of it, where there are fewer heads than threads), some queries at a
// time, whose scores stay in its caches; keys and values are widened to fp32 once. Scores that a query does not see are not computed, but
// for the rest of a tile. All sums are in fp32, in an order that does not depend on threads.
#pragma once

#include "native_products.h"

constexpr long TALL = LANES == 16 ? 8 : 4;  // rows of a tile: with two vectors each, so many sums fit in the registers
constexpr long WIDE = 2 * LANES;            // columns of a tile
constexpr long SOME = 64;                   // queries at a time
constexpr long NEAR = 512;                  // keys at a time in the backward pass: two squares of numbers stay in the near cache

// Numbers that a thread keeps between documents; more are given back.
struct Room {
    std::vector<float>& of;
    Room(std::vector<float>& kept, long size) : of(kept) { of.resize(std::max<size_t>(of.size(), size)); }
    ~Room() {
        if (of.size() > (4 << 20)) std::vector<float>().swap(of);
    }
};

struct View {  // of [B, h, N, d], the last dimension without gaps
    void* at;
    long batch, head, row;
    template <class T> T* of(long b, long h, long n) const { return (T*)at + b * batch + h * head + n * row; }
};

struct Flash {  // as ``_Flash`` of heads/native_flash.py
    View q, k, v, out, grad, dq, dk, dv;  // dk and dv are fp32, and have a head for every head of q
    float* lse;                           // [B, h, N]
    const int64_t* documents;             // a row of the batch, the first row of the document in it, and the one behind its last
    long count, heads, kv_heads, rows, d, threads, pieces;
    double scale;
};

static inline long up(long n, long to) { return (n + to - 1) / to * to; }

// out [TALL, C vectors] = a times b [n, C vectors], plus what is there. ``ar``, ``ak``: between rows and columns of a.
template <int C>
__attribute__((noinline)) static void tile(const float* a, long ar, long ak, const float* b, long bk, long n, float* out, long wide, bool plus) {
    Vec sums[TALL][C] = {};
    for (long r = 0; plus && r < TALL; r++)
        for (int c = 0; c < C; c++) sums[r][c] = load(out + r * wide + c * LANES);
    for (long k = 0; k < n; k++, a += ak, b += bk) {
        Vec columns[C];
        for (int c = 0; c < C; c++) columns[c] = load(b + c * LANES);
        for (long r = 0; r < TALL; r++)
            for (int c = 0; c < C; c++) add(sums[r][c], all(a[r * ar]), columns[c]);
    }
    for (long r = 0; r < TALL; r++)
        for (int c = 0; c < C; c++) store(out + r * wide + c * LANES, sums[r][c]);
}
// The same for ``wide`` columns, a multiple of LANES.
static inline void strip(const float* a, long ar, long ak, const float* b, long n, float* out, long wide, bool plus) {
    for (long c = 0; c < wide; c += WIDE)
        (wide - c >= WIDE ? tile<2> : tile<1>)(a, ar, ak, b + c, wide, n, out + c, wide, plus);
}

// Rows, widened and multiplied by a factor, and zeros up to ``all_rows`` rows of ``wide`` numbers.
template <class T> static void widen(const T* from, long row, long rows, long all_rows, long d, long wide, float factor, float* to) {
    std::fill(to, to + all_rows * wide, 0.0f);
    for (long n = 0; n < rows; n++)
        for (long i = 0; i < d; i += LANES) store(to + n * wide + i, load(from + n * row + i, d - i) * factor, d - i);
}
// Rows of ``wide`` numbers, widened, as tiles read them side by side: [rows / WIDE, d, WIDE].
static void turn(const float* from, long rows, long d, long wide, float* to) {
    for (long p = 0; p < rows; p += WIDE, to += d * WIDE)
        for (long i = 0; i < d; i++)
            for (long j = 0; j < WIDE; j++) to[i * WIDE + j] = from[(p + j) * wide + i];
}

// One head of one document: what both passes read, and scores.
struct Head {
    long b, first, M, h, g, d, wide, keys, line;  // ``keys``: M and the rest of a tile; ``line``: from one query's scores to the next's
    Head(const Flash& c, long i) {
        const int64_t* document = c.documents + i / c.heads * 3;
        b = document[0], first = document[1], M = document[2] - first, h = i % c.heads, g = h / (c.heads / c.kv_heads);
        d = c.d, wide = up(d, LANES), keys = up(M, WIDE), line = std::min(keys, NEAR) + LANES;  // not a power of two apart: see caches
    }
    // Dot products of the queries [from, from + SOME), which ``q`` holds, with the keys [near, end), in tiles [.., d, WIDE].
    void scores(const float* q, const float* tiles, long from, long near, long end, float* to, long line) const {
        for (long p = near; p < end; p += WIDE)
            for (long r = std::max(0L, (p - from) / TALL * TALL); r < SOME; r += TALL)
                tile<2>(q + r * wide, wide, 1, tiles + p * d, WIDE, d, to + r * line + p - near, line, false);
    }
    long seen(long row) const { return up(row + TALL, WIDE); }  // behind the last key whose score the tile of rows at ``row`` has
};

// Numbers of the keys m, m + 1, .. that a query sees, else ``other``.
static inline Vec seen(Vec x, long m, long query, float other) {
    return m + LANES <= query + 1 ? x : COUNT + int(m) <= int(query) + Ints{} ? x : all(other);
}

template <class T> static void flash_head(const Flash& c, const Head& x, long piece) {
    static thread_local std::vector<float> kept;
    const long line = x.keys + LANES;
    Room room(kept, (3 * x.keys + 2 * SOME) * x.wide + SOME * line);
    float *keys = kept.data(), *values = keys + x.keys * x.wide, *tiles = values + x.keys * x.wide, *q = tiles + x.keys * x.wide;
    float *out = q + SOME * x.wide, *scores = out + SOME * x.wide;
    widen(c.k.of<T>(x.b, x.g, x.first), c.k.row, x.M, x.keys, x.d, x.wide, 1.0f, keys);
    widen(c.v.of<T>(x.b, x.g, x.first), c.v.row, x.M, x.keys, x.d, x.wide, 1.0f, values);
    turn(keys, x.keys, x.d, x.wide, tiles);
    for (long from = piece * SOME; from < x.M; from += c.pieces * SOME) {
        const long n = std::min(SOME, x.M - from);
        widen(c.q.of<T>(x.b, x.h, x.first + from), c.q.row, n, SOME, x.d, x.wide, c.scale, q);
        x.scores(q, tiles, from, 0, up(from + n, WIDE), scores, line);
        for (long r = 0; r < n; r++) {
            float* s = scores + r * line;
            const long query = from + r, end = std::min(x.keys, x.seen(from + r / TALL * TALL));
            Vec high = all(-INFINITY), sums = {};
            for (long m = 0; m < end; m += LANES) {
                Vec y = seen(load(s + m), m, query, -INFINITY);
                high = high > y ? high : y;
            }
            const float most = highest(high);
            for (long m = 0; m < end; m += LANES) {
                Vec p = exponential(seen(load(s + m), m, query, -INFINITY) - most);
                store(s + m, p), sums += p;
            }
            const float sum = total(sums);
            c.lse[(x.b * c.heads + x.h) * c.rows + x.first + query] = most + std::log(sum);
            q[r] = 1.0f / sum;  // the tile of queries is not read any more
        }
        for (long r = 0; r < n; r += TALL) strip(scores + r * line, line, 1, values, std::min(x.keys, x.seen(from + r)), out + r * x.wide, x.wide, false);
        for (long r = 0; r < n; r++) {
            T* to = c.out.of<T>(x.b, x.h, x.first + from + r);
            for (long i = 0; i < x.d; i += LANES) store(to + i, load(out + r * x.wide + i) * q[r], x.d - i);
        }
    }
}

template <class T> static void flash_backward_head(const Flash& c, const Head& x, long) {
    static thread_local std::vector<float> kept;
    Room room(kept, (6 * x.keys + 3 * SOME) * x.wide + 2 * SOME * (x.line + 1));
    const long all_keys = x.keys * x.wide, some = SOME * x.wide;
    float *keys = kept.data(), *key_tiles = keys + all_keys, *values = key_tiles + all_keys, *value_tiles = values + all_keys;
    float *dk = value_tiles + all_keys, *dv = dk + all_keys, *q = dv + all_keys, *grad = q + some, *dq = grad + some;
    float *lse = dq + some, *delta = lse + SOME, *p = delta + SOME, *ds = p + SOME * x.line;
    widen(c.k.of<T>(x.b, x.g, x.first), c.k.row, x.M, x.keys, x.d, x.wide, 1.0f, keys);
    widen(c.v.of<T>(x.b, x.g, x.first), c.v.row, x.M, x.keys, x.d, x.wide, 1.0f, values);
    turn(keys, x.keys, x.d, x.wide, key_tiles), turn(values, x.keys, x.d, x.wide, value_tiles);
    std::fill(dk, dk + 2 * all_keys, 0.0f);
    for (long from = 0; from < x.M; from += SOME) {
        const long n = std::min(SOME, x.M - from);
        widen(c.q.of<T>(x.b, x.h, x.first + from), c.q.row, n, SOME, x.d, x.wide, c.scale, q);
        widen(c.grad.of<T>(x.b, x.h, x.first + from), c.grad.row, n, SOME, x.d, x.wide, 1.0f, grad);
        std::fill(dq, dq + some, 0.0f), std::fill(lse, lse + SOME, INFINITY), std::fill(delta, delta + SOME, 0.0f);
        for (long r = 0; r < n; r++) {
            const T* out = c.out.of<T>(x.b, x.h, x.first + from + r);
            Vec sum = {};
            for (long i = 0; i < x.d; i += LANES) add(sum, load(grad + r * x.wide + i), load(out + i, x.d - i));
            delta[r] = total(sum), lse[r] = c.lse[(x.b * c.heads + x.h) * c.rows + x.first + from + r];
        }
        for (long near = 0; near < from + n; near += NEAR) {
            const long end = std::min(up(from + n, WIDE), near + NEAR);
            x.scores(q, key_tiles, from, near, end, p, x.line), x.scores(grad, value_tiles, from, near, end, ds, x.line);
            for (long r = 0; r < SOME; r++)
                for (long m = near; m < std::min(end, x.seen(from + r / TALL * TALL)); m += LANES) {
                    float *at = p + r * x.line + m - near, *to = ds + r * x.line + m - near;
                    Vec y = exponential(seen(load(at), m, from + r, -INFINITY) - lse[r]);
                    store(at, y), store(to, y * (load(to) - delta[r]));
                }
            for (long r = 0; r < n; r += TALL) {
                const long seen = std::min(end, x.seen(from + r)) - near;
                if (seen > 0) strip(ds + r * x.line, x.line, 1, keys + near * x.wide, seen, dq + r * x.wide, x.wide, true);
            }
            for (long m = near; m < end; m += TALL) {
                const long r = std::max(0L, m - from);
                if (r >= SOME) break;
                strip(p + r * x.line + m - near, 1, x.line, grad + r * x.wide, SOME - r, dv + m * x.wide, x.wide, true);
                strip(ds + r * x.line + m - near, 1, x.line, q + r * x.wide, SOME - r, dk + m * x.wide, x.wide, true);
            }
        }
        for (long r = 0; r < n; r++)
            for (long i = 0; i < x.d; i += LANES)
                store(c.dq.of<T>(x.b, x.h, x.first + from + r) + i, load(dq + r * x.wide + i) * float(c.scale), x.d - i);
    }
    for (long m = 0; m < x.M; m++)
        for (long i = 0; i < x.d; i += LANES) {
            store(c.dk.of<float>(x.b, x.h, x.first + m) + i, load(dk + m * x.wide + i), x.d - i);
            store(c.dv.of<float>(x.b, x.h, x.first + m) + i, load(dv + m * x.wide + i), x.d - i);
        }
}

template <class Of> static void by_heads(const Flash& c, Of of) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
    for (long i = 0; i < c.count * c.heads * c.pieces; i++) of(c, Head(c, i / c.pieces), i % c.pieces);
}
