// A linear layer and a frozen decoder layer for a CPU, fastest where few rows are read. heads/native.py compiles it and calls it.
//
// A step of decoding reads every weight once and computes little, so weights are read at the speed of memory: sixteen outputs side by
// side (a panel, native_products.h). All layers are one parallel region, with a barrier wherever a thread needs what others computed.
//
// Every number is summed in an order of its own, which does not depend on how many rows are read together, on threads, or on rows that
// a mask hides. So a node of a tree gets exactly the numbers that the same token gets in a step of plain decoding.
//
// In bfloat16, results are rounded where the modules of the layer would round them: after each product, norm, rotation and sum.

#include <cmath>
#include <vector>

#include "native_attention.h"
#include "native_flash.h"
#include "native_loss.h"
#include "native_products.h"

struct Layer {  // as ``_Layer`` of heads/native.py
    const void *norms[2], *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *norm, *feed, *feed_bias, *down, *down_bias;
    double eps[2], head_eps, eps_after;
    long inputs, hidden, heads, kv_heads, head_dim, mlp;
};

struct Call {  // as ``_Call`` of heads/native.py
    const void *inputs[2], *residual, *cos, *sin, *bias;
    void *const *keys, *const *values;  // of each layer, [batch or more, kv_heads, slots, d]
    void* const* to;                    // outputs of each layer, which may be the input of the layer
    const int64_t* starts;  // the slot of each sequence's first row; null: ``start`` for all
    long layers, batch, rows, start, first, seen, slots, bias_row, bias_batch, cos_wide, threads;
};

// RMSNorm; a copy where there is no weight.
template <class T> static void normed(const T* x, const T* weight, double eps, long size, T* to) {
    Vec squares = {};
    for (long i = 0; weight && i < size; i += LANES) add(squares, load(x + i, size - i), load(x + i, size - i));
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

// Numbers that the threads of a layer pass to each other, and those that a thread keeps to itself.
static long together(const Layer& l, long rows) {
    return rows * ((l.heads + 2 * l.kv_heads + l.heads) * l.head_dim + l.hidden + l.mlp + std::max(l.inputs * l.hidden, l.hidden));
}
// Of many rows, threads share the norms. Of few, each computes all, which is cheaper than to wait for the others.
static bool many(long rows) { return rows > 16; }

// One layer, read by all threads. It reads ``inputs`` and writes keys and values of its rows, and its output ``to``.
template <class T, class W>
static void layer(const Layer& l, const Call& c, const T* const* inputs, const T* residual, T* keys, T* values, T* to, T* shared) {
    const long rows = c.batch * c.rows, d = l.head_dim, D = l.hidden, heads = l.heads, kv = l.kv_heads, I = l.mlp;
    const long A = heads * d, all = A + 2 * kv * d, H = l.inputs * D;
    T *qkv = shared, *found = qkv + rows * all, *x = found + rows * A, *act = x + rows * D, *common = act + rows * I;
    const T *qkv_bias = (const T*)l.qkv_bias, *out_bias = (const T*)l.out_bias;
    const T *feed_bias = (const T*)l.feed_bias, *down_bias = (const T*)l.down_bias;
    auto plus = [](Vec s, const T* bias, long v) { return rounded<T>(bias ? s + load(bias + v) : s); };
    static thread_local std::vector<T> mine;
    static thread_local std::vector<float> scores;
    mine.resize(std::max<size_t>(mine.size(), 2 * d + (many(rows) ? 0 : rows * std::max(H, D))));
    scores.resize(std::max<size_t>(scores.size(), QUERIES * (width(c.seen) + d)));
    T *a = mine.data(), *z = a + d, *y = many(rows) ? common : z + d;
    const Share own = many(rows) ? share(rows) : Share{0, rows};

    for (long r = own.from; r < own.to; r++)
        for (long i = 0; i < l.inputs; i++)
            normed(inputs[i] + r * D, (const T*)l.norms[i], l.eps[i], D, y + r * H + i * D);
    if (many(rows)) {
#pragma omp barrier
    }
    product(y, (const W*)l.qkv, rows, H, share(all / PANEL),
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
    // the queries of a sequence that read the same keys, some at a time; not too many, lest threads wait for the last one
    const long group = heads / kv, all_queries = c.rows * group;
    const long each = std::clamp(c.batch * kv * all_queries / (6 * omp_get_num_threads()), 1L, QUERIES);
    const long blocks = (all_queries + each - 1) / each;
    for (auto [i, end] = share(c.batch * kv * blocks); i < end; i++) {
        const long b = i / (kv * blocks), g = i / blocks % kv, at = ((b * kv + g) * c.slots + c.first) * d, first = i % blocks * each;
        const long n = std::min(each, all_queries - first);
        Query<T> queries[QUERIES];
        for (long j = 0; j < n; j++) {
            const long h = g * group + (first + j) / c.rows, row = (first + j) % c.rows, r = b * c.rows + row;
            const T* bias = c.bias ? (const T*)c.bias + b * c.bias_batch + row * c.bias_row : nullptr;
            queries[j] = {qkv + r * all + h * d, bias, found + r * A + h * d};
        }
        attend(queries, n, keys + at, values + at, c.seen, d, scores.data());
    }
#pragma omp barrier
    product(found, (const W*)l.out, rows, A, share(D / PANEL), [&](long r, long v, Vec s) {
        store(x + r * D + v, load(residual + r * D + v) + plus(s, out_bias, v));
    });
#pragma omp barrier
    for (long r = own.from; r < own.to; r++) normed(x + r * D, (const T*)l.norm, l.eps_after, D, y + r * D);
    if (many(rows)) {
#pragma omp barrier
    }
    const Share feed = share(I / PANEL);
    product(y, (const W*)l.feed, rows, D, feed, [&](long r, long v, Vec s) {
        Vec gate = plus(s, feed_bias, v);
        store(act + r * I + v, gate / (1.0f + exponential(-gate)));
    });
    product(y, (const W*)l.feed + I * D, rows, D, feed, [&](long r, long v, Vec s) {
        store(act + r * I + v, load(act + r * I + v) * plus(s, feed_bias, I + v));
    });
#pragma omp barrier
    product(act, (const W*)l.down, rows, I, share(D / PANEL), [&](long r, long v, Vec s) {
        store(to + r * D + v, load(x + r * D + v) + plus(s, down_bias, v));
    });
#pragma omp barrier
}

// Layers in a row, each of which reads the output of the one before.
template <class T, class W> static void stack(const Layer* const* layers, const Call& c) {
    static thread_local std::vector<T> room;  // grows, never shrinks
    for (long i = 0; i < c.layers; i++) room.resize(std::max<size_t>(room.size(), together(*layers[i], c.batch * c.rows)));
    T* shared = room.data();
#pragma omp parallel num_threads(c.threads)
    {
        const T *inputs[2] = {(const T*)c.inputs[0], (const T*)c.inputs[1]}, *residual = (const T*)c.residual;
        for (long i = 0; i < c.layers; i++) {
            layer<T, W>(*layers[i], c, inputs, residual, (T*)c.keys[i], (T*)c.values[i], (T*)c.to[i], shared);
            residual = inputs[0] = (const T*)c.to[i];
        }
    }
}

// Names say the dtypes of numbers and weights. ``half``: fp32 weights that bfloat16 holds exactly.
#define OFFER(name, T, W)                                                                                                            \
    void linear_##name(const T* x, const W* w, const T* b, T* y, long rows, long V, long H, int threads) {                           \
        linear(x, w, b, y, rows, V, H, threads);                                                                                     \
    }                                                                                                                                \
    void stack_##name(const Layer* const* layers, const Call* c) { stack<T, W>(layers, *c); }
#define OFFER_PLAIN(name, T)                                                                                                         \
    void norm_##name(const T* x, const T* w, T* y, long rows, long size, double eps) {                                               \
        for (long r = 0; r < rows; r++) normed(x + r * size, w, eps, size, y + r * size);                                            \
    }                                                                                                                                \
    void flash_##name(const Flash* c) { by_heads(*c, flash_head<T>); }                                                               \
    void flash_backward_##name(const Flash* c) { by_heads(*c, flash_backward_head<T>); }                                             \
    void look_##name(const T* x, long row, long rows, long V, float* lse, int64_t* best, long threads) {                             \
        look(x, row, rows, V, lse, best, threads);                                                                                   \
    }                                                                                                                                \
    void judge_##name##_fp32(const Judge* j) { judge<T, float>(*j); }                                                                \
    void judge_##name##_bf16(const Judge* j) { judge<T, bf16>(*j); }

extern "C" {
OFFER(fp32, float, float)
OFFER(half, float, bf16)
OFFER(bf16, bf16, bf16)
OFFER_PLAIN(fp32, float)
OFFER_PLAIN(bf16, bf16)
}
