// Sixteen lanes, whatever the machine has: GCC and Clang split them into narrower registers where these are not wide enough.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace rackserve {

constexpr int LANES = 16;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef int16_t I16 __attribute__((vector_size(32)));
typedef int8_t I8 __attribute__((vector_size(16)));

template <class V> inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

inline F32 splat(float x) { return F32{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// a * b + c, rounded once where the machine can: the same for every row, whatever is computed beside it.
inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

inline F32 from_bf16(U16 v) { return (F32)(__builtin_convertvector(v, U32) << 16); }

// To nearest, ties to even, as torch rounds; NaN stays NaN.
inline U16 to_bf16(F32 v) {
    const U32 bits = (U32)v;
    const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const I32 nan = v != v;
    const U32 chosen = ((U32)nan & 0x7fc0) | (~(U32)nan & rounded);
    return __builtin_convertvector(chosen, U16);
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    uint32_t exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff, bits;
    if (exponent == 0) {
        const float tiny = std::ldexp(float(mantissa), -24);
        return sign ? -tiny : tiny;
    }
    bits = exponent == 31 ? sign | 0x7f800000 | mantissa << 13 : sign | (exponent + 112) << 23 | mantissa << 13;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline F32 from_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    F32 v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = half_to_float(from[lane]);
    return v;
#endif
}

// The lowest byte of each lane.
inline I8 low_bytes(I32 v) {
#if defined(__AVX512F__)
    return (I8)_mm512_cvtepi32_epi8((__m512i)v);  // GCC takes lanes one by one where this is not stored at once
#else
    return __builtin_convertvector(v, I8);
#endif
}

// The lower half of each lane.
inline I16 low_words(I32 v) {
#if defined(__AVX512F__)
    return (I16)_mm512_cvtepi32_epi16((__m512i)v);
#else
    return __builtin_convertvector(v, I16);
#endif
}

// sum + products of the two 16-bit numbers in each lane.
inline I32 dot(I32 sum, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    typedef int32_t Half __attribute__((vector_size(32)));
    Half x[2], y[2];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    for (int half = 0; half < 2; half++) x[half] = (Half)_mm256_madd_epi16((__m256i)x[half], (__m256i)y[half]);
    std::memcpy(&a, x, 64);
    return sum + a;
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

inline F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which the lowest bits then are
constexpr int32_t MAGIC_BITS = 0x4b400000;
constexpr float LOG2_E = 1.44269504088896341f;

// e^x to about 1 ulp for x <= 0 (and a little above); below -87 it is 0.
inline F32 exp(F32 x) {
    const F32 magic = splat(MAGIC);
    const F32 shifted = fma(x, splat(LOG2_E), magic), whole = shifted - magic;
    F32 r = fma(whole, splat(-0.693359375f), x);
    r = fma(whole, splat(2.12194440e-4f), r);
    F32 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    // The lowest bits of `shifted` are the power of two, which goes onto the exponent.
    const U32 value = (U32)p + ((U32)shifted << 23);
#if defined(__AVX512F__)
    return (F32)_mm512_maskz_mov_epi32(_mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.0f), _CMP_NLT_UQ), (__m512i)value);
#else
    return (F32)(~(U32)(x < splat(-87.0f)) & value);
#endif
}

// 2^x to about 1 ulp for x <= 0; below -126 it is 0.
inline F32 exp2(F32 x) {
    const F32 shifted = x + splat(MAGIC), r = x - (shifted - splat(MAGIC));
    F32 p = splat(1.5353362067e-4f);
    p = fma(p, r, splat(1.3398874589e-3f));
    p = fma(p, r, splat(9.6184373585e-3f));
    p = fma(p, r, splat(5.5503324707e-2f));
    p = fma(p, r, splat(2.4022647914e-1f));
    p = fma(p, r, splat(6.9314720286e-1f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    const __mmask16 reached = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);
    return (F32)_mm512_maskz_add_epi32(reached, (__m512i)p, _mm512_slli_epi32((__m512i)shifted, 23));
#else
    return (F32)(~(U32)(x < splat(-126.0f)) & ((U32)p + ((U32)shifted << 23)));
#endif
}

// silu(gate) * up.
inline F32 gated(F32 gate, F32 up) {
    // e^-|gate| stays in reach of exp on both sides of zero.
    const F32 small = exp((F32)((U32)gate | 0x80000000u)), one = splat(1.0f), top = gate > 0.0f ? one : small;
    return gate * (top / (one + small)) * up;
}

// Sums and maxima over lanes in one fixed order: halves onto each other.
inline float sum(F32 v) {
#if defined(__AVX512F__)
    const __m512 whole = (__m512)v;
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
#else
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) v[lane] += v[lane + width];
    return v[0];
#endif
}

inline float peak(F32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int lane = 1; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
    return most;
#endif
}

inline F32 larger(F32 a, F32 b) {
#if defined(__AVX512F__)
    return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float larger(float a, float b) { return a > b ? a : b; }

inline I32 larger(I32 a, I32 b) { return a > b ? a : b; }

// Joins the lanes of several vectors, each as `sum` and `peak` do: lane i is of v[i]. COUNT is at most 8.
template <int COUNT, class Join> inline F32 join_lanes(const F32* v, Join join) {
#if defined(__AVX512F__)
    const auto pair = [&](F32 a, F32 b) {
        const __m512 x = (__m512)a, y = (__m512)b;
        return join((F32)_mm512_shuffle_f32x4(x, y, 0x44), (F32)_mm512_shuffle_f32x4(x, y, 0xee));
    };
    // A quarter of the lanes for each of four.
    const auto four = [&](int first) {
        const auto at = [&](int number) { return v[first + number < COUNT ? first + number : COUNT - 1]; };
        const __m512 x = (__m512)pair(at(0), at(1)), y = (__m512)pair(at(2), at(3));
        return join((F32)_mm512_shuffle_f32x4(x, y, 0x88), (F32)_mm512_shuffle_f32x4(x, y, 0xdd));
    };
    const __m512 x = (__m512)four(0), y = (__m512)four(COUNT > 4 ? 4 : 0);
    const __m512 halves = (__m512)join((F32)_mm512_shuffle_ps(x, y, 0x44), (F32)_mm512_shuffle_ps(x, y, 0xee));
    const F32 all = join((F32)halves, (F32)_mm512_movehdup_ps(halves));
    return F32(__builtin_shufflevector(all, all, 0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14));
#else
    F32 found = {};
    for (int number = 0; number < COUNT; number++) {
        F32 one = v[number];
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int lane = 0; lane < width; lane++) one[lane] = join(one[lane], one[lane + width]);
        found[number] = one[0];
    }
    return found;
#endif
}

}  // namespace rackserve
