// Products of few rows and a matrix in panels. All rows of a panel are computed by one thread, so that its weights are read once, and
// weights are asked for ahead of their use, so that reading goes on while rows are computed.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "native_numbers.h"

constexpr long PANEL = 16;                                     // outputs of a panel
constexpr long PARTS = PANEL / LANES;                          // vectors that they fill
constexpr int SUMS = PARTS == 1 ? 2 : 1;                       // of an output, by turns of inputs: else a row alone waits for each addition
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 5 : 2;    // of one product at a time: so many sums fit in the registers
constexpr long BLOCK = 60;                                     // rows that read a panel while it is in the near cache
constexpr long AHEAD = 2048;  // bytes between the weights that are multiplied and those that are asked for

// Two inputs of a panel. In fp32 they stand one after the other, in bfloat16 in pairs that lie side by side in 32 bits.
struct Two {
    Vec even[PARTS], odd[PARTS];
};
static inline Two two(const float* w) {
    Two found;
    for (int i = 0; i < PARTS; i++) found.even[i] = load(w + i * LANES), found.odd[i] = load(w + PANEL + i * LANES);
    return found;
}
static inline Two two(const bf16* w) {
    Two found;
    for (int i = 0; i < PARTS; i++) {
        Bits pairs;
        memcpy(&pairs, w + 2 * i * LANES, sizeof pairs);
        found.even[i] = (Vec)(pairs << 16), found.odd[i] = (Vec)(pairs & 0xffff0000u);
    }
    return found;
}
template <int R> static inline void ask(const void* w) {
    if (R > 2 || PARTS > 1) __builtin_prefetch((const char*)w + AHEAD);  // measured: with wide vectors one or two rows lose by it
}
// R rows of x times a panel. Not inlined: copies in every product would crowd the processor's cache of instructions, which a small
// model's pass would feel.
template <int R, class W> __attribute__((noinline)) static void panel(const float* x, const W* w, long H, Vec (*out)[PARTS]) {
    Vec sums[R][SUMS][PARTS] = {};
    for (long h = 0; h < H; h += 2, w += 2 * PANEL) {
        const Two weights = two(w);
        ask<R>(w);
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < PARTS; i++) add(sums[r][0][i], all(x[r * H + h]), weights.even[i]);
            for (int i = 0; i < PARTS; i++) add(sums[r][SUMS - 1][i], all(x[r * H + h + 1]), weights.odd[i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < PARTS; i++) out[r][i] = SUMS == 1 ? sums[r][0][i] : sums[r][0][i] + sums[r][SUMS - 1][i];
}
#ifdef __AVX512BF16__
template <int R> __attribute__((noinline)) static void panel(const bf16* x, const bf16* w, long H, Vec (*out)[PARTS]) {
    Vec sums[R][2] = {};
    for (long h = 0; h < H; h += 4)
        for (int half = 0; half < 2; half++, w += 2 * PANEL) {
            Bits pairs;
            memcpy(&pairs, w, sizeof pairs), ask<R>(w);
            for (int r = 0; r < R; r++) {
                uint32_t both;
                memcpy(&both, x + r * H + h + 2 * half, sizeof both);
                sums[r][half] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][half], (__m512bh)(Bits{} + both), (__m512bh)pairs);
            }
        }
    for (int r = 0; r < R; r++) out[r][0] = sums[r][0] + sums[r][1];
}
#endif

struct Share {
    long from, to;
};
static Share share(long count) {  // of this thread
    long n = omp_get_num_threads(), t = omp_get_thread_num();
    return {count * t / n, count * (t + 1) / n};
}

template <int R, class T, class W> static inline void panel_of(long rows, const T* x, const W* w, long H, Vec (*out)[PARTS]) {
    if (rows == R) panel<R>(x, w, H, out);
    else if constexpr (R < ROWS) panel_of<R + 1>(rows, x, w, H, out);
}

// x [rows, H] times the panels ``own`` of a matrix. ``put(row, column, numbers)`` takes a vector of outputs of a row, from ``column`` on.
template <class T, class W, class Put> static inline void product(const T* x, const W* w, long rows, long H, Share own, Put put) {
    for (long first = 0; first < rows; first += BLOCK)
        for (long p = own.from; p < own.to; p++) {
            const long some = std::min(BLOCK, rows - first), parts = (some + ROWS - 1) / ROWS;
            for (long i = 0; i < parts; i++) {  // as many rows in each part as the others, or one more
                const long from = first + some * i / parts, n = first + some * (i + 1) / parts - from;
                Vec out[ROWS][PARTS];
                panel_of<1>(n, x + from * H, w + p * PANEL * H, H, out);
                for (long r = 0; r < n; r++)
                    for (long j = 0; j < PARTS; j++) put(from + r, p * PANEL + j * LANES, out[r][j]);
            }
        }
}

#ifndef __AVX512BF16__  // inputs are widened once instead of by every panel, a block at a time
template <class Put> static inline void product(const bf16* x, const bf16* w, long rows, long H, Share own, Put put) {
    static thread_local std::vector<float> wide;
    for (long first = 0; first < rows; first += BLOCK) {
        const long some = std::min(BLOCK, rows - first), size = some * H;
        const bf16* block = x + first * H;
        wide.resize(std::max<size_t>(wide.size(), size));
        for (long i = 0; i < size; i += LANES) store(&wide[i], load(block + i, size - i), size - i);
        product(wide.data(), w, some, H, own, [&](long r, long v, Vec s) { put(first + r, v, s); });
    }
}
#endif

// y [rows, V] = x [rows, H] times the matrix, plus the bias where there is one.
template <class T, class W> static void linear(const T* x, const W* w, const T* bias, T* y, long rows, long V, long H, int threads) {
#pragma omp parallel num_threads(threads)
    product(x, w, rows, H, share(V / PANEL), [&](long r, long v, Vec s) {
        store(y + r * V + v, bias ? s + load(bias + v) : s);
    });
}
