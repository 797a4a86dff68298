#include "attention.h"

namespace rackserve {

namespace {

constexpr int ROWS = 8;   // queries whose sums are kept in registers at once; no effect on any bit
constexpr int WIDTH = 2;  // vectors of a value row taken at once

inline F32 widened(const uint8_t* row, int wide, int at) {
    return wide == 2 ? from_bf16(load<U16>(row + 2 * at)) : load<F32>(row + 4 * at);
}

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

// Sixteen vectors become their columns.
inline void transpose(F32* v) {
    trade<1>(v);
    trade<2>(v);
    trade<4>(v);
    trade<8>(v);
}

// Asks for the keys and values of the vector of positions from `at` on: blocks lie far from each other in memory.
inline void prefetch(const Cache& cache, int layer, int kv_head, const int32_t* blocks, int at, int end) {
    const int bytes = cache.head_dim * cache.wide;
    for (int position = at; position < at + LANES && position < end; position++) {
        const size_t inside = size_t(position % cache.block_tokens) * bytes;
        for (int value = 0; value < 2; value++) {
            const uint8_t* row = cache.rows(blocks[position / cache.block_tokens], layer, value, kv_head) + inside;
            for (int line = 0; line < bytes; line += 64) __builtin_prefetch(row + line);
        }
    }
}

// Keys and values of positions [first, end), widened. What pads the last vector of keys is zero, whatever memory holds there.
void widen(Scratch& scratch, const Cache& cache, int layer, int kv_head, const int32_t* blocks, int first, int end) {
    const int dim = cache.head_dim, bytes = dim * cache.wide;
    const uint8_t* keys[LANES];
    for (int at = first; at < end; at += LANES) {
        prefetch(cache, layer, kv_head, blocks, at + 2 * LANES, end);
        for (int lane = 0; lane < LANES && at + lane < end; lane++) {
            const int position = at + lane, inside = position % cache.block_tokens;
            const int64_t block = blocks[position / cache.block_tokens];
            keys[lane] = cache.rows(block, layer, 0, kv_head) + size_t(inside) * bytes;
            const uint8_t* value = cache.rows(block, layer, 1, kv_head) + size_t(inside) * bytes;
            float* to = scratch.values + size_t(position - first) * dim;
            for (int d = 0; d < dim; d += LANES) store(to + d, widened(value, cache.wide, d));
        }
        float* across = scratch.keys + size_t(at - first) * dim;
        for (int d = 0; d < dim; d += LANES) {
            F32 rows[LANES];
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) rows[lane] = at + lane < end ? widened(keys[lane], cache.wide, d) : F32{};
            transpose(rows);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) store(across + (d + lane) * LANES, rows[lane]);
        }
    }
}

template <int COUNT> void scores(const float* across, int dim, const float* queries, int stride, F32* out) {
    F32 sums[COUNT] = {};
    for (int d = 0; d < dim; d++) {
        const F32 keys = load<F32>(across + d * LANES);
#pragma GCC unroll 8
        for (int q = 0; q < COUNT; q++) sums[q] = fma(keys, splat(queries[size_t(q) * stride + d]), sums[q]);
    }
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++) out[q] = sums[q];
}

template <int COUNT> void mixtures(const Scratch& scratch, int dim, int live, const float (*weights)[PART], float* mixed) {
    for (int d = 0; d < dim; d += WIDTH * LANES) {
        F32 sums[COUNT][WIDTH] = {};
        for (int at = 0; at < live; at++) {
            const float* value = scratch.values + size_t(at) * dim + d;
            const F32 low = load<F32>(value), high = load<F32>(value + LANES);
#pragma GCC unroll 8
            for (int q = 0; q < COUNT; q++) {
                const F32 weight = splat(weights[q][at]);
                sums[q][0] = fma(weight, low, sums[q][0]);
                sums[q][1] = fma(weight, high, sums[q][1]);
            }
        }
        for (int q = 0; q < COUNT; q++)
            for (int w = 0; w < WIDTH; w++) store(mixed + size_t(q) * dim + d + w * LANES, sums[q][w]);
    }
}

// One group of queries over what `widen` has read.
template <int COUNT>
void attend(const Scratch& scratch, int dim, int first, int end, const float* queries, const int32_t* last, Partial* partials,
            float* mixed) {
    alignas(64) float weights[COUNT][PART];
    const int steps = (end - first + LANES - 1) / LANES;
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int step = 0; step < steps; step++) {
        F32 found[COUNT];
        scores<COUNT>(scratch.keys + size_t(step) * LANES * dim, dim, queries, dim, found);
        for (int q = 0; q < COUNT; q++) {
            const U32 unseen = (U32)(lane + (first + step * LANES) > I32{} + last[q]);
            store(&weights[q][step * LANES], (F32)((unseen & 0xff800000u) | (~unseen & (U32)found[q])));
        }
    }
    for (int q = 0; q < COUNT; q++) {
        // Only the steps that this query itself sees count, so that its neighbours' reach changes nothing.
        const int own = last[q] < first ? 0 : (last[q] - first) / LANES + 1;
        const int seen = own < steps ? own : steps;
        F32 high = splat(-INFINITY), total = {};
        for (int step = 0; step < seen; step++) {
            const F32 found = load<F32>(&weights[q][step * LANES]);
            high = found > high ? found : high;
        }
        const float most = peak(high);
        for (int step = 0; step < steps; step++) {
            const F32 weight = step < seen ? exp(load<F32>(&weights[q][step * LANES]) - splat(most)) : F32{};
            store(&weights[q][step * LANES], weight);
            total += weight;
        }
        partials[q] = {most, sum(total)};
    }
    mixtures<COUNT>(scratch, dim, end - first, weights, mixed);
}

}  // namespace

void attend_part(Scratch& scratch, const Cache& cache, int layer, int kv_head, const int32_t* blocks, int first, int count,
                 const float* queries, const int32_t* last, Partial* partials, float* mixed) {
    const int dim = cache.head_dim;
    int newest = last[0];
    for (int q = 1; q < count; q++) newest = last[q] > newest ? last[q] : newest;
    const int end = newest + 1 < first + PART ? newest + 1 : first + PART;
    widen(scratch, cache, layer, kv_head, blocks, first, end);
    int q = 0;
    auto group = [&](auto rows) {
        constexpr int COUNT = decltype(rows)::value;
        for (; q + COUNT <= count; q += COUNT)
            attend<COUNT>(scratch, dim, first, end, queries + size_t(q) * dim, last + q, partials + q, mixed + size_t(q) * dim);
    };
    group(std::integral_constant<int, ROWS>{});
    group(std::integral_constant<int, 3>{});
    group(std::integral_constant<int, 1>{});
}

void join_parts(const Partial* partials, const float* mixed, int parts, int apart, int dim, float* out) {
    float most = partials[0].peak;
    for (int part = 1; part < parts; part++) {
        const float here = partials[size_t(part) * apart].peak;
        most = here > most ? here : most;
    }
    float total = 0.0f;
    for (int d = 0; d < dim; d++) out[d] = 0.0f;
    for (int part = 0; part < parts; part++) {
        const Partial& partial = partials[size_t(part) * apart];
        const float weight = exp(splat(partial.peak - most))[0];
        total += weight * partial.total;
        const float* row = mixed + size_t(part) * apart * dim;
        for (int d = 0; d < dim; d += LANES) store(out + d, fma(splat(weight), load<F32>(row + d), load<F32>(out + d)));
    }
    const F32 inverse = splat(1.0f / total);
    for (int d = 0; d < dim; d += LANES) store(out + d, load<F32>(out + d) * inverse);
}

}  // namespace rackserve
