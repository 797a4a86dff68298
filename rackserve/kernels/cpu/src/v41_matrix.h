// Weight matrices of a DeepSeek-V4.1 checkpoint as they lie in memory, and products with them in float32.
//
// Output rows come in tiles of 16, one per lane (the last filled up with zeros); the inner dimension in groups of 32. Codes lie as
// [tile][group][word][16 lanes][4 bytes], where a word of a lane holds consecutive numbers of the inner dimension:
//   F8   four e4m3; one float per tile and group: its scale times 2^120, since the codes are read as the floats they nearly are
//   F4   eight e2m1, low nibble first; 16 exponent bytes per tile and group
//   B16  two bf16
//   F32  one float
// Scales are powers of two, so every weight is the very number that the checkpoint stands for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace rackserve::v41 {

constexpr int GROUP = 32;
constexpr int MAX_PART = 384;
constexpr int MANY = 9;  // rows from which on weights are unpacked to memory first; no effect on any bit

enum Kind : int32_t { F8 = 0, F4 = 1, B16 = 2, FLOAT = 3 };

struct Matrix {
    const uint8_t* codes;
    const uint8_t* scales;
    int32_t kind;
    int32_t outputs;    // a multiple of 16
    int32_t inputs;     // a multiple of 32
    int32_t quantised;  // what it is multiplied with is rounded to fp8, where that is wanted
};

// Floats that `product` needs to unpack weights into.
constexpr size_t PANEL = size_t(MAX_PART + GROUP) * 2 * LANES;

// out[row][first, end) of rows [rows][inputs] of x; first and end are multiples of 16. `stride`, `out_stride`: floats between rows.
//
// An output is a chain of fused multiply-adds over the inner dimension, in as many equal parts as it takes for none to be longer
// than MAX_PART; parts are added in order, onto what is there if `add`. So it depends on its own row alone.
void product(const Matrix& m, const float* x, size_t stride, int rows, int first, int end, float* out, size_t out_stride, float* panel,
             bool add = false);

}  // namespace rackserve::v41
