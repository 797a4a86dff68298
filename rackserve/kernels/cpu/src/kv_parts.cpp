#include "kv_parts.h"

#include <cstring>

namespace rackserve {

namespace {

#if !defined(__AVX512F__)
// Trades blocks of SIZE lanes between rows that lie SIZE apart.
template <int SIZE> inline void trade(F32* v) {
    constexpr auto low = [](int lane) { return lane & SIZE ? LANES + lane - SIZE : lane; };
    constexpr auto high = [](int lane) { return lane & SIZE ? LANES + lane : lane + SIZE; };
#define ALL(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15)
#pragma GCC unroll 16
    for (int row = 0; row < LANES; row++)
        if (!(row & SIZE)) {
            const F32 a = v[row], b = v[row + SIZE];
            v[row] = __builtin_shufflevector(a, b, ALL(low));
            v[row + SIZE] = __builtin_shufflevector(a, b, ALL(high));
        }
#undef ALL
}
#endif

// A line of each of sixteen rows, `apart` bytes from each other -> its columns: the numbers of a lane become a vector.
inline void turn_lines(const uint8_t* line, size_t apart, F32* v) {
#if defined(__AVX512F__)
    // Quarters of lines come from memory to where they belong, which costs no shuffles; then quarters are turned.
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512 x[4];
#pragma GCC unroll 4
        for (int row = 0; row < 4; row++) {
            const auto from = [&](int four) { return _mm_loadu_ps(reinterpret_cast<const float*>(line + (4 * four + row) * apart) + 4 * quarter); };
            x[row] = _mm512_broadcast_f32x4(from(0));
            x[row] = _mm512_mask_broadcast_f32x4(x[row], 0x00f0, from(1));
            x[row] = _mm512_mask_broadcast_f32x4(x[row], 0x0f00, from(2));
            x[row] = _mm512_mask_broadcast_f32x4(x[row], 0xf000, from(3));
        }
        const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
        const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
        v[4 * quarter] = (F32)_mm512_shuffle_ps(a, c, 0x44), v[4 * quarter + 1] = (F32)_mm512_shuffle_ps(a, c, 0xee);
        v[4 * quarter + 2] = (F32)_mm512_shuffle_ps(b, d, 0x44), v[4 * quarter + 3] = (F32)_mm512_shuffle_ps(b, d, 0xee);
    }
#else
    for (int row = 0; row < LANES; row++) v[row] = load<F32>(line + row * apart);
    trade<1>(v);
    trade<2>(v);
    trade<4>(v);
    trade<8>(v);
#endif
}

alignas(64) constexpr uint8_t NOTHING_THERE[2 * MAX_HEAD] = {};
constexpr float SHORT = 1e-18f;  // a query that is shorter counts as zero: squares of its numbers would be lost

// The two bf16 in each lane as floats.
inline F32 even(F32 pairs) { return (F32)((U32)pairs << 16); }
inline F32 odd(F32 pairs) { return (F32)((U32)pairs & 0xffff0000u); }

typedef uint16_t Words __attribute__((vector_size(64)));

inline Words larger(Words a, Words b) { return a > b ? a : b; }

// The magnitudes of bf16, as whole numbers, in their order.
inline Words sizes_of(F32 pairs) { return (Words)pairs & 0x7fff; }

// Two numbers times what makes them whole -> the pair of 16-bit numbers in each lane.
inline I32 pair_of(F32 low, F32 high, F32 by, F32 by_high) {
    const F32 magic = splat(MAGIC);
    const U32 first = (U32)fma(low, by, magic), second = (U32)fma(high, by_high, magic) << 16;
#if defined(__AVX512F__)
    return (I32)_mm512_mask_mov_epi16((__m512i)first, 0xaaaaaaaa, (__m512i)second);
#else
    return (I32)((first & 0xffff) | second);
#endif
}

// Of bf16 of at most that size, lane by lane: 2^exponent is above them, and powers of 2 that go with it. Where sizes are not finite, or 2^126
// and more, powers are 0 and what stands for numbers is NaN.
struct Exponents {
    I32 exponent, plain;
    explicit Exponents(I32 size) : exponent(rackserve::larger((size >> 7) - 126, I32{} + LEAST_EXPONENT)), plain(size < (126 + 127) << 7) {}
    F32 or_nan(F32 x) const { return (F32)(((U32)x & (U32)plain) | (~(U32)plain & 0x7fc00000u)); }
    F32 power(I32 of) const { return (F32)(((127 + of) << 23) & plain); }
    F32 to_whole(int bits) const { return power(bits - exponent); }
};

// Keys -> across: a vector of sixteen positions for each four bytes of a row, as they lie in memory; and of bf16 the largest size in each
// row -> sizes. What pads the last vector is zero, whatever memory holds there.
void turn_keys(const Cache& cache, const Rows& rows, Ahead& asking, float* across, int32_t* sizes) {
    Ahead ahead = asking;
    const int bytes = cache.head_dim * cache.wide;
    for (int first = 0; first < rows.count; first += LANES) {
        const int live = std::min(LANES, rows.count - first);
        const uint8_t* const* keys = rows.at + first;
        const bool run = live == LANES && cache.block_tokens % LANES == 0;  // all in one block
        Words most[2] = {};
        for (int line = 0; line < bytes; line += 64, across += LANES * LANES) {
            F32 v[LANES];
            if (run) turn_lines(keys[0] + line, bytes, v);
            else {
                alignas(64) uint8_t copy[LANES * 64] = {};
                for (int lane = 0; lane < live; lane++) std::memcpy(copy + lane * 64, keys[lane] + line, 64);
                turn_lines(copy, 64, v);
            }
            ahead.ask(6);  // with what others ask for, about all of a part by its end
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) {
                store(across + lane * LANES, v[lane]);
                most[lane % 2] = larger(most[lane % 2], sizes_of(v[lane]));
            }
        }
        const U32 pairs = (U32)larger(most[0], most[1]);
        store(sizes + first, rackserve::larger((I32)(pairs & 0xffff), (I32)(pairs >> 16)));
    }
    asking = ahead;
}

void copy_values(const Cache& cache, const Rows& rows, Ahead& asking, float* to) {
    const size_t bytes = size_t(cache.head_dim) * cache.wide;
    for (int at = 0; at < rows.count; at++, to += cache.head_dim) {
        asking.ask(int(bytes / 64));
        std::memcpy(to, rows.at[rows.count + at], bytes);
    }
}

// Turned pairs of bf16 -> whole numbers in their place.
void round_keys(WholePart& whole, const int32_t* sizes, int dim, int count, Ahead& asking) {
    Ahead ahead = asking;
    const int pairs = dim / 2;
    for (int first = 0; first < count; first += LANES) {
        int32_t* keys = whole.keys + size_t(first) * pairs;
        const Exponents found(load<I32>(sizes + first));
        const F32 by = found.to_whole(key_bits(dim));
        store(whole.units + first, found.or_nan(found.power(found.exponent - key_bits(dim))));
        for (int d = 0; d < pairs; d += 4) {
            ahead.ask(1);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, keys += LANES) {
                const F32 v = load<F32>(keys);
                store(keys, pair_of(even(v), odd(v), by, by));
            }
        }
    }
    asking = ahead;
}

// The largest size in each of sixteen rows of bf16; of rows from `live` on 0.
I32 largest_of(const uint8_t* const* rows, int live, int bytes, Ahead& ahead) {
    Words most[LANES];
    for (int row = 0; row < LANES; row++) {
        if (row % 2 == 0) ahead.ask(1);
        const uint8_t* from = row < live ? rows[row] : NOTHING_THERE;
        most[row] = sizes_of(load<F32>(from));
        for (int line = 64; line < bytes; line += 64) most[row] = larger(most[row], sizes_of(load<F32>(from + line)));
    }
#if defined(__AVX512F__)
    // Words of two rows beside each other, which then are lanes.
    F32 pairs[LANES / 2];
    for (int pair = 0; pair < LANES / 2; pair++) {
        const __m512i a = (__m512i)most[2 * pair], b = (__m512i)most[2 * pair + 1];
        pairs[pair] = (F32)larger((Words)_mm512_unpacklo_epi16(a, b), (Words)_mm512_unpackhi_epi16(a, b));
    }
    const F32 found = join_lanes<LANES / 2>(pairs, [](F32 a, F32 b) { return (F32)larger((Words)a, (Words)b); });
    return (I32)_mm512_cvtepu16_epi32(_mm512_castsi512_si256((__m512i)found));
#else
    I32 found = {};
    for (int row = 0; row < LANES; row++)
        for (int word = 0; word < 2 * LANES; word++) found[row] = std::max<int32_t>(found[row], most[row][word]);
    return found;
#endif
}

// Values -> whole numbers of two neighbouring positions in each lane, the even numbers of 32 before the odd ones, and their exponents.
void round_values(WholePart& whole, const Cache& cache, const Rows& rows, Ahead& asking) {
    Ahead ahead = asking;
    const int dim = cache.head_dim, bytes = 2 * dim;
    const uint8_t* const* values = rows.at + rows.count;
    for (int first = 0; first < rows.count; first += LANES) {
        const int live = std::min(LANES, rows.count - first);
        const Exponents found(largest_of(values + first, live, bytes, ahead));
        alignas(64) float scales[LANES];
        store(scales, found.to_whole(VALUE_BITS));
        store(whole.exponents + first, found.or_nan(to_float(found.exponent)));
        store(whole.inverses + first, found.power(-found.exponent));
        for (int row = 0; row < live; row += 2) {
            int32_t* to = whole.values + size_t(first + row) / 2 * dim;
            const uint8_t* next = row + 1 < live ? values[first + row + 1] : NOTHING_THERE;
            const F32 by = splat(scales[row]), by_next = splat(scales[row + 1]);
            for (int line = 0; line < bytes; line += 64, to += 2 * LANES) {
                const F32 v = load<F32>(values[first + row] + line), w = load<F32>(next + line);
                ahead.ask(1);
                store(to, pair_of(even(v), even(w), by, by_next));
                store(to + LANES, pair_of(odd(v), odd(w), by, by_next));
            }
        }
    }
    asking = ahead;
}

}  // namespace

void lay_out(Scratch& scratch, const Cache& cache, const Rows& rows, Ahead& asking) {
    alignas(64) int32_t sizes[PART];
    if (cache.wide == 4) {
        turn_keys(cache, rows, asking, scratch.floats.keys, sizes);
        copy_values(cache, rows, asking, scratch.floats.values);
        return;
    }
    turn_keys(cache, rows, asking, (float*)scratch.whole.keys, sizes);
    round_keys(scratch.whole, sizes, cache.head_dim, rows.count, asking);
    round_values(scratch.whole, cache, rows, asking);
}

void round_queries(Queries& queries, int dim) {
    for (int q = 0; q < queries.count; q++) {
        const float* row = queries.rows + size_t(q) * dim;
        F32 squares = {};
        for (int d = 0; d < dim; d += LANES) squares = fma(load<F32>(row + d), load<F32>(row + d), squares);
        const float length = std::sqrt(sum(squares)), inverse = length > SHORT ? LENGTH / length : 0.0f;
        queries.units[q] = length > SHORT || length != length ? length / LENGTH : 0.0f;
        for (int d = 0; d < dim; d += LANES)
            store(queries.whole + size_t(q) * dim + d, low_words((I32)fma(load<F32>(row + d), splat(inverse), splat(MAGIC))));
    }
}

}  // namespace rackserve
