// Weight matrices as they lie in memory, packed once, and products with them.
//
// Output rows come in tiles of 16, one per lane; the inner dimension in groups of 32. A tile is its groups one after the other:
//   Q4   256 bytes of nibbles, 16 half scales, 16 half offsets     weight = nibble * scale + offset
//   Q4_EIGHT   the same; what is multiplied by it is rounded to 8 bits
//   Q8   512 signed bytes, 16 half scales, 16 int16 sums of bytes   weight = byte * scale
//   BF16 32 x 16 bf16                                               weight as it is
// Nibbles and bytes of a group: [8 quads of the inner dimension][16 lanes][4], where a Q4 byte holds quad q (low) and q + 4 (high).
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace rackserve {

constexpr int GROUP = 32;

enum Kind : int32_t { Q4 = 0, Q8 = 1, BF16 = 2, Q4_EIGHT = 3 };

struct Matrix {
    const uint8_t* data;
    int32_t kind;
    int32_t outputs;  // a multiple of 16
    int32_t inputs;   // a multiple of 32
};

inline bool has_row_scales(const Matrix& matrix) { return matrix.kind == Q4 || matrix.kind == Q8; }

inline size_t group_bytes(int kind) { return kind == Q8 ? 576 : kind == BF16 ? 1024 : 320; }

// Rows that go into a product. Quantised ones are 16-bit whole numbers, 256 * high + low. For Q4 and Q8 the largest magnitude of a row
// becomes PEAK. For Q4_EIGHT that of a group does, and low is 0 but in groups that stick out: highs alone are half the work, but of those
// groups they would lose what a small model knows.
struct Inputs {
    int8_t* highs;      // [rows][inputs]
    int8_t* lows;       // [rows][inputs]
    float* scales;      // [rows]; Q4_EIGHT: [rows][inputs / 32], of highs
    float* sums;        // [rows][inputs / 32]: of the whole numbers; Q4_EIGHT: of what they stand for
    uint8_t* fine;      // [rows][inputs / 32], for Q4_EIGHT: whether a group has lows
    const float* rows;  // [rows][inputs], for BF16
};

constexpr float PEAK = 32512.0f;  // 127 * 256
constexpr float TINY = 1e-30f;    // a row that is smaller counts as zero: its inverse would overflow

// Magnitudes as whole numbers, in the order of the numbers, NaN last: so none is lost among others.
inline I32 magnitudes(const float* values) { return (I32)(load<U32>(values) & 0x7fffffffu); }

inline float largest(I32 sizes) {
#if defined(__AVX512F__)
    const int32_t most = _mm512_reduce_max_epi32((__m512i)sizes);
#else
    int32_t most = sizes[0];
    for (int lane = 1; lane < LANES; lane++) most = sizes[lane] > most ? sizes[lane] : most;
#endif
    float found;
    std::memcpy(&found, &most, sizeof found);
    return found;
}

// What a number of that size is multiplied by to become PEAK, and what PEAK stands for then: NaN or infinite where the size is, so that
// what is not finite gives nothing that is.
inline float inverse_of(float size) { return size > TINY ? PEAK / size : 0.0f; }
inline float unit_of(float size) { return size <= TINY ? 0.0f : size / PEAK; }

// Without its last two bits: 3 * 2^n times it is exact.
inline float shortened(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= ~3u;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

// Any whole numbers, those that stand for NaN too.
inline float sum_of(const I32* halves) { return sum(to_float((I32)((U32)halves[0] + (U32)halves[1]))); }

// Makes whole numbers of a row.
class Rounding {
  public:
    Rounding(const float* row, int inputs) {
        I32 most = {};
        for (int at = 0; at < inputs; at += LANES) most = larger(magnitudes(row + at), most);
        const float found = largest(most);
        scale = unit_of(found);
        inverse_ = splat(inverse_of(found));
    }

    // 32 numbers in two halves; returns their sum, which is exact.
    float group(const float* values, I32* whole) const {
        const F32 magic = splat(MAGIC);
        for (int half = 0; half < 2; half++) whole[half] = (I32)(load<F32>(values + half * LANES) * inverse_ + magic) - MAGIC_BITS;
        return sum_of(whole);
    }

    float scale;

  private:
    F32 inverse_;
};

// Sixteen whole numbers -> their highs and lows, as bytes.
inline void store_halves(I32 whole, void* highs, void* lows) {
    const I32 high = (whole + 128) >> 8;
    store(highs, __builtin_convertvector(high, I8));
    store(lows, __builtin_convertvector(whole - (high << 8), I8));
}

// Of 32 bytes in two halves.
inline float sum_of_bytes(I8 low, I8 high) {
#if defined(__AVX2__)
    // As unsigned bytes, moved by 128, which one instruction adds up.
    const __m256i bytes = _mm256_xor_si256(_mm256_set_m128i((__m128i)high, (__m128i)low), _mm256_set1_epi8(-128));
    const __m256i quarters = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
    const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
    return float(_mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 2) - GROUP * 128);
#else
    int total = 0;
    for (int lane = 0; lane < LANES; lane++) total += low[lane] + high[lane];
    return float(total);
#endif
}

// Makes whole numbers of a row group by group, for Q4_EIGHT.
class GroupRounding {
  public:
    GroupRounding(const float* row, int inputs) {
        F32 squares = {};
        for (int at = 0; at < inputs; at += LANES) {
            const F32 x = load<F32>(row + at);
            squares = fma(x, x, squares);
        }
        limit_ = APART * std::sqrt(rackserve::sum(squares) / float(inputs));
    }

    // 32 numbers -> 32 highs and as many lows.
    void group(const float* values, int8_t* highs, int8_t* lows) {
        const F32 magic = splat(MAGIC), low = load<F32>(values), high = load<F32>(values + LANES);
        const float found = largest(larger(magnitudes(values), magnitudes(values + LANES))), inverse = inverse_of(found), unit = unit_of(found);
        fine = found > limit_;
        scale = shortened(256 * unit);
        if (!(scale <= MOST)) scale = NAN;  // with few rows and with many
        if (fine) {
            const F32 factor = splat(inverse);
            const I32 whole[2] = {(I32)(low * factor + magic) - MAGIC_BITS, (I32)(high * factor + magic) - MAGIC_BITS};
            for (int half = 0; half < 2; half++) store_halves(whole[half], highs + half * LANES, lows + half * LANES);
            sum = scale / 256 * sum_of(whole);
            return;
        }
        // The lowest byte is the number's own, with MAGIC or without.
        const F32 factor = splat(inverse / 256);
        const I8 first = low_bytes((I32)(low * factor + magic)), second = low_bytes((I32)(high * factor + magic));
        store(highs, first), store(highs + LANES, second);
        store(lows, I8{}), store(lows + LANES, I8{});
        sum = scale * sum_of_bytes(first, second);
    }

    // Of the last group: the scale of highs, the sum of what its numbers stand for, whether it has lows.
    float scale, sum;
    bool fine;

  private:
    static constexpr float MOST = 2e31f;  // times MAGIC is finite: inputs up to 10^33
    static constexpr float APART = 8.0f;  // times the row's root mean square: such a group keeps 16 bits

    float limit_;
};

// Writes row `row` into all that a product with `matrix` wants of it.
void quantise(const float* values, const Matrix& matrix, int row, const Inputs& to);

// Sixteen finished sums of a row with its scale into their place; `add`: onto what is there.
inline void finish(float* at, F32 total, float scale, bool add) {
    store(at, add ? fma(total, splat(scale), load<F32>(at)) : total * splat(scale));
}

// out[row][first .. end) for outputs first to end (multiples of 16); `add`: onto what is there. `stride`: floats between rows.
void product(const Matrix& matrix, const Inputs& inputs, int rows, int first, int end, float* out, int stride, bool add);

// One row of the matrix as floats: a token's embedding.
void unpack_row(const Matrix& matrix, int output, float* row);

}  // namespace rackserve
