#include "attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kv_parts.h"

namespace rackserve {

namespace {

// Queries, steps of positions and vectors of a value row whose sums are kept in registers at once; no effect on any bit.
#if defined(__AVX512F__)
constexpr int COUNT = 6, ABREAST = 4, WIDTH = 4;
#else
constexpr int COUNT = 3, ABREAST = 1, WIDTH = 2;
#endif

static_assert(PART % (ABREAST * LANES) == 0, "a part is whole groups of steps");

// Products of QUERIES queries with STEPS steps of keys -> weights[query][step]: powers of 2.
template <int QUERIES, int STEPS>
void scores(const FloatPart& part, const Queries& queries, int at, int dim, float (*weights)[PART], int step, Ahead& asking) {
    F32 sums[QUERIES][STEPS] = {};
    const size_t apart = size_t(dim) * LANES;
    const float *keys = part.keys + step * apart, *rows = queries.rows + size_t(at) * dim;
    Ahead ahead = asking;
    for (int d = 0; d < dim; d++, keys += LANES) {
        ahead.ask(1);
        F32 key[STEPS];
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++) key[s] = load<F32>(keys + s * apart);
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const F32 query = splat(rows[size_t(q) * dim + d]);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) sums[q][s] = fma(key[s], query, sums[q][s]);
        }
    }
    asking = ahead;
    for (int q = 0; q < QUERIES; q++)
        for (int s = 0; s < STEPS; s++) store(&weights[q][(step + s) * LANES], sums[q][s]);
}

inline int32_t two_of(const int16_t* words) {
    int32_t pair;
    std::memcpy(&pair, words, sizeof pair);
    return pair;
}

// The same in whole numbers. The exponents of values are taken in: weights are shares of what is mixed.
template <int QUERIES, int STEPS>
void scores(const WholePart& part, const Queries& queries, int at, int dim, float (*weights)[PART], int step, Ahead& asking) {
    I32 sums[QUERIES][STEPS] = {};
    const size_t apart = size_t(dim) / 2 * LANES;
    const int32_t* keys = part.keys + step * apart;
    const int16_t* rows = queries.whole + size_t(at) * dim;
    Ahead ahead = asking;
    for (int d = 0; d < dim; d += 2, keys += LANES) {
        ahead.ask(1);
        I32 key[STEPS];
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++) key[s] = load<I32>(keys + s * apart);
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const I32 query = I32{} + two_of(rows + size_t(q) * dim + d);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) sums[q][s] = dot(sums[q][s], key[s], query);
        }
    }
    asking = ahead;
    for (int s = 0; s < STEPS; s++) {
        const F32 unit = load<F32>(part.units + (step + s) * LANES), exponent = load<F32>(part.exponents + (step + s) * LANES);
        for (int q = 0; q < QUERIES; q++)
            store(&weights[q][(step + s) * LANES], fma(to_float(sums[q][s]) * splat(queries.units[at + q]), unit, exponent));
    }
}

// Products with the first `steps` steps; a few more may be written.
template <int QUERIES, class Part>
void all_scores(const Part& part, const Queries& queries, int at, int dim, float (*weights)[PART], int steps, Ahead& ahead) {
    for (int step = 0; step < steps;) {
        const int left = steps - step;
        if (ABREAST == 4 && left > 2) scores<QUERIES, ABREAST>(part, queries, at, dim, weights, step, ahead), step += ABREAST;
        else if (ABREAST == 4 && left == 2) scores<QUERIES, 2>(part, queries, at, dim, weights, step, ahead), step += 2;
        else scores<QUERIES, 1>(part, queries, at, dim, weights, step, ahead), step++;
    }
}

// Of up to COUNT queries and a part.
struct Weights {
    alignas(64) float scores[COUNT][PART];
    alignas(64) int16_t whole[COUNT][PART];
};

// Where sums of values go: as they are, or onto those of the parts before, by two factors for each query.
struct Sink {
    float* mixed;
    bool joins;
    alignas(64) float keep[LANES], add[LANES];
};

template <int QUERIES, int VECTORS> inline void hand_over(const F32 (&sums)[QUERIES][VECTORS], int dim, int d, const Sink& sink) {
    for (int q = 0; q < QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) {
            float* to = sink.mixed + size_t(q) * dim + d + v * LANES;
            store(to, sink.joins ? fma(splat(sink.add[q]), sums[q][v], splat(sink.keep[q]) * load<F32>(to)) : sums[q][v]);
        }
}

// Positions from the first of a part on that a group of queries sees, the last first: `all` of them sees each, `count` one at least.
struct Seen {
    int count, all;
    const int32_t* last;  // of each query, less the part's first
};

// Sums of values by weight -> sink, VECTORS vectors of each from d on. A value that a query does not see has no part in its sum: what is
// not finite would, times a weight of 0.
template <int QUERIES, int VECTORS>
void mix(const FloatPart& part, int dim, int d, const Seen& seen, const Weights& weights, const Sink& sink, Ahead& asking) {
    F32 sums[QUERIES][VECTORS] = {};
    const float* values = part.values + d;
    Ahead ahead = asking;
    int at = 0;
    for (; at < seen.all; at++, values += dim) {
        ahead.ask(1);
        F32 value[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) value[v] = load<F32>(values + v * LANES);
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const F32 weight = splat(weights.scores[q][at]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[q][v] = fma(weight, value[v], sums[q][v]);
        }
    }
    for (; at < seen.count; at++, values += dim)
        for (int q = 0; q < QUERIES; q++)
            for (int v = 0; seen.last[q] >= at && v < VECTORS; v++)
                sums[q][v] = fma(splat(weights.scores[q][at]), load<F32>(values + v * LANES), sums[q][v]);
    asking = ahead;
    hand_over(sums, dim, d, sink);
}

// The same in whole numbers; the weight behind an odd count is 0.
template <int QUERIES, int VECTORS>
void mix(const WholePart& part, int dim, int d, const Seen& seen, const Weights& weights, const Sink& sink, Ahead& asking) {
    I32 whole[QUERIES][VECTORS] = {};
    const int32_t* values = part.values + d;
    Ahead ahead = asking;
    for (int at = 0; at < seen.count; at += 2, values += dim) {
        ahead.ask(1);
        I32 value[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) value[v] = load<I32>(values + v * LANES);
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const I32 weight = I32{} + two_of(&weights.whole[q][at]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) whole[q][v] = dot(whole[q][v], value[v], weight);
        }
    }
    F32 sums[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) sums[q][v] = to_float(whole[q][v]) * splat(1.0f / (WEIGHT * (1 << VALUE_BITS)));
    asking = ahead;
    hand_over(sums, dim, d, sink);
}

template <int QUERIES, class Part>
void mix_all(const Part& part, int dim, const Seen& seen, const Weights& weights, const Sink& sink, Ahead& ahead) {
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES) mix<QUERIES, WIDTH>(part, dim, d, seen, weights, sink, ahead);
    for (; d < dim; d += 2 * LANES) mix<QUERIES, 2>(part, dim, d, seen, weights, sink, ahead);
}

// What scores become: weights as floats, or as whole numbers of which WEIGHT is the largest. Returns what adds to the total.
inline F32 weigh(const FloatPart&, Weights& weights, int q, int step, F32 weight, F32 total) {
    store(&weights.scores[q][step * LANES], weight);
    return total + weight;
}

inline F32 weigh(const WholePart& part, Weights& weights, int q, int step, F32 weight, F32 total) {
    store(&weights.whole[q][step * LANES], low_words((I32)fma(weight, splat(WEIGHT), splat(MAGIC))));
    return fma(weight, load<F32>(part.inverses + step * LANES), total);
}

// Scores of the first `steps` steps of a part -> weights, 0 for positions a query does not see. Lane q of peaks and totals is query q's.
template <int QUERIES, class Part>
void soften(const Part& part, Weights& weights, int steps, int first, const int32_t* last, F32& peaks, F32& totals) {
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32 most[QUERIES], sums[QUERIES];
    for (int q = 0; q < QUERIES; q++) {
        most[q] = splat(-INFINITY);
        for (int step = 0; step < steps; step++) {
            float* at = &weights.scores[q][step * LANES];
            F32 found = load<F32>(at);
            const int behind = first + step * LANES;
            if (last[q] < behind + LANES - 1) {
                const U32 unseen = (U32)(lane + behind > I32{} + last[q]);
                found = (F32)((unseen & 0xff800000u) | (~unseen & (U32)found));
                store(at, found);
            }
            most[q] = larger(found, most[q]);
        }
    }
    peaks = join_lanes<QUERIES>(most, [](auto a, auto b) { return larger(a, b); });
    alignas(64) float bounds[LANES];
    store(bounds, larger(peaks, splat(-3e38f)));  // where a query sees nothing, its weights are 0
    for (int q = 0; q < QUERIES; q++) {
        sums[q] = F32{};
        for (int step = 0; step < steps; step++) {
            const F32 weight = exp2(load<F32>(&weights.scores[q][step * LANES]) - splat(bounds[q]));
            sums[q] = weigh(part, weights, q, step, weight, sums[q]);
        }
    }
    totals = join_lanes<QUERIES>(sums, [](auto a, auto b) { return a + b; });
}

// Takes a part of `count` queries from `at` on in; their sums follow by the factors that this leaves.
void join_totals(Joined& joined, int at, int count, F32 peaks, F32 totals, Sink& sink) {
    const F32 before = load<F32>(joined.peaks + at), most = larger(peaks, before), kept = exp2(before - most), added = exp2(peaks - most);
    const F32 both = load<F32>(joined.totals + at) * kept + totals * added;
    store(sink.keep, kept);
    store(sink.add, added);
    for (int q = 0; q < count; q++) joined.peaks[at + q] = most[q], joined.totals[at + q] = both[q];
}

// Queries [at, at + QUERIES) over `count` positions from `first` on, which lie in the scratch.
template <int QUERIES, class Part>
void attend(Scratch& scratch, const Part& part, int first, int count, int dim, int at, Partial* partials, float* mixed, Ahead& ahead) {
    count = std::min(count, scratch.queries.last[at + QUERIES - 1] + 1 - first);
    if (count <= 0) return;
    Weights weights;
    const int steps = (count + LANES - 1) / LANES;
    all_scores<QUERIES>(part, scratch.queries, at, dim, weights.scores, steps, ahead);
    F32 peaks, totals;
    soften<QUERIES>(part, weights, steps, first, scratch.queries.last + at, peaks, totals);
    Sink sink;
    sink.joins = !partials;
    sink.mixed = (partials ? mixed : scratch.joined.mixed) + size_t(at) * dim;
    if (partials) for (int q = 0; q < QUERIES; q++) partials[at + q] = {peaks[q], totals[q]};
    else join_totals(scratch.joined, at, QUERIES, peaks, totals, sink);
    int32_t last[QUERIES];
    for (int q = 0; q < QUERIES; q++) last[q] = scratch.queries.last[at + q] - first;
    mix_all<QUERIES>(part, dim, Seen{count, std::clamp(last[0] + 1, 0, count), last}, weights, sink, ahead);
}

template <class Part, int... LESS>
void attend_part(Scratch& scratch, const Part& part, int first, int count, int dim, Partial* partials, float* mixed, Ahead& ahead,
                 std::integer_sequence<int, LESS...>) {
    constexpr void (*some[])(Scratch&, const Part&, int, int, int, int, Partial*, float*, Ahead&) = {attend<LESS + 1, Part>...};
    const int queries = scratch.queries.count;
    for (int at = 0; at < queries; at += COUNT) some[std::min(COUNT, queries - at) - 1](scratch, part, first, count, dim, at, partials, mixed, ahead);
}

}  // namespace

void attend_parts(Scratch& scratch, const Work& work, int end, Partial* partials, float* mixed) {
    constexpr auto counts = std::make_integer_sequence<int, COUNT>{};
    const Cache& cache = *work.head.cache;
    const int queries = scratch.queries.count, dim = cache.head_dim;
    if (cache.wide == 2) round_queries(scratch.queries, dim);
    Rows rows(work.head, work.part * PART);
    for (int part = work.part; part < end; part++) {
        const Rows next = part + 1 < end ? Rows(work.head, (part + 1) * PART) : Rows(work.after, work.after_part * PART);
        Ahead ahead(next, dim * cache.wide);
        lay_out(scratch, cache, rows, ahead);
        if (cache.wide == 2) attend_part(scratch, scratch.whole, part * PART, rows.count, dim, partials, mixed, ahead, counts);
        else attend_part(scratch, scratch.floats, part * PART, rows.count, dim, partials, mixed, ahead, counts);
        ahead.ask(2 * PART * MAX_HEAD);  // what is left, which these are more than
        if (partials) partials += queries, mixed += size_t(queries) * dim;
        rows = next;
    }
}

void begin_join(Joined& joined, int count, int dim) {
    std::fill(joined.peaks, joined.peaks + TILE + LANES, -INFINITY);
    std::fill(joined.totals, joined.totals + TILE + LANES, 0.0f);
    std::fill(joined.mixed, joined.mixed + size_t(count) * dim, 0.0f);
}

void join_part(Joined& joined, const Queries& queries, int part, int dim, const Partial* partials, const float* mixed) {
    for (int at = 0; at < queries.count; at += LANES) {
        const int end = std::min(at + LANES, queries.count);
        F32 before = load<F32>(joined.peaks + at), here = splat(-INFINITY);
        for (int q = at; q < end; q++)
            if (queries.last[q] >= part * PART) here[q - at] = partials[q].peak;
        const F32 most = larger(here, before), kept = exp2(before - most), added = exp2(here - most);
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
