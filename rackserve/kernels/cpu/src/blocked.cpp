#include "blocked.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rackserve {

namespace {

constexpr int STEPS = GROUP / 2;                    // pairs of a group
constexpr int CHUNK = 9;                            // groups
constexpr int SPAN = 8 * ROW_BLOCK;                 // rows
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

// A block of ROWS rows over `groups` groups of WIDTH unpacked tiles, onto `totals`.
template <int ROWS, int WIDTH, bool OFFSETS>
void meet(const uint8_t* panel, int groups, const int32_t* pairs, const float* sums, F32* totals) {
    F32 total[ROWS][WIDTH];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) total[r][w] = totals[r * WIDTH + w];
    for (int group = 0; group < groups; group++, panel += WIDTH * TILE_BYTES, pairs += ROWS * STEPS, sums += ROWS) {
        I32 whole[ROWS][WIDTH] = {};
#pragma GCC unroll 1
        for (int step = 0; step < STEPS; step++) {
            I32 weights[WIDTH];
            __builtin_prefetch(pairs + (ROWS + step) * STEPS);
#pragma GCC unroll 2
            for (int w = 0; w < WIDTH; w++) weights[w] = load<I32>(panel + (step * WIDTH + w) * 64);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const I32 row = I32{} + pairs[r * STEPS + step];
#pragma GCC unroll 2
                for (int w = 0; w < WIDTH; w++) whole[r][w] = dot(whole[r][w], weights[w], row);
            }
        }
#pragma GCC unroll 2
        for (int w = 0; w < WIDTH; w++) {
            const F32 scale = load<F32>(panel + (STEPS * WIDTH + w) * 64), offset = load<F32>(panel + ((STEPS + 1) * WIDTH + w) * 64);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                total[r][w] = fma(to_float(whole[r][w]), scale, total[r][w]);
                if (OFFSETS) total[r][w] = fma(offset, splat(sums[r]), total[r][w]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) totals[r * WIDTH + w] = total[r][w];
}

template <int WIDTH> using Meet = void (*)(const uint8_t*, int, const int32_t*, const float*, F32*);

template <int WIDTH, int... LESS> constexpr Meet<WIDTH> choose(int rows, bool offsets, std::integer_sequence<int, LESS...>) {
    constexpr Meet<WIDTH> with[] = {meet<LESS + 1, WIDTH, true>...}, without[] = {meet<LESS + 1, WIDTH, false>...};
    return (offsets ? with : without)[rows - 1];
}

// All rows with the tiles numbered `chosen`; done(row, sums) writes at place(row), which is asked for before. Some groups of some rows at a time: those groups stay in the first cache
// while all of these rows meet them.
template <int WIDTH, class Place, class Done>
void tiles(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, const int (&chosen)[WIDTH], Place place, Done done) {
    const int groups = m.inputs / GROUP, chunks = (groups + CHUNK - 1) / CHUNK, chunk = (groups + chunks - 1) / chunks;
    const size_t bytes = group_bytes(m.kind);
    for (int w = 0; w < WIDTH; w++) {
        const uint8_t* tile = m.data + size_t(chosen[w]) * groups * bytes;
        for (int group = 0; group < groups; group++)
            unpack(tile + group * bytes, m.kind, panel.data() + group * WIDTH * TILE_BYTES + w * 64, WIDTH);
    }
    for (int first = 0; first < rows; first += SPAN) {
        F32 totals[SPAN][WIDTH] = {};
        const int end = std::min(first + SPAN, rows);
        for (int group = 0; group < groups; group += chunk)
            for (int row = first; row < end; row += ROW_BLOCK) {
                const int count = std::min(ROW_BLOCK, end - row), now = std::min(chunk, groups - group);
                const size_t at = size_t(row) * groups + size_t(group) * count;
                for (int r = 0; group + chunk >= groups && r < count; r++)
                    for (int w = 0; w < WIDTH; w++) __builtin_prefetch(place(row + r) + w * LANES, 1);
                const auto meet = choose<WIDTH>(count, m.kind == Q4, std::make_integer_sequence<int, ROW_BLOCK>{});
                meet(panel.data() + group * WIDTH * TILE_BYTES, now, in.pairs + at * STEPS, in.sums + at, totals[row - first]);
            }
        for (int row = first; row < end; row++) done(row, totals[row - first]);
    }
}

template <int WIDTH>
void plain(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, int output, float* out, int stride, bool add) {
    int chosen[WIDTH];
    for (int w = 0; w < WIDTH; w++) chosen[w] = output / LANES + w;
    const auto place = [&](int row) { return out + size_t(row) * stride + output; };
    tiles<WIDTH>(panel, m, in, rows, chosen, place, [&](int row, const F32* totals) {
        for (int w = 0; w < WIDTH; w++) finish(place(row) + w * LANES, totals[w], in.scales[row], add);
    });
}

}  // namespace

Panel::Panel(int inputs) : bytes_(size_t(inputs / GROUP) * TILES * TILE_BYTES) {}

void quantise_many(const float* values, int inputs, int row, int count, const ManyInputs& to) {
    const int first = row / ROW_BLOCK * ROW_BLOCK, rows = std::min(ROW_BLOCK, count - first), groups = inputs / GROUP;
    int32_t* pairs = to.pairs + (size_t(first) * groups + row - first) * STEPS;
    float* sums = to.sums + size_t(first) * groups + row - first;
    const Rounding rounding(values, inputs);
    to.scales[row] = rounding.scale;
    for (int group = 0; group < groups; group++, pairs += rows * STEPS, sums += rows) {
        I32 half[2];
        *sums = rounding.group(values + group * GROUP, half);
        // Of each quad the first two numbers become pairs with the last two.
        const I32 low = __builtin_shufflevector(half[0], half[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
        const I32 high = __builtin_shufflevector(half[0], half[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
        store(pairs, (low & 0xffff) | (high << 16));
    }
}

void product_many(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, int first, int end, float* out, int stride, bool add) {
    int output = first;
    for (; output + TILES * LANES <= end; output += TILES * LANES) plain<TILES>(panel, m, in, rows, output, out, stride, add);
    for (; output < end; output += LANES) plain<1>(panel, m, in, rows, output, out, stride, add);
}

void product_gated(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, int first, int end, float* out, int stride) {
    for (int output = first; output < end; output += LANES) {
        const auto place = [&](int row) { return out + size_t(row) * stride + output; };
        tiles<2>(panel, m, in, rows, {output / LANES, (output + m.outputs / 2) / LANES}, place, [&](int row, const F32* totals) {
            const F32 scale = splat(in.scales[row]);
            store(place(row), gated(totals[0] * scale, totals[1] * scale));
        });
    }
}

}  // namespace rackserve
