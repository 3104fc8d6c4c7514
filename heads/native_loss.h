// The divergences of one row of draft logits and their gradient (formulas: trainers/kernel.py), for training on a CPU.
#pragma once

#include "native_products.h"

struct Judge {  // as ``_Judge`` of trainers/native_kernel.py
    void* logits;                  // [rows, V]: the gradient overwrites them
    const void* said;              // the target's logits, [C, W]
    const int64_t* ids;            // [V], into W: the drafter's tokens; null: all
    const int64_t *place, *best, *data;  // [rows], into C; [C], into V or -1: the target's most likely token, and the one in the data
    const float *lse, *weight;     // [C], over the target's whole vocabulary; [rows]
    float *loss, *alpha, *truth;   // [rows]
    int8_t* match;
    long rows, V, logits_row, said_row, grad, threads;
    double kl, tv, lk_alpha, lk_hybrid, eta, ce, data_ce;
};

// Numbers of a row, and ``other`` behind its end.
template <class T> static inline Vec within(const T* x, long v, long V, float other) {
    return v + LANES <= V ? load(x + v) : COUNT < int(V - v) + Ints{} ? load(x + v, V - v) : all(other);
}
static inline float one(const float* x) { return *x; }
static inline float one(const bf16* x) { return load(x, 1)[0]; }
// The same of the numbers at ``ids``, where there are any.
template <class T> static inline Vec within(const T* x, const int64_t* ids, long v, long V, float other) {
    if (!ids) return within(x, v, V, other);
    float some[LANES];
    for (long i = 0; i < LANES; i++) some[i] = v + i < V ? one(x + ids[v + i]) : other;
    return load(some);
}
// The largest of a row's numbers, and the first place where it stands.
template <class T> static float largest(const T* x, long V, int64_t* best) {
    Vec high = all(-INFINITY);
    for (long v = 0; v < V; v += LANES) {
        Vec y = within(x, v, V, -INFINITY);
        high = high > y ? high : y;
    }
    const float most = highest(high);
    if (best) *best = 0;  // of numbers that are no numbers none is equal to it
    for (long v = 0; best && v < V; v += LANES) {
        const Ints equal = within(x, v, V, -INFINITY) == all(most);
        for (long i = 0; i < LANES; i++)
            if (equal[i]) return *best = v + i, most;
    }
    return most;
}

// Log-sum-exp and most likely token of each row of the target's logits.
template <class T> static void look(const T* said, long row, long rows, long V, float* lse, int64_t* best, long threads) {
#pragma omp parallel for num_threads(threads)
    for (long c = 0; c < rows; c++) {
        const T* x = said + c * row;
        const float most = largest(x, V, best + c);
        Vec sum = {};
        for (long v = 0; v < V; v += LANES) sum += exponential(within(x, v, V, -INFINITY) - most);
        lse[c] = most + std::log(total(sum));
    }
}

template <class T, class S> static void judge_row(const Judge& j, long r) {
    static thread_local std::vector<float> room;
    const long V = j.V, wide = (V + LANES - 1) / LANES * LANES, c = j.place[r], best = j.best[c], data = j.data[c] < V ? j.data[c] : -1;
    room.resize(std::max<size_t>(room.size(), 2 * wide));
    float *q = room.data(), *p = q + wide;
    T* x = (T*)j.logits + r * j.logits_row;
    const S* said = (const S*)j.said + c * j.said_row;
    int64_t first = -1;
    const float most = largest(x, V, &first), lse_p = j.lse[c];
    Vec sum = {}, kls = {}, alphas = {}, belows = {}, masses = {}, zero = {};
    for (long v = 0; v < V; v += LANES) {
        Vec e = exponential(within(x, v, V, -INFINITY) - most);
        store(q + v, e), sum += e;
    }
    const float all_q = total(sum), lse_q = most + std::log(all_q), share = 1.0f / all_q;
    for (long v = 0; v < V; v += LANES) {
        const Vec log_p = within(said, j.ids, v, V, -INFINITY) - lse_p, log_q = within(x, v, V, 0.0f) - lse_q;
        const Vec a = exponential(log_p), b = load(q + v) * share;
        store(p + v, a), store(q + v, b);
        kls += a > zero ? a * (log_p - log_q) : zero;
        masses += a, alphas += a < b ? a : b;
        belows += b < a ? b : b == a ? b * 0.5f : zero;
    }
    const float below = total(belows), mass = total(masses), none = 0 * mass;  // NaN where the target's numbers are: comparisons drop it
    const float kl = total(kls) + none, alpha = total(alphas) + none, held = std::max(alpha, 1e-12f);
    const float mixed = std::exp(-float(j.eta) * alpha), weight = j.weight[r];
    auto nll = [&](long token) { return token < 0 ? 0.0f : lse_q - one(x + token); };
    auto part = [](double of, double x) { return of ? of * x : 0.0; };  // one that nobody asks for may be infinite
    j.loss[r] = weight * float(part(j.kl, kl) + part(j.tv, 1 - alpha) - part(j.lk_alpha, std::log(held)) + part(j.ce, nll(best)) +
                               part(j.data_ce, nll(data)) + part(j.lk_hybrid, mixed * kl + (1 - mixed) * (1 - alpha)));
    j.alpha[r] = alpha, j.truth[r] = data < 0 ? 0.0f : std::exp(-nll(data)), j.match[r] = first == best;
    if (!j.grad) return;
    const float of_kl = weight * (j.kl + j.lk_hybrid * mixed), of_best = best < 0 ? 0.0f : weight * j.ce;
    const float of_data = data < 0 ? 0.0f : weight * j.data_ce;
    const float of_alpha = weight * (-j.tv - j.lk_hybrid * (1 - mixed) - (alpha >= 1e-12f ? j.lk_alpha / held : 0.0));
    const float of_q = of_kl * mass + of_best + of_data - of_alpha * below;
    for (long v = 0; v < V; v += LANES) {
        const Vec a = load(p + v), b = load(q + v), under = b < a ? all(1.0f) : b == a ? all(0.5f) : zero;
        store(q + v, fused(b, under * of_alpha + of_q, a * -of_kl));
    }
    if (best >= 0) q[best] -= of_best;
    if (data >= 0) q[data] -= of_data;
    for (long v = 0; v < V; v += LANES) store(x + v, load(q + v), V - v);
}
template <class T, class S> static void judge(const Judge& j) {
#pragma omp parallel for num_threads(j.threads)
    for (long r = 0; r < j.rows; r++) judge_row<T, S>(j, r);
}
