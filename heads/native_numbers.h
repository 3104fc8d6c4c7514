// Vectors of as many numbers as the processor computes at once, in fp32; bfloat16 is widened when loaded and rounded when stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#ifdef __AVX2__
#include <immintrin.h>
#endif

// Numbers in a vector. Not wider than the processor's own: the compiler would keep the sums of a product in memory.
#if defined(__AVX512F__)
constexpr long LANES = 16;
#elif defined(__AVX2__)
constexpr long LANES = 8;
#else
constexpr long LANES = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

static const Ints COUNT = [] {  // 0, 1, ..
    Ints found{};
    for (long i = 0; i < LANES; i++) found[i] = i;
    return found;
}();

struct bf16 {
    uint16_t bits;
};

static inline Vec all(float x) { return x - Vec{}; }
// a * b + c, rounded once where the processor can. The compiler may not choose (-ffp-contract=off): it would do so here and not there,
// and a number would depend on the code around it.
static inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
static inline void add(Vec& sum, Vec a, Vec b) { sum = fused(a, b, sum); }

static inline Vec load(const float* p) {
    Vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline Vec load(const bf16* p) {
    Halves x;
    memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)  // of the conversion below GCC 12 makes five instructions
    return (Vec)((Bits)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#elif defined(__AVX2__)
    return (Vec)((Bits)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#else
    return (Vec)(__builtin_convertvector(x, Bits) << 16);
#endif
}
static inline void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }
static inline void store(bf16* p, Vec x) {  // to nearest, ties to even
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
    Bits bits = (Bits)x, up = bits + 0x7fff + ((bits >> 16) & 1);
    Halves half = __builtin_convertvector((x == x ? up : bits | 0x400000) >> 16, Halves);
#endif
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

static inline float total(Vec x) {
    Vec4 a[LANES / 4];
    memcpy(a, &x, sizeof x);
    for (long n = LANES / 8; n > 0; n /= 2)
        for (long i = 0; i < n; i++) a[i] += a[i + n];
    return (a[0][0] + a[0][2]) + (a[0][1] + a[0][3]);
}

static inline float highest(Vec x) {
    float most = x[0];
    for (long i = 1; i < LANES; i++) most = most < x[i] ? x[i] : most;
    return most;
}

// e^x with a relative error near 1e-7 (a polynomial after Cephes' expf); 0 below -87.
static inline Vec exponential(Vec x) {
    const Vec zero = {}, low = zero - 87.0f, high = zero + 88.0f;
    Vec y = x < low ? low : x;
    y = y > high ? high : y;
    const Vec magic = zero + 12582912.0f, n = fused(y, zero + 1.44269504088896341f, magic) - magic;  // rounded to a whole number
    const Vec r = fused(n, zero + 2.12194440e-4f, fused(n, zero - 0.693359375f, y));
    Vec p = zero + 1.9875691500e-4f;
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fused(p, r, zero + next);
    p = fused(p * r, r, r + 1.0f);
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < low ? zero : p * (Vec)power;
}
