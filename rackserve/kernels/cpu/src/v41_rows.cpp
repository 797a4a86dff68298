#include "v41_rows.h"

#include <algorithm>
#include <initializer_list>

namespace rackserve::v41 {

namespace {

typedef uint8_t U8 __attribute__((vector_size(16)));

constexpr float E4M3_MAX = 448.0f, E2M1_MAX = 6.0f;

inline F32 magnitude(F32 x) { return (F32)((U32)x & 0x7fffffffu); }
inline F32 choose(I32 mask, F32 yes, F32 no) { return (F32)(((U32)mask & (U32)yes) | (~(U32)mask & (U32)no)); }

// NaN if one of them is.
float largest(const float* x, int n) {
    F32 most = {};
    for (int at = 0; at < n; at += LANES) {
        const F32 v = magnitude(load<F32>(x + at));
        most = choose(most > v || most != most, most, v);
    }
    float result = most[0];
    for (int lane = 1; lane < LANES; lane++) result = result > most[lane] || result != result ? result : most[lane];
    return result;
}

float clamp_below(float x, float least) { return x < least ? least : x; }

// The exponent byte of the smallest power of two that is at least `scale`, a positive normal number.
uint8_t power_above(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    return uint8_t((bits >> 23) + ((bits & 0x7fffff) != 0));
}

float power_of_two(uint8_t exponent) {
    const uint32_t bits = uint32_t(exponent) << 23;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Nearest e4m3 codes, ties to even, of numbers of at most 448; NaN stays NaN.
U32 e4m3_codes(F32 x) {
    const U32 bits = (U32)x, whole = bits & 0x7fffffffu;
    const U32 normal = ((whole + 0x7ffff + ((whole >> 20) & 1)) >> 20) - (120 << 3);
    const F32 magic = splat(MAGIC);
    const U32 tiny = (U32)((F32)whole * splat(512.0f) + magic) - (uint32_t)MAGIC_BITS;
    const U32 small = (U32)((F32)whole < splat(0.015625f)), nan = (U32)(x != x);
    const U32 code = (small & tiny) | (~small & normal);
    return (nan & 0x7f) | (~nan & code) | ((bits >> 24) & 0x80);
}

F32 e4m3(U32 codes) {
    const U32 sized = codes & 0x7f, nan = (U32)(sized == 0x7f);
    const F32 value = (F32)(((codes & 0x80) << 24) | (sized << 20)) * splat(0x1p120f);
    return (F32)((U32)value | (nan & 0x7fc00000u));
}

// Nearest e2m1 codes, ties to even.
U32 e2m1_codes(F32 x) {
    const F32 size = magnitude(x);
    const I32 count = (size > splat(0.25f)) + (size >= splat(0.75f)) + (size > splat(1.25f)) + (size >= splat(1.75f)) +
                      (size > splat(2.5f)) + (size >= splat(3.5f)) + (size > splat(5.0f));
    return (U32)(-count) | (((U32)x >> 28) & 8);
}

typedef double F64 __attribute__((vector_size(64)));
typedef int64_t I64 __attribute__((vector_size(64)));
typedef float HALF __attribute__((vector_size(32)));

// e^x for -104 <= x <= 88: 2^whole times a polynomial of what is left, which is off by less than 1e-10 of the result.
HALF power_of(HALF given) {
    const F64 x = __builtin_convertvector(given, F64), magic = F64{} + 6755399441055744.0;  // 1.5 * 2^52
    const F64 shifted = x * 1.4426950408889634 + magic, whole = shifted - magic;
    const F64 r = x - whole * 0.6931471805599453;
    F64 p = F64{} + 1.0 / 40320;
    for (const double factor : {1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0}) p = p * r + factor;
    const F64 scale = (F64)(((I64)shifted + 1023) << 52);
    return __builtin_convertvector(p * scale, HALF);
}

void store_nibbles(U32 codes, uint8_t* to) {
    const U32 pairs = codes | __builtin_shufflevector(codes, codes, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) << 4;
    for (int pair = 0; pair < LANES / 2; pair++) to[pair] = uint8_t(pairs[2 * pair]);
}

U32 load_nibbles(const uint8_t* from) {
    uint32_t words[2];
    std::memcpy(words, from, sizeof words);
    const uint32_t a = words[0], b = words[1];
    const U32 all = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b}, place = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    return all >> place & 15;
}

}  // namespace

void pack_fp8(const float* x, int n, uint8_t* row) {
    for (int at = 0; at < n; at += WIDE) {
        const float scale = clamp_below(largest(x + at, WIDE), 1e-4f) * float(1.0 / 448.0);
        const uint8_t exponent = power_above(scale);
        const F32 whole = splat(power_of_two(exponent)), top = splat(E4M3_MAX);
        for (int half = 0; half < WIDE; half += LANES) {
            F32 v = load<F32>(x + at + half) / whole;
            v = choose(v > top, top, v);
            v = choose(v < -top, -top, v);
            store(row + at + half, __builtin_convertvector(e4m3_codes(v), U8));
        }
        row[n + at / WIDE] = exponent;
    }
}

void unpack_fp8(const uint8_t* row, int n, float* x) {
    for (int at = 0; at < n; at += WIDE) {
        const F32 scale = splat(power_of_two(row[n + at / WIDE]));
        for (int half = 0; half < WIDE; half += LANES)
            store(x + at + half, e4m3(__builtin_convertvector(load<U8>(row + at + half), U32)) * scale);
    }
}

void pack_fp4(const float* x, int n, uint8_t* row) {
    for (int at = 0; at < n; at += WIDE) {
        const float scale = clamp_below(largest(x + at, WIDE), E2M1_MAX * 0x1p-126f) * float(1.0 / 6.0);
        const uint8_t exponent = power_above(scale);
        const F32 whole = splat(power_of_two(exponent));
        for (int half = 0; half < WIDE; half += LANES) store_nibbles(e2m1_codes(load<F32>(x + at + half) / whole), row + (at + half) / 2);
        row[n / 2 + at / WIDE] = exponent;
    }
}

void unpack_fp4(const uint8_t* row, int n, float* x) {
    for (int at = 0; at < n; at += LANES)
        store(x + at, e2m1(load_nibbles(row + at / 2)) * splat(power_of_two(row[n / 2 + at / WIDE])));
}

void pack_fp4_fine(const float* x, int n, uint8_t* row) {
    for (int at = 0; at < n; at += NARROW) {
        const float scale = std::min(clamp_below(largest(x + at, NARROW), E2M1_MAX * 0x1p-9f) / E2M1_MAX, E4M3_MAX);
        const U32 code = e4m3_codes(splat(scale));
        store_nibbles(e2m1_codes(load<F32>(x + at) / e4m3(code)), row + at / 2);
        row[n / 2 + at / NARROW] = uint8_t(code[0]);
    }
}

void unpack_fp4_fine(const uint8_t* row, int n, float* x) {
    for (int at = 0; at < n; at += NARROW)
        store(x + at, e2m1(load_nibbles(row + at / 2)) * e4m3(U32{} + row[n / 2 + at / NARROW]));
}

void round_fp8(const float* x, int n, float* out, uint8_t* room) {
    pack_fp8(x, n, room);
    unpack_fp8(room, n, out);
}

void round_fp4(const float* x, int n, float* out, uint8_t* room) {
    pack_fp4(x, n, room);
    unpack_fp4(room, n, out);
}

F32 power(F32 x) {
    const F32 least = splat(-104.0f);
    const I32 dead = x < least;
    x = choose(dead, least, x);
    const HALF low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const HALF a = power_of(low), b = power_of(high);
    const F32 all = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return choose(dead, F32{}, all);
}

void turns(const float* freqs, int pairs, int64_t position, float* out) {
    for (int pair = 0; pair < pairs; pair++) {
        const float angle = float(position) * freqs[pair];
        out[2 * pair] = float(std::cos(double(angle)));
        out[2 * pair + 1] = float(std::sin(double(angle)));
    }
}

void rotate(float* x, int n, const float* turn, int pairs, bool back) {
    float* at = x + n - 2 * pairs;
    for (int pair = 0; pair < pairs; pair++, at += 2) {
        const float cosine = turn[2 * pair], sine = back ? -turn[2 * pair + 1] : turn[2 * pair + 1], even = at[0], odd = at[1];
        at[0] = even * cosine - odd * sine;
        at[1] = even * sine + odd * cosine;
    }
}

float dot(const float* x, const float* y, int n) {
    // The order is that in which torch sums, and with it the reference path: fewer roundings fall on the other side.
    constexpr int STRIDE = 2 * LANES, LEVEL = 16, HALF_LANES = LANES / 2;
    F32 sums[2] = {}, before[2] = {};
    int at = 0;
    for (int step = 1; at + STRIDE <= n; step++, at += STRIDE) {
        for (int i = 0; i < 2; i++) sums[i] += load<F32>(x + at + i * LANES) * load<F32>(y + at + i * LANES);
        if (step % LEVEL == 0)
            for (int i = 0; i < 2; i++) before[i] += sums[i], sums[i] = F32{};
    }
    HALF parts[4];
    for (int i = 0; i < 2; i++) {
        const F32 sum = sums[i] + before[i];
        std::memcpy(parts + 2 * i, &sum, sizeof sum);
    }
    for (; at < n; at += HALF_LANES) parts[0] += load<HALF>(x + at) * load<HALF>(y + at);
    const HALF all = ((parts[0] + parts[1]) + parts[2]) + parts[3];
    float total = 0.0f;
    for (int lane = 0; lane < HALF_LANES; lane++) total += all[lane];
    return total;
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const F32 scale = splat(1.0f / std::sqrt(dot(x, x, n) / float(n) + eps));
    for (int at = 0; at < n; at += LANES) store(out + at, load<F32>(weight + at) * (load<F32>(x + at) * scale));
}

float sigmoid(float x) { return 1.0f / (1.0f + float(std::exp(-double(x)))); }

float softplus(float x) { return x > 20.0f ? x : float(std::log1p(std::exp(double(x)))); }

F32 silu(F32 x) {
    const F32 most = splat(87.0f);  // e^x stays finite
    return x / (splat(1.0f) + power(choose(-x > most, most, -x)));
}

}  // namespace rackserve::v41
