#include "blocked.h"

#include <algorithm>
#include <utility>

namespace rackserve {

namespace {

constexpr int STEPS = GROUP / 2;                    // pairs of a group
constexpr int QUADS = GROUP / 4;                    // quads of a group
constexpr int CHUNK = 9, EIGHT_CHUNK = 18;          // groups
constexpr int SPAN = 8 * ROW_BLOCK;                 // rows
constexpr size_t TILE_BYTES = STEPS * 64 + 2 * 64;  // a group of one unpacked tile: pairs, scales, offsets
constexpr size_t EIGHT_BYTES = QUADS * 64 + 2 * 64;  // the same with quads

constexpr size_t unpacked_bytes(int kind) { return kind == Q4_EIGHT ? EIGHT_BYTES : TILE_BYTES; }

// A block of rows from some group on, as ManyInputs has it; pairs are quads of highs for Q4_EIGHT, which alone has lows, units and fine.
struct Block {
    const int32_t *pairs, *lows;
    const float* sums;
    const Unit* units;
    const uint8_t* fine;
};

// Bytes 0 and 2 of each lane, signed, as 16-bit numbers.
inline I32 pairs_of(I32 bytes) { return ((I32)((U32)bytes << 24) >> 24 & 0xffff) | ((I32)((U32)bytes << 8) >> 24 << 16); }

// sum + products of the four unsigned bytes in each lane of `u` with those signed in `s`.
inline I32 dot_bytes(I32 sum, I32 u, I32 s) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#else
    return dot(dot(sum, (I32)((U32)u & 0x00ff00ff), pairs_of(s)), (I32)((U32)u >> 8 & 0x00ff00ff), pairs_of((I32)((U32)s >> 8)));
#endif
}

// A group of a tile -> [STEPS][16 lanes] pairs, then 16 scales and 16 offsets as floats. Bytes 0 and 2 of a quad are a pair, and 1 and 3.
// Q4_EIGHT: [QUADS][16 lanes] quads instead.
void unpack(const uint8_t* tile, int kind, uint8_t* to, int apart) {
    auto put = [&](int step, U32 pairs) { store(to + size_t(step) * apart * 64, pairs); };
    uint8_t* last = to + size_t(kind == Q4_EIGHT ? QUADS : STEPS) * apart * 64;
    if (kind != Q8) {
        for (int quad = 0; quad < 4; quad++) {
            const U32 packed = load<U32>(tile + 64 * quad);
            if (kind == Q4_EIGHT) {
                put(quad, packed & 0x0f0f0f0f);
                put(quad + 4, (packed >> 4) & 0x0f0f0f0f);
                continue;
            }
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

// A block of ROWS rows over `groups` groups of WIDTH unpacked tiles, onto `totals`, which `fresh` begins.
template <int ROWS, int WIDTH, bool OFFSETS>
void meet(const uint8_t* panel, int groups, const Block& block, F32* totals, bool fresh) {
    const int32_t* pairs = block.pairs;
    const float* sums = block.sums;
    F32 total[ROWS][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) total[r][w] = fresh ? F32{} : totals[r * WIDTH + w];
    for (int group = 0; group < groups; group++, panel += WIDTH * TILE_BYTES, pairs += ROWS * STEPS, sums += ROWS) {
        I32 whole[ROWS][WIDTH] = {};
#pragma GCC unroll 1
        for (int step = 0; step < STEPS; step++) {
            I32 weights[WIDTH];
            __builtin_prefetch(pairs + (ROWS + step) * STEPS);
#pragma GCC unroll 2
            for (int w = 0; w < WIDTH; w++) weights[w] = load<I32>(panel + (step * WIDTH + w) * 64);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const I32 row = I32{} + pairs[r * STEPS + step];
#pragma GCC unroll 2
                for (int w = 0; w < WIDTH; w++) whole[r][w] = dot(whole[r][w], weights[w], row);
            }
        }
#pragma GCC unroll 2
        for (int w = 0; w < WIDTH; w++) {
            const F32 scale = load<F32>(panel + (STEPS * WIDTH + w) * 64), offset = load<F32>(panel + ((STEPS + 1) * WIDTH + w) * 64);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                total[r][w] = fma(to_float(whole[r][w]), scale, total[r][w]);
                if (OFFSETS) total[r][w] = fma(offset, splat(sums[r]), total[r][w]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) totals[r * WIDTH + w] = total[r][w];
}

// Adds the products of one group's quads onto `whole`.
template <int ROWS, int WIDTH> inline void add_quads(const uint8_t* panel, const int32_t* quads, I32 (&whole)[ROWS][WIDTH]) {
#pragma GCC unroll 1
    for (int step = 0; step < QUADS; step++) {
        I32 weights[WIDTH];
        __builtin_prefetch(quads + (ROWS + step) * QUADS);
#pragma GCC unroll 2
        for (int w = 0; w < WIDTH; w++) weights[w] = load<I32>(panel + (step * WIDTH + w) * 64);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const I32 row = I32{} + quads[r * QUADS + step];
#pragma GCC unroll 2
            for (int w = 0; w < WIDTH; w++) whole[r][w] = dot_bytes(whole[r][w], weights[w], row);
        }
    }
}

// Sums of quads begin at BEGIN. Where a * b + c is rounded once, they are floats as they are, MAGIC too large, and one instruction makes
// of them what two would: scales are so short that MAGIC times one is exact.
#if defined(__AVX512F__)
constexpr int32_t BEGIN = MAGIC_BITS;
inline F32 scaled(I32 whole, const Unit& unit) { return fma((F32)whole, splat(unit.scale), splat(unit.less)); }
#else
constexpr int32_t BEGIN = 0;
inline F32 scaled(I32 whole, const Unit& unit) { return to_float(whole) * splat(unit.scale); }
#endif

// As `meet`, for Q4_EIGHT. Where one row of a group has lows, all rows take that way: to others it adds nothing.
template <int ROWS, int WIDTH> void meet_eight(const uint8_t* panel, int groups, const Block& block, F32* totals, bool fresh) {
    F32 total[ROWS][WIDTH];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) total[r][w] = fresh ? F32{} : totals[r * WIDTH + w];
    for (int group = 0; group < groups; group++, panel += WIDTH * EIGHT_BYTES) {
        const Unit* units = block.units + group * ROWS;
        const float* sums = block.sums + group * ROWS;
        const auto close = [&](const I32(&whole)[ROWS][WIDTH], auto each) {
            F32 scale[WIDTH], offset[WIDTH];
#pragma GCC unroll 2
            for (int w = 0; w < WIDTH; w++)
                scale[w] = load<F32>(panel + (QUADS * WIDTH + w) * 64), offset[w] = load<F32>(panel + ((QUADS + 1) * WIDTH + w) * 64);
            // Rows outside: the other way round GCC keeps what it has spread of all rows, and spills.
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const F32 sum = splat(sums[r]);
#pragma GCC unroll 2
                for (int w = 0; w < WIDTH; w++) {
                    total[r][w] = fma(each(whole[r][w], units[r]), scale[w], total[r][w]);
                    total[r][w] = fma(offset[w], sum, total[r][w]);
                }
            }
        };
        I32 whole[ROWS][WIDTH];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < WIDTH; w++) whole[r][w] = I32{} + BEGIN;
        bool fine = false;
        for (int r = 0; r < ROWS; r++) fine |= block.fine[group * ROWS + r] != 0;
        add_quads<ROWS, WIDTH>(panel, block.pairs + group * ROWS * QUADS, whole);
        if (!fine) {
            close(whole, scaled);
            continue;
        }
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < WIDTH; w++) whole[r][w] = (whole[r][w] - BEGIN) << 8;
        add_quads<ROWS, WIDTH>(panel, block.lows + group * ROWS * QUADS, whole);
        close(whole, [](I32 sum, const Unit& unit) { return to_float(sum) * splat(unit.scale * (1.0f / 256)); });
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) totals[r * WIDTH + w] = total[r][w];
}

template <int WIDTH> using Meet = void (*)(const uint8_t*, int, const Block&, F32*, bool);

template <int WIDTH, int... LESS> constexpr Meet<WIDTH> choose(int rows, int kind, std::integer_sequence<int, LESS...>) {
    constexpr Meet<WIDTH> q4[] = {meet<LESS + 1, WIDTH, true>...}, q8[] = {meet<LESS + 1, WIDTH, false>...},
                          eight[] = {meet_eight<LESS + 1, WIDTH>...};
    return (kind == Q4 ? q4 : kind == Q8 ? q8 : eight)[rows - 1];
}

// A block of `count` rows from row `row` on, from group `group` on.
Block block_at(const ManyInputs& in, int kind, int row, int count, int groups, int group) {
    const size_t all = size_t(row) * groups, at = all + size_t(group) * count;
    if (kind != Q4_EIGHT) return {in.pairs + at * STEPS, nullptr, in.sums + at, nullptr, nullptr};
    const int32_t* highs = in.pairs + all * STEPS + size_t(group) * count * QUADS;
    return {highs, highs + size_t(count) * groups * QUADS, in.sums + at, in.units + at, in.fine + at};
}

// All rows with the tiles numbered `chosen`; done(row, sums) writes at place(row), which is asked for before, as are, line by line, the
// tiles that come next, `apart` further on. Some groups of some rows at a time: those groups stay in the first cache while all of these
// rows meet them.
template <int WIDTH, class Place, class Done>
void tiles(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, const int (&chosen)[WIDTH], int apart, Place place, Done done) {
    const int groups = m.inputs / GROUP, most = m.kind == Q4_EIGHT ? EIGHT_CHUNK : CHUNK, chunks = (groups + most - 1) / most, chunk = (groups + chunks - 1) / chunks;
    const size_t bytes = group_bytes(m.kind), unpacked = WIDTH * unpacked_bytes(m.kind);
    for (int w = 0; w < WIDTH; w++) {
        const uint8_t* tile = m.data + size_t(chosen[w]) * groups * bytes;
        for (int group = 0; group < groups; group++)
            unpack(tile + group * bytes, m.kind, panel.data() + group * unpacked + w * 64, WIDTH);
    }
    const size_t tile_bytes = groups * bytes, lines = (tile_bytes + 63) / 64, visits = size_t(rows + ROW_BLOCK - 1) / ROW_BLOCK * chunks;
    const size_t each = (lines + visits - 1) / visits;
    size_t line = 0;
    for (int first = 0; first < rows; first += SPAN) {
        F32 totals[SPAN][WIDTH];
        const int end = std::min(first + SPAN, rows);
        for (int group = 0; group < groups; group += chunk)
            for (int row = first; row < end; row += ROW_BLOCK) {
                const int count = std::min(ROW_BLOCK, end - row), now = std::min(chunk, groups - group);
                for (int r = 0; group + chunk >= groups && r < count; r++)
                    for (int w = 0; w < WIDTH; w++) __builtin_prefetch(place(row + r) + w * LANES, 1);
                for (const size_t last = std::min(line + each, lines); line < last; line++)
                    for (int w = 0; w < WIDTH; w++) __builtin_prefetch(m.data + (chosen[w] + apart) * tile_bytes + line * 64, 0, 2);
                const auto meet = choose<WIDTH>(count, m.kind, std::make_integer_sequence<int, ROW_BLOCK>{});
                meet(panel.data() + group * unpacked, now, block_at(in, m.kind, row, count, groups, group), totals[row - first], group == 0);
            }
        for (int row = first; row < end; row++) done(row, totals[row - first]);
    }
}

template <int WIDTH>
void plain(Panel& panel, const Matrix& m, const ManyInputs& in, int rows, int output, float* out, int stride, bool add) {
    int chosen[WIDTH];
    for (int w = 0; w < WIDTH; w++) chosen[w] = output / LANES + w;
    const auto place = [&](int row) { return out + size_t(row) * stride + output; };
    tiles<WIDTH>(panel, m, in, rows, chosen, WIDTH, place, [&](int row, const F32* totals) {
        for (int w = 0; w < WIDTH; w++) finish(place(row) + w * LANES, totals[w], has_row_scales(m) ? in.scales[row] : 1.0f, add);
    });
}

}  // namespace

Panel::Panel(int inputs) : bytes_(size_t(inputs / GROUP) * TILES * TILE_BYTES) {}

void quantise_many(const float* values, const Matrix& m, int row, int count, const ManyInputs& to) {
    const int first = row / ROW_BLOCK * ROW_BLOCK, rows = std::min(ROW_BLOCK, count - first), groups = m.inputs / GROUP;
    const size_t all = size_t(first) * groups;
    if (m.kind == Q4_EIGHT) {
        GroupRounding rounding(values, m.inputs);
        int32_t* highs = to.pairs + all * STEPS + (row - first) * QUADS;
        int32_t* lows = highs + size_t(rows) * groups * QUADS;
        size_t at = all + row - first;
        for (int group = 0; group < groups; group++, highs += rows * QUADS, lows += rows * QUADS, at += rows) {
            rounding.group(values + group * GROUP, (int8_t*)highs, (int8_t*)lows);
            to.units[at] = {rounding.scale, -MAGIC * rounding.scale};
            to.sums[at] = rounding.sum;
            to.fine[at] = rounding.fine;
        }
        return;
    }
    int32_t* pairs = to.pairs + (all + row - first) * STEPS;
    float* sums = to.sums + all + row - first;
    const Rounding rounding(values, m.inputs);
    to.scales[row] = rounding.scale;
    I32 whole[2];
    for (int group = 0; group < groups; group++, pairs += rows * STEPS, sums += rows) {
        *sums = rounding.group(values + group * GROUP, whole);
        // Of each quad the first two numbers become pairs with the last two.
        const I32 low = __builtin_shufflevector(whole[0], whole[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
        const I32 high = __builtin_shufflevector(whole[0], whole[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
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
        tiles<2>(panel, m, in, rows, {output / LANES, (output + m.outputs / 2) / LANES}, 1, place, [&](int row, const F32* totals) {
            const F32 scale = splat(has_row_scales(m) ? in.scales[row] : 1.0f);
            store(place(row), gated(totals[0] * scale, totals[1] * scale));
        });
    }
}

}  // namespace rackserve
