// Products of many rows with a quantised matrix: weights are unpacked once for all rows. The bits are those of `product`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "buffer.h"
#include "matrix.h"

namespace rackserve {

#if defined(__AVX512F__)
constexpr int ROW_BLOCK = 8;  // rows whose sums are kept in registers at once; no effect on any bit
constexpr int TILES = 2;      // output tiles beside each other
#else
constexpr int ROW_BLOCK = 4;
constexpr int TILES = 1;
#endif

// Rows from which on unpacking pays.
constexpr int many_rows(int kind) { return kind == Q8 ? 16 : kind == Q4_EIGHT ? 20 : 36; }

// What a whole number stands for in a group, and what takes MAGIC off again.
struct Unit {
    float scale, less;
};

// Rows in blocks of ROW_BLOCK, the last one shorter. A block of n rows is [inputs / 32][n][16] pairs of 16-bit numbers, of inputs
// 2p - p % 2 of the group and two more; its sums are [inputs / 32][n]. For Q4_EIGHT it is [inputs / 32][n][8] quads of highs and then as
// many of lows, and units and fine lie as sums do.
struct ManyInputs {
    int32_t* pairs;
    float* scales;  // [rows]
    float* sums;
    uint8_t* fine;
    Unit* units;
};

inline bool takes_many(const Matrix& matrix, int rows) { return matrix.kind != BF16 && rows >= many_rows(matrix.kind); }

// Rounds row `row` of `count` as `quantise` does, into its place.
void quantise_many(const float* values, const Matrix& matrix, int row, int count, const ManyInputs& to);

// One member's memory for the unpacked weights of TILES tiles of at most `inputs` inputs.
class Panel {
  public:
    explicit Panel(int inputs);
    uint8_t* data() { return bytes_.at(); }

  private:
    Buffer<uint8_t> bytes_;
};

// As `product`.
void product_many(Panel& panel, const Matrix& matrix, const ManyInputs& inputs, int rows, int first, int end, float* out, int stride, bool add);

// Where the upper half of a matrix gates the lower: gated(upper, lower) -> out for outputs first to end of a half, without a way through
// memory for both. Only where two tiles fit beside each other.
constexpr bool GATED = TILES == 2;
void product_gated(Panel& panel, const Matrix& matrix, const ManyInputs& inputs, int rows, int first, int end, float* out, int stride);

}  // namespace rackserve
