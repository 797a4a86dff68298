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

// Rows that go into a product. Quantised ones are 16-bit whole numbers, 256 * high + low; in each row the largest magnitude
// becomes PEAK. Eight bits would do for speed, but change what a small model knows.
struct Inputs {
    int8_t* highs;      // [rows][inputs]
    int8_t* lows;       // [rows][inputs]
    float* scales;      // [rows]
    float* sums;        // [rows][inputs / 32]: of the whole numbers
    const float* rows;  // [rows][inputs], for BF16
};

constexpr float PEAK = 32512.0f;  // 127 * 256
constexpr float TINY = 1e-30f;    // a row that is smaller counts as zero: its inverse would overflow

// Makes whole numbers of a row.
class Rounding {
  public:
    Rounding(const float* row, int inputs) {
        const U32 mask = U32{} + 0x7fffffff;
        F32 most = {};
        for (int at = 0; at < inputs; at += LANES) {
            const F32 size = (F32)((U32)load<F32>(row + at) & mask);
            most = size > most ? size : most;
        }
        const float found = peak(most);
        scale = found > TINY ? found / PEAK : 0.0f;
        inverse_ = splat(found > TINY ? PEAK / found : 0.0f);
    }

    // 32 numbers in two halves; returns their sum, which is exact.
    float group(const float* values, I32* whole) const {
        const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
        for (int half = 0; half < 2; half++) whole[half] = (I32)(load<F32>(values + half * LANES) * inverse_ + magic) - 0x4b400000;
        return sum(to_float(whole[0] + whole[1]));
    }

    float scale;

  private:
    F32 inverse_;
};

// Writes a row's part of the four arrays; returns the scale.
float quantise(const float* row, int inputs, int8_t* highs, int8_t* lows, float* sums);

// Sixteen finished sums of a row with its scale into their place; `add`: onto what is there.
inline void finish(float* at, F32 total, float scale, bool add) {
    store(at, add ? fma(total, splat(scale), load<F32>(at)) : total * splat(scale));
}

// out[row][first .. end) for outputs first to end (multiples of 16); `add`: onto what is there. `stride`: floats between rows.
void product(const Matrix& matrix, const Inputs& inputs, int rows, int first, int end, float* out, int stride, bool add);

// One row of the matrix as floats: a token's embedding.
void unpack_row(const Matrix& matrix, int output, float* row);

}  // namespace rackserve
