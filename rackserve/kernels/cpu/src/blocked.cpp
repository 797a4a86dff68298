#include "blocked.h"

#include <algorithm>
#include <utility>

namespace rackserve {

namespace {

constexpr int STEPS = GROUP / 2;                    // pairs of a group
constexpr size_t TILE_BYTES = STEPS * 64 + 2 * 64;  // a group of one unpacked tile: pairs, scales, offsets

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

// A group of a tile -> [STEPS][16 lanes] pairs, then 16 scales and 16 offsets as floats. Bytes 0 and 2 of a quad are a pair, and 1 and 3.
void unpack(const uint8_t* tile, int kind, uint8_t* to, int apart) {
    auto put = [&](int step, U32 pairs) { store(to + size_t(step) * apart * 64, pairs); };
    uint8_t* last = to + size_t(STEPS) * apart * 64;
    if (kind == Q4) {
        for (int quad = 0; quad < 4; quad++) {
            const U32 packed = load<U32>(tile + 64 * quad);
            put(2 * quad, packed & 0x000f000f);
            put(2 * quad + 1, (packed >> 8) & 0x000f000f);
            put(2 * quad + 8, (packed >> 4) & 0x000f000f);
            put(2 * quad + 9, (packed >> 12) & 0x000f000f);
        }
        store(last, from_half((const uint16_t*)(tile + 256)));
        store(last + size_t(apart) * 64, from_half((const uint16_t*)(tile + 288)));
        return;
    }
    typedef int16_t Words __attribute__((vector_size(64)));
    for (int quad = 0; quad < 8; quad++) {
        const Words bytes = load<Words>(tile + 64 * quad);
        put(2 * quad, (U32)((bytes << 8) >> 8));
        put(2 * quad + 1, (U32)(bytes >> 8));
    }
    store(last, from_half((const uint16_t*)(tile + 512)));
}

// A block of ROWS rows over WIDTH unpacked tiles.
template <int ROWS, int WIDTH, bool OFFSETS>
void meet(const uint8_t* panel, int groups, const int32_t* pairs, const float* scales, const float* sums, F32 (*total)[WIDTH]) {
    for (int group = 0; group < groups; group++, panel += WIDTH * TILE_BYTES) {
        I32 whole[ROWS][WIDTH] = {};
#pragma GCC unroll 1
        for (int step = 0; step < STEPS; step++, pairs += ROWS) {
            I32 weights[WIDTH];
#pragma GCC unroll 2
            for (int w = 0; w < WIDTH; w++) weights[w] = load<I32>(panel + (step * WIDTH + w) * 64);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const I32 row = I32{} + pairs[r];
#pragma GCC unroll 2
                for (int w = 0; w < WIDTH; w++) whole[r][w] = dot(whole[r][w], weights[w], row);
            }
        }
#pragma GCC unroll 2
        for (int w = 0; w < WIDTH; w++) {
            const F32 scale = load<F32>(panel + (STEPS * WIDTH + w) * 64), offset = load<F32>(panel + ((STEPS + 1) * WIDTH + w) * 64);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                F32 sum = fma(to_float(whole[r][w]), scale * splat(scales[r]), total[r][w]);
                if (OFFSETS) sum = fma(offset, splat(sums[r]), sum);
                total[r][w] = sum;
            }
        }
        scales += ROWS;
        sums += ROWS;
    }
}

struct Place {
    float* out;  // of the block's first row and the panel's first output
    int stride;
    bool add;
};

template <int ROWS, int WIDTH>
void block(const uint8_t* panel, const Matrix& m, const int32_t* pairs, const float* scales, const float* sums, const Place& to) {
    F32 total[ROWS][WIDTH] = {};
    if (m.kind == Q4) meet<ROWS, WIDTH, true>(panel, m.inputs / GROUP, pairs, scales, sums, total);
    else meet<ROWS, WIDTH, false>(panel, m.inputs / GROUP, pairs, scales, sums, total);
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) {
            float* at = to.out + size_t(r) * to.stride + w * LANES;
            store(at, to.add ? load<F32>(at) + total[r][w] : total[r][w]);
        }
}

template <int WIDTH> using Block = void (*)(const uint8_t*, const Matrix&, const int32_t*, const float*, const float*, const Place&);

template <int WIDTH, int... LESS> constexpr Block<WIDTH> choose(int rows, std::integer_sequence<int, LESS...>) {
    constexpr Block<WIDTH> all[] = {block<LESS + 1, WIDTH>...};
    return all[rows - 1];
}

template <int WIDTH>
void tiles(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, int output, float* out, int stride, bool add) {
    const int groups = m.inputs / GROUP;
    const size_t bytes = group_bytes(m.kind);
    for (int w = 0; w < WIDTH; w++) {
        const uint8_t* tile = m.data + size_t(output / LANES + w) * groups * bytes;
        for (int group = 0; group < groups; group++)
            unpack(tile + group * bytes, m.kind, panel.data() + group * WIDTH * TILE_BYTES + w * 64, WIDTH);
    }
    for (int row = 0; row < rows; row += ROW_BLOCK) {
        const int count = std::min(ROW_BLOCK, rows - row);
        const Place to{out + size_t(row) * stride + output, stride, add};
        choose<WIDTH>(count, std::make_integer_sequence<int, ROW_BLOCK>{})(
            panel.data(), m, in.pairs + size_t(row) * m.inputs / 2, in.scales + size_t(row) * groups, in.sums + size_t(row) * groups, to);
    }
}

}  // namespace

Panel::Panel(int inputs) : bytes_(size_t(inputs / GROUP) * TILES * TILE_BYTES) {}

void quantise_many(const float* values, int inputs, int row, int count, const ManyInputs& to) {
    const int first = row / ROW_BLOCK * ROW_BLOCK, rows = std::min(ROW_BLOCK, count - first), groups = inputs / GROUP;
    int32_t* pairs = to.pairs + size_t(first) * inputs / 2 + (row - first);
    for (int group = 0; group < groups; group++) {
        I32 whole[2];
        const size_t at = size_t(first) * groups + size_t(group) * rows + (row - first);
        round_group(values + group * GROUP, whole, to.scales + at, to.sums + at);
        for (const I32& half : whole) {
            // Of each quad the first two lanes become pairs with the last two.
            const I32 swapped = __builtin_shufflevector(half, half, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
            int32_t found[LANES];
            store(found, (half & 0xffff) | (swapped << 16));
#pragma GCC unroll 4
            for (int quad = 0; quad < LANES; quad += 4, pairs += 2 * size_t(rows)) {
                pairs[0] = found[quad];
                pairs[rows] = found[quad + 1];
            }
        }
    }
}

void product_many(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, int first, int end, float* out, int stride, bool add) {
    int output = first;
    for (; output + TILES * LANES <= end; output += TILES * LANES) tiles<TILES>(panel, m, in, rows, output, out, stride, add);
    for (; output < end; output += LANES) tiles<1>(panel, m, in, rows, output, out, stride, add);
}

}  // namespace rackserve
