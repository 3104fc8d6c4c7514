// Attention of a few queries over the same memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "native_numbers.h"

constexpr long QUERIES = 8;  // at most, that one thread holds against the same keys
constexpr long SLICE = 32;   // values that are read at a time, so that they are still in the near cache for the next query
constexpr int TOGETHER = LANES < 16 ? 8 : 16;  // vectors of sums, of all queries that are read together: so many fit in the registers

// As many sums at a time as a vector holds: [a0 .. a15], [b0 .. b15], .. -> [a, b, ..].
#ifdef __AVX512F__
template <int OWN> struct Lanes {  // of two vectors of sums with so many lanes each: the lower halves of all, and the upper ones
    alignas(64) int32_t low[LANES], high[LANES];
    constexpr Lanes() : low(), high() {
        for (int i = 0; i < LANES; i++) low[i] = i / (OWN / 2) * OWN + i % (OWN / 2), high[i] = low[i] + OWN / 2;
    }
};
template <int OWN> constexpr Lanes<OWN> LANES_OF{};
template <int N> static inline Vec totals(Vec* dots) {
    if constexpr (N == 1) return dots[0];
    else {
        const __m512i low = _mm512_load_si512(LANES_OF<N>.low), high = _mm512_load_si512(LANES_OF<N>.high);
#pragma GCC unroll 8
        for (int e = 0; e < N / 2; e++) {
            const __m512 a = (__m512)dots[2 * e], b = (__m512)dots[2 * e + 1];
            dots[e] = (Vec)_mm512_permutex2var_ps(a, low, b) + (Vec)_mm512_permutex2var_ps(a, high, b);
        }
        return totals<N / 2>(dots);
    }
}
#elif defined(__AVX2__)
template <int N> static inline Vec totals(Vec* dots) {
    __m256 of[2];  // of four vectors the sums of their lower halves, then of their upper ones
    for (int i = 0; i < 2; i++) {
        const __m256 *d = (const __m256*)dots + 4 * i;
        of[i] = _mm256_hadd_ps(_mm256_hadd_ps(d[0], d[1]), _mm256_hadd_ps(d[2], d[3]));
    }
    return (Vec)_mm256_permute2f128_ps(of[0], of[1], 0x20) + (Vec)_mm256_permute2f128_ps(of[0], of[1], 0x31);
}
#else
template <int N> static inline Vec totals(Vec* dots) {
    float found[N];
    for (int e = 0; e < N; e++) found[e] = total(dots[e]);
    return load(found);
}
#endif

// Up to ``LANES`` numbers of a head; ``WHOLE``: its size is a multiple of that, so that there are always so many.
template <bool WHOLE, class T> static inline Vec part_of(const T* p, long n) {
    if constexpr (WHOLE) return load(p);
    else return load(p, n);
}
// Of a query and n keys, one after the other in the order in which they lie in memory.
template <bool WHOLE, class T> static inline Vec dots(const T* q, const T* keys, long n, long d) {
    Vec found[LANES] = {};
    for (long e = 0; e < n; e++, keys += d) {
        Vec dot = {};
        for (long i = 0; i < d; i += LANES) add(dot, part_of<WHOLE>(q + i, d - i), part_of<WHOLE>(keys + i, d - i));
        found[e] = dot;
    }
    return totals<LANES>(found);
}
// Of a query and ``LANES`` keys side by side, which is faster where they are near.
template <bool WHOLE, class T> static inline Vec dots_near(const T* q, const T* keys, long d) {
    Vec found[LANES] = {};
    for (long i = 0; i < d; i += LANES) {
        const Vec part = part_of<WHOLE>(q + i, d - i);
        for (int e = 0; e < LANES; e++) add(found[e], part, part_of<WHOLE>(keys + e * d + i, d - i));
    }
    return totals<LANES>(found);
}
// Adds n values, weighted by the scores of Q queries, to columns i.. of their ``sums``, in C vectors at once.
template <bool WHOLE, int Q, int C, class T>
static inline void mix_columns(const T* v, const float* scores, long wide, long n, long d, long i, float* sums) {
    Vec found[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) found[q][c] = load(sums + q * d + i + c * LANES, d - i - c * LANES);
    for (long m = 0; m < n; m++)
        for (int c = 0; c < C; c++) {
            const Vec value = part_of<WHOLE>(v + m * d + i + c * LANES, d - i - c * LANES);
            for (int q = 0; q < Q; q++) add(found[q][c], all(scores[q * wide + m]), value);
        }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) store(sums + q * d + i + c * LANES, found[q][c], d - i - c * LANES);
}
template <bool WHOLE, int Q, int C, class T>
static inline void mix(const T* v, const float* scores, long wide, long n, long d, float* sums, long i = 0) {
    for (; i + (C > 1 ? C * LANES : 1) <= d; i += C * LANES) mix_columns<WHOLE, Q, C>(v, scores, wide, n, d, i, sums);
    if constexpr (C > 1) mix<WHOLE, Q, C / 2>(v, scores, wide, n, d, sums, i);
}

// One query of an attention: where it stands, its bias for each row of memory (or null), and where its result goes.
template <class T> struct Query {
    const T *q, *bias;
    T* to;
};

// Calls ``work(j, how many)`` with the queries from j on, four, two or one at a time.
template <class Work> static inline void by_fours(long n, Work work) {
    long j = 0;
    for (; n - j >= 4; j += 4) work(j, std::integral_constant<int, 4>());
    for (; n - j >= 2; j += 2) work(j, std::integral_constant<int, 2>());
    for (; j < n; j++) work(j, std::integral_constant<int, 1>());
}

static long width(long M) { return (M + LANES - 1) / LANES * LANES; }  // room for M scores

// Attention of n queries over the same M rows of memory. ``room``: for n * (width(M) + d) numbers.
template <bool WHOLE, class T>
static void attended(const Query<T>* queries, long n, const T* k, const T* v, long M, long d, float* room) {
    const float scale = 1.0f / std::sqrt(float(d));
    const long wide = width(M);
    float sum[QUERIES], *sums = room + n * wide;
    for (long m = 0; m < M; m += LANES)
        for (long j = 0; j < n; j++) {  // the first query brings keys near
            const bool near = j > 0 && m + LANES <= M;
            const T* keys = k + m * d;
            const Vec found = near ? dots_near<WHOLE>(queries[j].q, keys, d) : dots<WHOLE>(queries[j].q, keys, std::min(LANES, M - m), d);
            store(room + j * wide + m, found * scale);
        }
    for (long j = 0; j < n; j++) {
        float* scores = room + j * wide;
        const T* bias = queries[j].bias;
        for (long m = 0; bias && m < M; m += LANES) store(scores + m, load(scores + m, M - m) + load(bias + m, M - m), M - m);
        std::fill(scores + M, scores + wide, -INFINITY);
        Vec high = load(scores);
        for (long m = LANES; m < wide; m += LANES) {
            Vec s = load(scores + m);
            high = s > high ? s : high;
        }
        float most = high[0];
        for (long e = 1; e < LANES; e++) most = std::max(most, high[e]);
        for (long m = 0; m < wide; m += LANES) store(scores + m, exponential(load(scores + m) - most));
    }
    // Sums go over memory one row after the other: hidden rows add nothing, wherever they stand. Several queries need not wait for each.
    by_fours(n, [&](long j, auto q) {
        constexpr long Q = decltype(q)::value;
        float found[Q] = {};
        for (long m = 0; m < M; m++)
            for (long e = 0; e < Q; e++) found[e] += room[(j + e) * wide + m];
        std::copy(found, found + Q, sum + j);
    });
    std::fill(sums, sums + n * d, 0.0f);
    for (long m = 0; m < M; m += SLICE)
        by_fours(n, [&](long j, auto q) {
            constexpr int Q = decltype(q)::value;
            mix<WHOLE, Q, std::min(8, TOGETHER / Q)>(v + m * d, room + j * wide + m, wide, std::min(SLICE, M - m), d, sums + j * d);
        });
    for (long j = 0; j < n; j++)
        for (long i = 0; i < d; i += LANES) store(queries[j].to + i, load(sums + j * d + i, d - i) / sum[j], d - i);
}

template <class T>
static void attend(const Query<T>* queries, long n, const T* k, const T* v, long M, long d, float* room) {
    if (d % LANES) attended<false>(queries, n, k, v, M, d, room);
    else attended<true>(queries, n, k, v, M, d, room);
}
