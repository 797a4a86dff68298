#include "attention.h"

#include <algorithm>
#include <utility>

namespace rackserve {

namespace {

// Queries, steps of positions and vectors of a value row whose sums are kept in registers at once; no effect on any bit.
#if defined(__AVX512F__)
constexpr int COUNT = 6, ABREAST = 4, WIDTH = 4;
#else
constexpr int COUNT = 3, ABREAST = 1, WIDTH = 2;
#endif

constexpr int STEPS = PART / LANES;
static_assert(STEPS % ABREAST == 0, "a part is whole groups of steps");

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

// The two bf16 in each lane as floats.
inline F32 even(F32 pairs) { return (F32)((U32)pairs << 16); }
inline F32 odd(F32 pairs) { return (F32)((U32)pairs & 0xffff0000u); }

// Where the keys of up to PART positions lie; their values lie `apart` bytes further. Blocks lie far from each other in memory.
struct Rows {
    const uint8_t* keys[PART];
    int count = 0;
    size_t apart;

    Rows(const Head& head, int first) : apart(head.cache->kv_heads * head.cache->head_bytes()) {
        const int tokens = head.cache->block_tokens, bytes = head.cache->head_dim * head.cache->wide, live = std::min(PART, head.end - first);
        for (int block = first / tokens, inside = first % tokens; count < live; block++, inside = 0) {
            const uint8_t* row = head.cache->rows(head.blocks[block], head.layer, 0, head.kv_head) + size_t(inside) * bytes;
            for (int run = std::min(tokens - inside, live - count); run > 0; run--, row += bytes) keys[count++] = row;
        }
    }
};

const float NOTHING[MAX_HEAD] = {};

// Keys -> across: a vector of sixteen positions for each number of the head, or PAIRS: for two, as they lie in memory. What pads the
// last vector is zero, whatever memory holds there. Asks for the keys that come next, line by line.
template <bool PAIRS> void turn_keys(const Cache& cache, const Rows& rows, const Rows& next, float* across) {
    const int bytes = cache.head_dim * cache.wide;
    for (int first = 0; first < rows.count; first += LANES) {
        const uint8_t* keys[LANES];
        const uint8_t* later[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            keys[lane] = first + lane < rows.count ? rows.keys[first + lane] : reinterpret_cast<const uint8_t*>(NOTHING);
            later[lane] = first + lane < next.count ? next.keys[first + lane] : keys[lane];
        }
        for (int line = 0; line < bytes; line += 64) {
            F32 v[LANES];
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) v[lane] = load<F32>(keys[lane] + line), __builtin_prefetch(later[lane] + line);
            transpose(v);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) {
                if (PAIRS || cache.wide == 4) store(across, v[lane]), across += LANES;
                else store(across, even(v[lane])), store(across + LANES, odd(v[lane])), across += 2 * LANES;
            }
        }
    }
}

void widen_values(const Cache& cache, const Rows& rows, const Rows& next, float* to) {
    const int bytes = cache.head_dim * cache.wide;
    for (int at = 0; at < rows.count; at++) {
        const uint8_t* row = rows.keys[at] + rows.apart;
        const uint8_t* later = (at < next.count ? next.keys[at] : rows.keys[at]) + rows.apart;
        for (int line = 0; line < bytes; line += 64) {
            const F32 v = load<F32>(row + line);
            __builtin_prefetch(later + line);
            if (cache.wide == 2) store(to, even(v)), store(to + LANES, odd(v)), to += 2 * LANES;
            else store(to, v), to += LANES;
        }
    }
}

// Products of `QUERIES` queries with ABREAST steps of keys -> weights[query][step].
template <int QUERIES> void scores(const float* across, int dim, const float* queries, float (*weights)[PART], int step) {
    F32 sums[QUERIES][ABREAST] = {};
    for (int d = 0; d < dim; d++) {
        F32 keys[ABREAST];
#pragma GCC unroll 4
        for (int s = 0; s < ABREAST; s++) keys[s] = load<F32>(across + (size_t(step + s) * dim + d) * LANES);
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const F32 query = splat(queries[size_t(q) * dim + d]);
#pragma GCC unroll 4
            for (int s = 0; s < ABREAST; s++) sums[q][s] = fma(keys[s], query, sums[q][s]);
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int s = 0; s < ABREAST; s++) store(&weights[q][(step + s) * LANES], sums[q][s]);
}

// The same over pairs.
template <int QUERIES> void pair_scores(const float* across, int dim, const float* queries, float (*weights)[PART], int step) {
    F32 sums[QUERIES][ABREAST] = {};
    for (int d = 0; d < dim; d += 2) {
        F32 low[ABREAST], high[ABREAST];
#pragma GCC unroll 4
        for (int s = 0; s < ABREAST; s++) {
            const F32 pairs = load<F32>(across + (size_t(step + s) * dim + d) / 2 * LANES);
            low[s] = even(pairs), high[s] = odd(pairs);
        }
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const F32 first = splat(queries[size_t(q) * dim + d]), second = splat(queries[size_t(q) * dim + d + 1]);
#pragma GCC unroll 4
            for (int s = 0; s < ABREAST; s++) sums[q][s] = fma(high[s], second, fma(low[s], first, sums[q][s]));
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int s = 0; s < ABREAST; s++) store(&weights[q][(step + s) * LANES], sums[q][s]);
}

// Sums of `live` values by weight -> mixed, VECTORS vectors of each. values(at): vector v of value `at` is its part v.
template <int QUERIES, int VECTORS, class Value> inline void mix(Value values, int dim, int live, const float (*weights)[PART], float* mixed) {
    F32 sums[QUERIES][VECTORS] = {};
    for (int at = 0; at < live; at++) {
        F32 value[VECTORS];
        values(at, value);
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const F32 weight = splat(weights[q][at]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[q][v] = fma(weight, value[v], sums[q][v]);
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) store(mixed + size_t(q) * dim + v * LANES, sums[q][v]);
}

template <int QUERIES, int VECTORS> void mix_floats(const float* values, int dim, int live, const float (*weights)[PART], float* mixed) {
    const auto read = [&](int at, F32* value) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) value[v] = load<F32>(values + size_t(at) * dim + v * LANES);
    };
    mix<QUERIES, VECTORS>(read, dim, live, weights, mixed);
}

// Values as bf16 in their blocks, from vector d / LANES on; asks for those that come next.
template <int QUERIES, int VECTORS>
void mix_pairs(const Rows& rows, const Rows& next, int d, int dim, const float (*weights)[PART], float* mixed) {
    const auto read = [&](int at, F32* value) {
        const uint8_t* row = rows.keys[at] + rows.apart + 2 * d;
        const uint8_t* later = (at < next.count ? next.keys[at] : rows.keys[at]) + rows.apart + 2 * d;
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v += 2) {
            const F32 pairs = load<F32>(row + 32 * v);
            __builtin_prefetch(later + 32 * v);
            value[v] = even(pairs), value[v + 1] = odd(pairs);
        }
    };
    mix<QUERIES, VECTORS>(read, dim, rows.count, weights, mixed);
}

// Scores of a part -> weights, 0 for positions the query does not see.
Partial soften(float* weights, int first, int last) {
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32 found[STEPS], high = splat(-INFINITY), total = {};
    for (int step = 0; step < STEPS; step++) {
        found[step] = load<F32>(weights + step * LANES);
        if (last < first + PART - 1) {
            const U32 unseen = (U32)(lane + (first + step * LANES) > I32{} + last);
            found[step] = (F32)((unseen & 0xff800000u) | (~unseen & (U32)found[step]));
        }
        high = found[step] > high ? found[step] : high;
    }
    const float most = peak(high);
    for (int step = 0; step < STEPS; step++) {
        const F32 weight = exp(found[step] - splat(most));
        store(weights + step * LANES, weight);
        total += weight;
    }
    return {most, sum(total)};
}

template <int QUERIES> void soften_all(const Queries& queries, int first, int at, float (*weights)[PART], Partial* partials) {
    for (int q = 0; q < QUERIES; q++) partials[at + q] = soften(weights[q], first, queries.last[at + q]);
}

// Queries [at, at + QUERIES) over widened keys and values.
template <int QUERIES> void attend(Scratch& scratch, int dim, int first, int live, int at, Partial* partials, float* mixed) {
    alignas(64) float weights[QUERIES][PART];
    for (int step = 0; step * LANES < live; step += ABREAST) scores<QUERIES>(scratch.keys, dim, scratch.queries.rows + size_t(at) * dim, weights, step);
    soften_all<QUERIES>(scratch.queries, first, at, weights, partials);
    float* to = mixed + size_t(at) * dim;
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES) mix_floats<QUERIES, WIDTH>(scratch.values + d, dim, live, weights, to + d);
    for (; d < dim; d += 2 * LANES) mix_floats<QUERIES, 2>(scratch.values + d, dim, live, weights, to + d);
}

// All queries, which are QUERIES, over keys and values that are bf16 and worth no widening.
template <int QUERIES> void attend_few(Scratch& scratch, const Cache& cache, const Rows& rows, const Rows& next, int first, Partial* partials, float* mixed) {
    alignas(64) float weights[QUERIES][PART];
    const int dim = cache.head_dim;
    turn_keys<true>(cache, rows, next, scratch.keys);
    for (int step = 0; step * LANES < rows.count; step += ABREAST) pair_scores<QUERIES>(scratch.keys, dim, scratch.queries.rows, weights, step);
    soften_all<QUERIES>(scratch.queries, first, 0, weights, partials);
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES) mix_pairs<QUERIES, WIDTH>(rows, next, d, dim, weights, mixed + d);
    for (; d < dim; d += 2 * LANES) mix_pairs<QUERIES, 2>(rows, next, d, dim, weights, mixed + d);
}

template <int... LESS>
void attend_part(Scratch& scratch, const Cache& cache, const Rows& rows, const Rows& next, int first, Partial* partials, float* mixed,
                 std::integer_sequence<int, LESS...>) {
    constexpr void (*few[])(Scratch&, const Cache&, const Rows&, const Rows&, int, Partial*, float*) = {attend_few<LESS + 1>...};
    constexpr void (*some[])(Scratch&, int, int, int, int, Partial*, float*) = {attend<LESS + 1>...};
    const int count = scratch.queries.count;
    if (count <= COUNT && cache.wide == 2) {
        few[count - 1](scratch, cache, rows, next, first, partials, mixed);
        return;
    }
    turn_keys<false>(cache, rows, next, scratch.keys);
    widen_values(cache, rows, next, scratch.values);
    for (int at = 0; at < count; at += COUNT)
        some[std::min(COUNT, count - at) - 1](scratch, cache.head_dim, first, rows.count, at, partials, mixed);
}

}  // namespace

void attend_parts(Scratch& scratch, const Head& head, int part, int end, Partial* partials, float* mixed) {
    const int dim = head.cache->head_dim, count = scratch.queries.count;
    Rows rows(head, part * PART);
    for (; part < end; part++) {
        const Rows next(head, (part + 1) * PART);
        Partial* found = partials ? partials : scratch.partials;
        float* sums = partials ? mixed : scratch.mixed;
        attend_part(scratch, *head.cache, rows, next, part * PART, found, sums, std::make_integer_sequence<int, COUNT>{});
        if (partials) partials += count, mixed += size_t(count) * dim;
        else join_part(scratch.joined, scratch.queries, part, dim, found, sums);
        rows = next;
    }
}

void begin_join(Joined& joined, int count, int dim) {
    std::fill(joined.peaks, joined.peaks + TILE, -INFINITY);
    std::fill(joined.totals, joined.totals + TILE, 0.0f);
    std::fill(joined.mixed, joined.mixed + size_t(count) * dim, 0.0f);
}

void join_part(Joined& joined, const Queries& queries, int part, int dim, const Partial* partials, const float* mixed) {
    for (int at = 0; at < queries.count; at += LANES) {
        const int end = std::min(at + LANES, queries.count);
        F32 before = load<F32>(joined.peaks + at), here = splat(-INFINITY);
        for (int q = at; q < end; q++)
            if (queries.last[q] >= part * PART) here[q - at] = partials[q].peak;
        const F32 most = here > before ? here : before, kept = exp(before - most), added = exp(here - most);
        for (int q = at; q < end; q++) {
            if (queries.last[q] < part * PART) continue;
            joined.peaks[q] = most[q - at];
            joined.totals[q] = joined.totals[q] * kept[q - at] + partials[q].total * added[q - at];
            const F32 keep = splat(kept[q - at]), add = splat(added[q - at]);
            float* to = joined.mixed + size_t(q) * dim;
            const float* from = mixed + size_t(q) * dim;
            for (int d = 0; d < dim; d += LANES) store(to + d, fma(add, load<F32>(from + d), keep * load<F32>(to + d)));
        }
    }
}

void end_join(const Joined& joined, int query, const Cache& cache, float* out) {
    const int dim = cache.head_dim;
    const F32 inverse = splat(1.0f / joined.totals[query]);
    const float* from = joined.mixed + size_t(query) * dim;
    for (int d = 0; d < dim; d += 2 * LANES) {
        const F32 low = load<F32>(from + d) * inverse, high = load<F32>(from + d + LANES) * inverse;
        if (cache.wide == 2) {
            // Even numbers lie before the odd ones.
            store(out + d, F32(__builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)));
            store(out + d + LANES, F32(__builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)));
        } else {
            store(out + d, low);
            store(out + d + LANES, high);
        }
    }
}

}  // namespace rackserve
