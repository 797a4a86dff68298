// What a step does to single rows: the model's three roundings, rotation, norms.
//
// A row has the same bits wherever it is computed: every function here reads its own row alone, in one order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace rackserve::v41 {

constexpr int WIDE = 32;    // channels per scale of the power-of-two roundings
constexpr int NARROW = 16;  // channels per scale of a main row

// The numbers that e2m1 codes stand for; with AVX-512 only the lowest four bits of a lane are read.
inline F32 e2m1(U32 codes) {
#if defined(__AVX512F__)
    constexpr float ALL[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return (F32)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(ALL));
#else
    const U32 size = codes & 7, normal = (U32)(size >= 2), large = (size + 252) << 22, half = (U32)(size == 1) & 0x3f000000u;
    return (F32)((normal & large) | (~normal & half) | ((codes & 8) << 28));
#endif
}

// Window rows: n e4m3 codes, then an exponent byte per 32. n is a multiple of 32.
void pack_fp8(const float* x, int n, uint8_t* row);
void unpack_fp8(const uint8_t* row, int n, float* x);

// Index keys: n / 2 bytes of e2m1 pairs, low nibble first, then an exponent byte per 32.
void pack_fp4(const float* x, int n, uint8_t* row);
void unpack_fp4(const uint8_t* row, int n, float* x);

// Main rows: n / 2 bytes of e2m1 pairs, then an e4m3 scale per 16.
void pack_fp4_fine(const float* x, int n, uint8_t* row);
void unpack_fp4_fine(const uint8_t* row, int n, float* x);

// Inputs of products with quantised weights, and index queries. `room`: as many bytes as a packed row has.
void round_fp8(const float* x, int n, float* out, uint8_t* room);
void round_fp4(const float* x, int n, float* out, uint8_t* room);

// cos and sin of position * freqs[i] for `pairs` pairs of channels: [cos, sin] each.
void turns(const float* freqs, int pairs, int64_t position, float* out);

// Turns the last 2 * pairs of n channels in place, in adjacent pairs; `back`: the other way.
void rotate(float* x, int n, const float* turn, int pairs, bool back);

// Sum of x[i] * y[i] over a multiple of 16 channels: four sums of eight lanes taken in turn, then the lanes in order.
float dot(const float* x, const float* y, int n);

// weight * (x / root mean square of x).
void rms_norm(const float* x, const float* weight, int n, float eps, float* out);

// 1 / (1 + e^-x) and log(1 + e^x), rounded as from double precision.
float sigmoid(float x);
float softplus(float x);

// x * sigmoid(x).
F32 silu(F32 x);

// e^x for 16 numbers below 88, rounded as from double precision (the reference's is as good); 0 far below 0.
F32 power(F32 x);

}  // namespace rackserve::v41
