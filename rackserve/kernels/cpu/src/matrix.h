// Weight matrices as they lie in memory, packed once, and products with them.
//
// Output rows come in tiles of 16, one per lane; the inner dimension in groups of 32. A tile is its groups one after the other:
//   Q4   256 bytes of nibbles, 16 half scales, 16 half offsets     weight = nibble * scale + offset
//   Q8   512 signed bytes, 16 half scales, 16 int16 sums of bytes   weight = byte * scale
//   BF16 32 x 16 bf16                                               weight as it is
// Nibbles and bytes of a group: [8 quads of the inner dimension][16 lanes][4], where a Q4 byte holds quad q (low) and q + 4 (high).
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace rackserve {

constexpr int GROUP = 32;

enum Kind : int32_t { Q4 = 0, Q8 = 1, BF16 = 2 };

struct Matrix {
    const uint8_t* data;
    int32_t kind;
    int32_t outputs;  // a multiple of 16
    int32_t inputs;   // a multiple of 32
};

inline size_t group_bytes(int kind) { return kind == Q4 ? 320 : kind == Q8 ? 576 : 1024; }

// Rows that go into a product. Quantised ones are 16-bit whole numbers, 256 * high + low; for each group the largest magnitude
// becomes PEAK. Eight bits would do for speed, but change what a small model knows.
struct Inputs {
    int8_t* highs;      // [rows][inputs]
    int8_t* lows;       // [rows][inputs]
    float* scales;      // [rows][inputs / 32]
    float* sums;        // [rows][inputs / 32]: scale times the sum of the numbers
    const float* rows;  // [rows][inputs], for BF16
};

constexpr float PEAK = 32512.0f;  // 127 * 256
constexpr float TINY = 1e-30f;    // a group that is smaller counts as zero: its inverse would overflow

// 32 numbers -> whole ones in two halves, their scale, and scale times their sum.
inline void round_group(const float* values, I32* whole, float* scale, float* total) {
    const U32 mask = U32{} + 0x7fffffff;
    const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const F32 first = load<F32>(values), second = load<F32>(values + LANES);
    const F32 a = (F32)((U32)first & mask), b = (F32)((U32)second & mask);
    const float most = peak(a > b ? a : b);
    const bool counts = most > TINY;
    const F32 inverse = splat(counts ? PEAK / most : 0.0f);
    whole[0] = (I32)(first * inverse + magic) - 0x4b400000;
    whole[1] = (I32)(second * inverse + magic) - 0x4b400000;
    *scale = counts ? most / PEAK : 0.0f;
    *total = *scale * sum(to_float(whole[0] + whole[1]));  // exact: whole numbers below 2^24
}

void quantise(const float* row, int inputs, int8_t* highs, int8_t* lows, float* scales, float* sums);

// out[row][first .. end) for outputs first to end (multiples of 16); `add`: onto what is there. `stride`: floats between rows.
void product(const Matrix& matrix, const Inputs& inputs, int rows, int first, int end, float* out, int stride, bool add);

// One row of the matrix as floats: a token's embedding.
void unpack_row(const Matrix& matrix, int output, float* row);

}  // namespace rackserve
