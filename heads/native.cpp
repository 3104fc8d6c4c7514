// A linear layer and a frozen decoder layer for a CPU, fastest where few rows are read. heads/native.py compiles it and calls it.
//
// A step of decoding reads every weight once and computes little, so weights are read at the speed of memory: sixteen outputs side by
// side (a panel), one thread for all rows of a panel. A whole layer is one parallel region, with four barriers inside.
//
// Every number is summed in an order of its own, which does not depend on how many rows are read together, on threads, or on rows that
// a mask hides. So a node of a tree gets exactly the numbers that the same token gets in a step of plain decoding.
//
// In bfloat16, results are rounded where the modules of the layer would round them: after each product, norm, rotation and sum.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

constexpr long LANES = 16;  // numbers in a vector; a processor with narrower ones takes several of them
typedef float Vec __attribute__((vector_size(64)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
#ifdef __AVX512F__
constexpr int ROWS = 8;  // of one product at a time: so many sums fit in the registers
#else
constexpr int ROWS = 2;
#endif

// Numbers -------------------------------------------------------------------------------------------------------------

struct bf16 {
    uint16_t bits;
};

static inline Vec load(const float* p) {
    Vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline Vec load(const bf16* p) {
    Halves x;
    memcpy(&x, p, sizeof x);
    return (Vec)(__builtin_convertvector(x, Bits) << 16);
}
static inline void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }
static inline void store(bf16* p, Vec x) {  // to nearest, ties to even
    Bits bits = (Bits)x, up = bits + 0x7fff + ((bits >> 16) & 1);
    Halves half = __builtin_convertvector((x == x ? up : bits | 0x400000) >> 16, Halves);
    memcpy(p, &half, sizeof half);
}

// The first n numbers of a vector; n may be larger than the vector.
template <class T> static inline Vec load(const T* p, long n) {
    if (n >= LANES) return load(p);
    T some[LANES] = {};
    memcpy(some, p, n * sizeof(T));
    return load(some);
}
template <class T> static inline void store(T* p, Vec x, long n) {
    if (n >= LANES) return store(p, x);
    T some[LANES];
    store(some, x);
    memcpy(p, some, n * sizeof(T));
}

template <class T> static inline Vec rounded(Vec x) {
    T some[LANES];
    store(some, x);
    return load(some);
}
template <> inline Vec rounded<float>(Vec x) { return x; }

static inline Vec4 quarter(Vec x) {
    Vec8 a[2];
    memcpy(a, &x, sizeof x);
    Vec8 b = a[0] + a[1];
    Vec4 c[2];
    memcpy(c, &b, sizeof b);
    return c[0] + c[1];
}
static inline float total(Vec x) {
    Vec4 q = quarter(x);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// e^x with a relative error near 1e-7 (a polynomial after Cephes' expf); 0 below -87.
static inline Vec exponential(Vec x) {
    const Vec zero = {}, low = zero - 87.0f, high = zero + 88.0f;
    Vec y = x < low ? low : x;
    y = y > high ? high : y;
    Vec n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounded to a whole number
    Vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < low ? zero : p * (Vec)power;
}

// Products ------------------------------------------------------------------------------------------------------------

// R rows of x times a panel. In fp32 a panel has its inputs one after the other, in bfloat16 in pairs that lie side by side in 32 bits.
static inline void two(const float* w, Vec& even, Vec& odd) { even = load(w), odd = load(w + LANES); }
static inline void two(const bf16* w, Vec& even, Vec& odd) {
    Bits pairs;
    memcpy(&pairs, w, sizeof pairs);
    even = (Vec)(pairs << 16), odd = (Vec)(pairs & 0xffff0000u);
}
template <int R, class W> static inline void panel(const float* x, const W* w, long H, Vec* out) {
    Vec sums[R][2] = {};
    for (long h = 0; h < H; h += 2, w += 2 * LANES) {
        Vec even, odd;
        two(w, even, odd);
        for (int r = 0; r < R; r++) {
            sums[r][0] += x[r * H + h] * even;
            sums[r][1] += x[r * H + h + 1] * odd;
        }
    }
    for (int r = 0; r < R; r++) out[r] = sums[r][0] + sums[r][1];
}
template <int R> static inline void panel(const bf16* x, const bf16* w, long H, Vec* out) {
    Vec sums[R][2] = {};
    for (long h = 0; h < H; h += 4)
        for (int half = 0; half < 2; half++, w += 2 * LANES) {
            Bits pairs;
            memcpy(&pairs, w, sizeof pairs);
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

// x [rows, H] times the panels ``own`` of a matrix. ``put(row, column, numbers)`` takes sixteen outputs of a row, from ``column`` on.
template <class T, class W, class Put> static inline void product(const T* x, const W* w, long rows, long H, Share own, Put put) {
    constexpr long BLOCK = 64;  // rows that read a panel while it is in the near cache
    Vec out[BLOCK];
    for (long first = 0; first < rows; first += BLOCK)
        for (long p = own.from; p < own.to; p++) {
            const long some = std::min(BLOCK, rows - first);
            const T* from = x + first * H;
            const W* weights = w + p * LANES * H;
            long r = 0;
            for (; r + ROWS <= some; r += ROWS) panel<ROWS>(from + r * H, weights, H, out + r);
            for (; ROWS > 4 && r + 4 <= some; r += 4) panel<4>(from + r * H, weights, H, out + r);
            for (; ROWS > 2 && r + 2 <= some; r += 2) panel<2>(from + r * H, weights, H, out + r);
            for (; r < some; r++) panel<1>(from + r * H, weights, H, out + r);
            for (r = 0; r < some; r++) put(first + r, p * LANES, out[r]);
        }
}

// y [rows, V] = x [rows, H] times the matrix, plus the bias where there is one.
template <class T, class W> static void linear(const T* x, const W* w, const T* bias, T* y, long rows, long V, long H, int threads) {
#pragma omp parallel num_threads(threads)
    product(x, w, rows, H, share(V / LANES), [&](long r, long v, Vec s) {
        store(y + r * V + v, bias ? s + load(bias + v) : s);
    });
}

// The layer -----------------------------------------------------------------------------------------------------------

struct Layer {  // as ``_Layer`` of heads/native.py
    const void *norms[2], *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *norm, *feed, *feed_bias, *down, *down_bias;
    double eps[2], head_eps, eps_after;
    long inputs, hidden, heads, kv_heads, head_dim, mlp;
};

struct Call {  // as ``_Call`` of heads/native.py
    const void *inputs[2], *residual, *cos, *sin, *bias;
    void *const *keys, *const *values, *to;  // keys and values of each layer, [batch or more, kv_heads, slots, d]
    const int64_t* starts;  // the slot of each sequence's first row; null: ``start`` for all
    long layers, batch, rows, start, first, seen, slots, bias_row, bias_batch, cos_wide, memory_wide, threads;
};

// RMSNorm; a copy where there is no weight.
template <class T> static void normed(const T* x, const T* weight, double eps, long size, T* to) {
    Vec squares = {};
    for (long i = 0; weight && i < size; i += LANES) squares += load(x + i, size - i) * load(x + i, size - i);
    const float factor = 1.0f / std::sqrt(total(squares) / size + float(eps));
    for (long i = 0; i < size; i += LANES) {
        Vec y = load(x + i, size - i);
        store(to + i, weight ? y * factor * load(weight + i, size - i) : y, size - i);
    }
}

// Llama's RoPE; the first half of the sines is negated.
template <class T, class C> static void rotated(const T* x, const C* cos, const C* sin, long d, T* to) {
    for (long half : {0L, d / 2})
        for (long i = 0; i < d / 2; i += LANES) {
            const long n = d / 2 - i, at = half + i;
            Vec turn = load(x + (d / 2 - half) + i, n) * load(sin + at, n);
            store(to + at, rounded<C>(load(x + at, n) * load(cos + at, n)) + turn, n);
        }
}

// Four sums at a time: [a0 .. a15], [b0 .. b15], .. -> [a, b, c, d].
static inline Vec4 totals(Vec a, Vec b, Vec c, Vec d) {
    const Vec4 q[4] = {quarter(a), quarter(b), quarter(c), quarter(d)};
    return Vec4{q[0][0], q[1][0], q[2][0], q[3][0]} + Vec4{q[0][2], q[1][2], q[2][2], q[3][2]} +
           (Vec4{q[0][1], q[1][1], q[2][1], q[3][1]} + Vec4{q[0][3], q[1][3], q[2][3], q[3][3]});
}

// Columns i.. of the mean of the values, in C vectors at once, weighted by the scores.
template <int C, class T, class K>
static inline void mix(const K* v, const float* scores, long M, long d, long i, float sum, T* to) {
    Vec found[C] = {};
    for (long m = 0; m < M; m++)
        for (int c = 0; c < C; c++) found[c] += scores[m] * load(v + m * d + i + c * LANES, d - i - c * LANES);
    for (int c = 0; c < C; c++) store(to + i + c * LANES, rounded<K>(found[c] / sum), d - i - c * LANES);
}

// Attention of one query over M rows of memory. ``bias``: of each row, or null. ``scores``: room for M and fifteen numbers more.
template <class T, class K> static void attend(const T* q, const K* k, const K* v, const K* bias, long M, long d, float* scores, T* to) {
    const float scale = 1.0f / std::sqrt(float(d));
    float most = -INFINITY, sum = 0;
    for (long m = 0; m < M; m += 4) {
        Vec dots[4] = {};
        const long last = M - 1;
        for (long i = 0; i < d; i += LANES) {
            const Vec part = rounded<K>(load(q + i, d - i));
            for (long j = 0; j < 4; j++) dots[j] += part * load(k + std::min(m + j, last) * d + i, d - i);
        }
        const Vec4 four = totals(dots[0], dots[1], dots[2], dots[3]) * scale;
        memcpy(scores + m, &four, sizeof four);
    }
    for (long m = 0; m < M; m += LANES) {
        Vec s = load(scores + m, M - m);
        store(scores + m, bias ? s + load(bias + m, M - m) : s, M - m);
    }
    for (long m = 0; m < M; m++) most = std::max(most, scores[m]);
    for (long m = 0; m < M; m += LANES) store(scores + m, exponential(load(scores + m, M - m) - most), M - m);
    for (long m = 0; m < M; m++) sum += scores[m];  // one after the other: hidden rows add nothing, wherever they stand
    long i = 0;
    for (; i + 4 * LANES <= d; i += 4 * LANES) mix<4>(v, scores, M, d, i, sum, to);
    for (; i + 2 * LANES <= d; i += 2 * LANES) mix<2>(v, scores, M, d, i, sum, to);
    for (; i < d; i += LANES) mix<1>(v, scores, M, d, i, sum, to);
}

// One layer. It reads ``inputs`` and writes keys and values of its rows, and its output ``to``.
template <class T, class W, class K>
static void layer(const Layer& l, const Call& c, const T* const* inputs, const T* residual, K* keys, K* values, T* to) {
    const long rows = c.batch * c.rows, d = l.head_dim, D = l.hidden, heads = l.heads, kv = l.kv_heads, I = l.mlp;
    const long A = heads * d, all = A + 2 * kv * d, H = l.inputs * D;
    const bool many = rows > 16;  // then threads share the norms; of few rows each computes all, which is cheaper than to wait for others
    static thread_local std::vector<T> shared;  // grows, never shrinks
    shared.resize(std::max<size_t>(shared.size(), rows * (all + A + D + I + std::max(H, D))));
    T *qkv = shared.data(), *found = qkv + rows * all, *x = found + rows * A, *act = x + rows * D, *common = act + rows * I;
    const T *qkv_bias = (const T*)l.qkv_bias, *out_bias = (const T*)l.out_bias;
    const T *feed_bias = (const T*)l.feed_bias, *down_bias = (const T*)l.down_bias;
    auto plus = [](Vec s, const T* bias, long v) { return rounded<T>(bias ? s + load(bias + v) : s); };
#pragma omp parallel num_threads(c.threads)
    {
        static thread_local std::vector<T> mine;
        static thread_local std::vector<float> scores;
        mine.resize(std::max<size_t>(mine.size(), 2 * d + (many ? 0 : rows * std::max(H, D))));
        scores.resize(std::max<size_t>(scores.size(), c.seen + LANES));
        T *a = mine.data(), *z = a + d, *y = many ? common : z + d;
        const Share own = many ? share(rows) : Share{0, rows};

        for (long r = own.from; r < own.to; r++)
            for (long i = 0; i < l.inputs; i++)
                normed(inputs[i] + r * D, (const T*)l.norms[i], l.eps[i], D, y + r * H + i * D);
        if (many) {
#pragma omp barrier
        }
        product(y, (const W*)l.qkv, rows, H, share(all / LANES),
                [&](long r, long v, Vec s) { store(qkv + r * all + v, plus(s, qkv_bias, v)); });
#pragma omp barrier
        for (auto [i, end] = share(rows * (heads + kv)); i < end; i++) {  // queries stay in place, keys and values go to memory
            const long h = i / rows, r = i % rows;
            T* head = qkv + r * all + h * d;
            normed(head, (const T*)(h < heads ? l.q_norm : l.k_norm), l.head_eps, d, a);
            if (c.cos_wide) rotated(a, (const float*)c.cos + r * d, (const float*)c.sin + r * d, d, z);
            else rotated(a, (const T*)c.cos + r * d, (const T*)c.sin + r * d, d, z);
            if (h < heads) {
                memcpy(head, z, d * sizeof(T));
                continue;
            }
            const long b = r / c.rows, slot = (c.starts ? c.starts[b] : c.start) + r % c.rows;
            const long at = ((b * kv + h - heads) * c.slots + slot) * d;
            if (slot >= c.slots) continue;  // of a place that no sequence uses
            for (long j = 0; j < d; j += LANES) {
                store(keys + at + j, load(z + j, d - j), d - j);
                store(values + at + j, load(head + kv * d + j, d - j), d - j);
            }
        }
#pragma omp barrier
        for (auto [i, end] = share(rows * heads); i < end; i++) {
            const long h = i / rows, r = i % rows, b = r / c.rows, at = ((b * kv + h / (heads / kv)) * c.slots + c.first) * d;
            const K* bias = c.bias ? (const K*)c.bias + b * c.bias_batch + r % c.rows * c.bias_row : nullptr;
            attend(qkv + r * all + h * d, keys + at, values + at, bias, c.seen, d, scores.data(), found + r * A + h * d);
        }
#pragma omp barrier
        product(found, (const W*)l.out, rows, A, share(D / LANES), [&](long r, long v, Vec s) {
            store(x + r * D + v, load(residual + r * D + v) + plus(s, out_bias, v));
        });
#pragma omp barrier
        for (long r = own.from; r < own.to; r++) normed(x + r * D, (const T*)l.norm, l.eps_after, D, y + r * D);
        if (many) {
#pragma omp barrier
        }
        const Share feed = share(I / LANES);
        product(y, (const W*)l.feed, rows, D, feed, [&](long r, long v, Vec s) {
            Vec gate = plus(s, feed_bias, v);
            store(act + r * I + v, gate / (1.0f + exponential(-gate)));
        });
        product(y, (const W*)l.feed + I * D, rows, D, feed, [&](long r, long v, Vec s) {
            store(act + r * I + v, load(act + r * I + v) * plus(s, feed_bias, I + v));
        });
#pragma omp barrier
        product(act, (const W*)l.down, rows, I, share(D / LANES), [&](long r, long v, Vec s) {
            store(to + r * D + v, load(x + r * D + v) + plus(s, down_bias, v));
        });
    }
}

// Layers in a row, each of which reads the output of the one before. ``to``: [layers, batch, rows, D].
template <class T, class W, class K> static void stack(const Layer* const* layers, const Call& c) {
    const T *inputs[2] = {(const T*)c.inputs[0], (const T*)c.inputs[1]}, *residual = (const T*)c.residual;
    T* to = (T*)c.to;
    for (long i = 0; i < c.layers; i++) {
        layer<T, W, K>(*layers[i], c, inputs, residual, (K*)c.keys[i], (K*)c.values[i], to);
        residual = inputs[0] = to;
        to += c.batch * c.rows * layers[i]->hidden;
    }
}

// Names say the dtypes of numbers and weights. ``half``: fp32 weights that bfloat16 holds exactly.
#define OFFER(name, T, W)                                                                                                            \
    void linear_##name(const T* x, const W* w, const T* b, T* y, long rows, long V, long H, int threads) {                           \
        linear(x, w, b, y, rows, V, H, threads);                                                                                     \
    }                                                                                                                                \
    void stack_##name(const Layer* const* layers, const Call* c) {                                                                   \
        c->memory_wide ? stack<T, W, float>(layers, *c) : stack<T, W, T>(layers, *c);                                                \
    }
#define OFFER_NORM(name, T)                                                                                                          \
    void norm_##name(const T* x, const T* w, T* y, long rows, long size, double eps) {                                               \
        for (long r = 0; r < rows; r++) normed(x + r * size, w, eps, size, y + r * size);                                            \
    }

extern "C" {
OFFER(fp32, float, float)
OFFER(half, float, bf16)
OFFER(bf16, bf16, bf16)
OFFER_NORM(fp32, float)
OFFER_NORM(bf16, bf16)
}
