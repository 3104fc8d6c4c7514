// Products of few rows and a matrix in panels. All rows of a panel are computed by one thread, so that its weights are read once, and
// weights are asked for ahead of their use, so that reading goes on while rows are computed.
#pragma once

#include <omp.h>

#include <algorithm>

#include "native_numbers.h"

#ifdef __AVX512F__
constexpr int ROWS = 12;  // of one product at a time: so many sums fit in the registers
#else
constexpr int ROWS = 2;
#endif
constexpr long AHEAD = 2048;  // bytes between the weights that are multiplied and those that are asked for

// Two inputs of a panel. In fp32 they stand one after the other, in bfloat16 in pairs that lie side by side in 32 bits.
static inline void two(const float* w, Vec& even, Vec& odd) { even = load(w), odd = load(w + LANES); }
static inline void two(const bf16* w, Vec& even, Vec& odd) {
    Bits pairs;
    memcpy(&pairs, w, sizeof pairs);
    even = (Vec)(pairs << 16), odd = (Vec)(pairs & 0xffff0000u);
}
template <int R> static inline void ask(const void* w) {  // for one or two rows the processor reads ahead by itself
    if (R > 2) __builtin_prefetch((const char*)w + AHEAD);
}
// R rows of x times a panel. Not inlined: copies in every product would crowd the processor's cache of instructions, which a small
// model's pass would feel.
template <int R, class W> __attribute__((noinline)) static void panel(const float* x, const W* w, long H, Vec* out) {
    Vec sums[R][2] = {};
    for (long h = 0; h < H; h += 2, w += 2 * LANES) {
        Vec even, odd;
        two(w, even, odd), ask<R>(w);
        for (int r = 0; r < R; r++) {
            sums[r][0] += x[r * H + h] * even;
            sums[r][1] += x[r * H + h + 1] * odd;
        }
    }
    for (int r = 0; r < R; r++) out[r] = sums[r][0] + sums[r][1];
}
template <int R> __attribute__((noinline)) static void panel(const bf16* x, const bf16* w, long H, Vec* out) {
    Vec sums[R][2] = {};
    for (long h = 0; h < H; h += 4)
        for (int half = 0; half < 2; half++, w += 2 * LANES) {
            Bits pairs;
            memcpy(&pairs, w, sizeof pairs), ask<R>(w);
            for (int r = 0; r < R; r++) {
                uint32_t both;
                memcpy(&both, x + r * H + h + 2 * half, sizeof both);
#ifdef __AVX512BF16__
                sums[r][half] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][half], (__m512bh)(Bits{} + both), (__m512bh)pairs);
#else
                sums[r][half] += (Vec)(Bits{} + (both << 16)) * (Vec)(pairs << 16);
                sums[r][half] += (Vec)(Bits{} + (both & 0xffff0000u)) * (Vec)(pairs & 0xffff0000u);
#endif
            }
        }
    for (int r = 0; r < R; r++) out[r] = sums[r][0] + sums[r][1];
}

struct Share {
    long from, to;
};
static Share share(long count) {  // of this thread
    long n = omp_get_num_threads(), t = omp_get_thread_num();
    return {count * t / n, count * (t + 1) / n};
}

template <int R, class T, class W> static inline void panel_of(long rows, const T* x, const W* w, long H, Vec* out) {
    if (rows == R) panel<R>(x, w, H, out);
    else if constexpr (R < ROWS) panel_of<R + 1>(rows, x, w, H, out);
}

// x [rows, H] times the panels ``own`` of a matrix. ``put(row, column, numbers)`` takes sixteen outputs of a row, from ``column`` on.
template <class T, class W, class Put> static inline void product(const T* x, const W* w, long rows, long H, Share own, Put put) {
    constexpr long BLOCK = 60;  // rows that read a panel while it is in the near cache
    for (long first = 0; first < rows; first += BLOCK)
        for (long p = own.from; p < own.to; p++) {
            const long some = std::min(BLOCK, rows - first), parts = (some + ROWS - 1) / ROWS;
            for (long i = 0; i < parts; i++) {  // as many rows in each part as the others, or one more
                const long from = first + some * i / parts, n = first + some * (i + 1) / parts - from;
                Vec out[ROWS];
                panel_of<1>(n, x + from * H, w + p * LANES * H, H, out);
                for (long r = 0; r < n; r++) put(from + r, p * LANES, out[r]);
            }
        }
}

// y [rows, V] = x [rows, H] times the matrix, plus the bias where there is one.
template <class T, class W> static void linear(const T* x, const W* w, const T* bias, T* y, long rows, long V, long H, int threads) {
#pragma omp parallel num_threads(threads)
    product(x, w, rows, H, share(V / LANES), [&](long r, long v, Vec s) {
        store(y + r * V + v, bias ? s + load(bias + v) : s);
    });
}
