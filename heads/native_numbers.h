// Vectors of sixteen numbers, in fp32; bfloat16 is widened when loaded and rounded when stored.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr long LANES = 16;  // numbers in a vector; a processor with narrower ones takes several of them
typedef float Vec __attribute__((vector_size(64)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

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
    Vec8 a[2];
    memcpy(a, &x, sizeof x);
    Vec8 b = a[0] + a[1];
    Vec4 c[2];
    memcpy(c, &b, sizeof b);
    Vec4 q = c[0] + c[1];
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
