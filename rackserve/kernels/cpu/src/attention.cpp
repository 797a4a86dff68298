#include "attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rackserve {

namespace {

// Queries, steps of positions and vectors of a value row whose sums are kept in registers at once; no effect on any bit.
#if defined(__AVX512F__)
constexpr int COUNT = 6, ABREAST = 4, WIDTH = 4;
#else
constexpr int COUNT = 3, ABREAST = 1, WIDTH = 2;
#endif

static_assert(PART % (ABREAST * LANES) == 0, "a part is whole groups of steps");

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

// The two bf16 in each lane as floats.
inline F32 even(F32 pairs) { return (F32)((U32)pairs << 16); }
inline F32 odd(F32 pairs) { return (F32)((U32)pairs & 0xffff0000u); }

// Where the keys of up to PART positions lie, and behind those their values. Blocks lie far from each other in memory.
struct Rows {
    const uint8_t* at[2 * PART];
    int count = 0;

    Rows(const Head& head, int first) {
        const int tokens = head.cache->block_tokens, bytes = head.cache->head_dim * head.cache->wide, live = std::min(PART, head.end - first);
        for (int block = first / tokens, inside = first % tokens; count < live; block++, inside = 0) {
            const uint8_t* row = head.cache->rows(head.blocks[block], head.layer, 0, head.kv_head) + size_t(inside) * bytes;
            for (int run = std::min(tokens - inside, live - count); run > 0; run--, row += bytes) at[count++] = row;
        }
        const size_t apart = head.cache->kv_heads * head.cache->head_bytes();
        for (int row = 0; row < count; row++) at[count + row] = at[row] + apart;
    }
};

// Asks for the memory of a part, line by line: a few lines now and then, since only so many can be on their way. Loops ask through a
// copy of their own, which stays in registers, and leave it behind.
class Ahead {
  public:
    Ahead(const Rows& rows, int bytes) : row_(rows.at), end_(rows.at + 2 * rows.count), bytes_(bytes) {}

    void ask(int lines) {
        for (; lines > 0 && row_ != end_; lines--) {
            __builtin_prefetch(*row_ + line_, 0, 2);
            line_ += 64;
            if (line_ == bytes_) line_ = 0, row_++;
        }
    }

  private:
    const uint8_t *const *row_, *const *end_;
    int bytes_, line_ = 0;
};

// Keys -> across: a vector of sixteen positions for each number of the head, or PAIRS: for two, as they lie in memory. What pads the
// last vector is zero, whatever memory holds there.
template <bool PAIRS> void turn_keys(const Cache& cache, const Rows& rows, Ahead& asking, float* across) {
    Ahead ahead = asking;
    const int bytes = cache.head_dim * cache.wide;
    for (int first = 0; first < rows.count; first += LANES) {
        const int live = std::min(LANES, rows.count - first);
        const uint8_t* const* keys = rows.at + first;
        const bool run = live == LANES && keys[LANES - 1] - keys[0] == ptrdiff_t(LANES - 1) * bytes;
        for (int line = 0; line < bytes; line += 64) {
            F32 v[LANES];
            if (run) turn_lines(keys[0] + line, bytes, v);
            else {
                alignas(64) uint8_t copy[LANES * 64] = {};
                for (int lane = 0; lane < live; lane++) std::memcpy(copy + lane * 64, keys[lane] + line, 64);
                turn_lines(copy, 64, v);
            }
            ahead.ask(PAIRS ? LANES / 2 : LANES);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) {
                if (PAIRS || cache.wide == 4) store(across, v[lane]), across += LANES;
                else store(across, even(v[lane])), store(across + LANES, odd(v[lane])), across += 2 * LANES;
            }
        }
    }
    asking = ahead;
}

void widen_values(const Cache& cache, const Rows& rows, Ahead& asking, float* to) {
    Ahead ahead = asking;
    const int bytes = cache.head_dim * cache.wide;
    for (int at = 0; at < rows.count; at++) {
        const uint8_t* row = rows.at[rows.count + at];
        ahead.ask(bytes / 64);
        for (int line = 0; line < bytes; line += 64) {
            const F32 v = load<F32>(row + line);
            if (cache.wide == 2) store(to, even(v)), store(to + LANES, odd(v)), to += 2 * LANES;
            else store(to, v), to += LANES;
        }
    }
    asking = ahead;
}

// A part of the positions as it lies in memory, and what comes next.
struct Part {
    const Cache& cache;
    const Rows& rows;
    Ahead& ahead;
    int first;
};

// Products of QUERIES queries with STEPS steps of keys -> weights[query][step]. PAIRS: as turn_keys has them.
template <int QUERIES, int STEPS, bool PAIRS>
void scores(const float* across, int dim, const float* queries, float (*weights)[PART], int step, Ahead& asking) {
    F32 sums[QUERIES][STEPS] = {};
    Ahead ahead = asking;
    const size_t apart = size_t(dim) / (PAIRS ? 2 : 1) * LANES;
    const float* keys = across + step * apart;
    for (int d = 0; d < dim; d += PAIRS ? 2 : 1, keys += LANES) {
        F32 low[STEPS], high[STEPS];
        if (PAIRS) ahead.ask(2);
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++) {
            low[s] = load<F32>(keys + s * apart);
            if (PAIRS) high[s] = odd(low[s]), low[s] = even(low[s]);
        }
#pragma GCC unroll 6
        for (int q = 0; q < QUERIES; q++) {
            const F32 query = splat(queries[size_t(q) * dim + d]);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) sums[q][s] = fma(low[s], query, sums[q][s]);
            if (!PAIRS) continue;
            const F32 second = splat(queries[size_t(q) * dim + d + 1]);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) sums[q][s] = fma(high[s], second, sums[q][s]);
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int s = 0; s < STEPS; s++) store(&weights[q][(step + s) * LANES], sums[q][s]);
    asking = ahead;
}

// Products with the first `steps` steps; a few more may be written.
template <int QUERIES, bool PAIRS>
void all_scores(const float* across, int dim, const float* queries, float (*weights)[PART], int steps, Ahead& ahead) {
    for (int step = 0; step < steps;) {
        const int left = steps - step;
        if (ABREAST == 4 && left > 2) scores<QUERIES, ABREAST, PAIRS>(across, dim, queries, weights, step, ahead), step += ABREAST;
        else if (ABREAST == 4 && left == 2) scores<QUERIES, 2, PAIRS>(across, dim, queries, weights, step, ahead), step += 2;
        else scores<QUERIES, 1, PAIRS>(across, dim, queries, weights, step, ahead), step++;
    }
}

// Where sums of values go: as they are, or onto those of the parts before, by two factors for each query.
struct Sink {
    float* mixed;
    bool joins;
    alignas(64) float keep[LANES], add[LANES];
};

// Sums of `count` values by weight -> sink, VECTORS vectors of each from d on. values(at): vector v of value `at` is its part v.
template <int QUERIES, int VECTORS, class Value> inline void mix(Value values, int dim, int d, int count, const float (*weights)[PART], const Sink& sink) {
    F32 sums[QUERIES][VECTORS] = {};
    for (int at = 0; at < count; at++) {
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
        for (int v = 0; v < VECTORS; v++) {
            float* to = sink.mixed + size_t(q) * dim + d + v * LANES;
            store(to, sink.joins ? fma(splat(sink.add[q]), sums[q][v], splat(sink.keep[q]) * load<F32>(to)) : sums[q][v]);
        }
}

// Values as bf16 in their blocks, or widened in the scratch.
template <int QUERIES, int VECTORS, bool FEW>
void mix_at(const Scratch& scratch, const Part& part, int d, int count, const float (*weights)[PART], const Sink& sink) {
    const int dim = part.cache.head_dim;
    Ahead ahead = part.ahead;
    const auto read = [&](int at, F32* value) {
        if (FEW) {
            const uint8_t* row = part.rows.at[part.rows.count + at] + 2 * d;
            ahead.ask(VECTORS / 2);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v += 2) {
                const F32 pairs = load<F32>(row + 32 * v);
                value[v] = even(pairs), value[v + 1] = odd(pairs);
            }
        } else {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) value[v] = load<F32>(scratch.values + size_t(at) * dim + d + v * LANES);
        }
    };
    mix<QUERIES, VECTORS>(read, dim, d, count, weights, sink);
    part.ahead = ahead;
}

// Scores of the first `steps` steps of a part -> weights, 0 for positions a query does not see. Lane q of peaks and totals is query q's.
template <int QUERIES> void soften(float (*weights)[PART], int steps, int first, const int32_t* last, F32& peaks, F32& totals) {
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32 most[QUERIES], sums[QUERIES];
    for (int q = 0; q < QUERIES; q++) {
        most[q] = splat(-INFINITY);
        for (int step = 0; step < steps; step++) {
            F32 found = load<F32>(&weights[q][step * LANES]);
            const int behind = first + step * LANES;
            if (last[q] < behind + LANES - 1) {
                const U32 unseen = (U32)(lane + behind > I32{} + last[q]);
                found = (F32)((unseen & 0xff800000u) | (~unseen & (U32)found));
                store(&weights[q][step * LANES], found);
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
            const F32 weight = exp2(load<F32>(&weights[q][step * LANES]) - splat(bounds[q]));
            store(&weights[q][step * LANES], weight);
            sums[q] += weight;
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

// Queries [at, at + QUERIES) over a part whose keys lie in the scratch; values too, or FEW: as they lie in their blocks.
template <int QUERIES, bool FEW> void attend(Scratch& scratch, const Part& part, int at, Partial* partials, float* mixed) {
    alignas(64) float weights[QUERIES][PART];
    const int dim = part.cache.head_dim, count = std::min(part.rows.count, scratch.queries.last[at + QUERIES - 1] + 1 - part.first);
    if (count <= 0) return;
    const int steps = (count + LANES - 1) / LANES;
    all_scores<QUERIES, FEW>(scratch.keys, dim, scratch.queries.rows + size_t(at) * dim, weights, steps, part.ahead);
    F32 peaks, totals;
    soften<QUERIES>(weights, steps, part.first, scratch.queries.last + at, peaks, totals);
    Sink sink;
    sink.joins = !partials;
    sink.mixed = (partials ? mixed : scratch.joined.mixed) + size_t(at) * dim;
    if (partials) for (int q = 0; q < QUERIES; q++) partials[at + q] = {peaks[q], totals[q]};
    else join_totals(scratch.joined, at, QUERIES, peaks, totals, sink);
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES) mix_at<QUERIES, WIDTH, FEW>(scratch, part, d, count, weights, sink);
    for (; d < dim; d += 2 * LANES) mix_at<QUERIES, 2, FEW>(scratch, part, d, count, weights, sink);
}

template <int... LESS>
void attend_part(Scratch& scratch, const Part& part, Partial* partials, float* mixed, std::integer_sequence<int, LESS...>) {
    constexpr void (*few[])(Scratch&, const Part&, int, Partial*, float*) = {attend<LESS + 1, true>...};
    constexpr void (*some[])(Scratch&, const Part&, int, Partial*, float*) = {attend<LESS + 1, false>...};
    const int count = scratch.queries.count;
    if (count <= COUNT && part.cache.wide == 2) {
        turn_keys<true>(part.cache, part.rows, part.ahead, scratch.keys);
        few[count - 1](scratch, part, 0, partials, mixed);
    } else {
        turn_keys<false>(part.cache, part.rows, part.ahead, scratch.keys);
        widen_values(part.cache, part.rows, part.ahead, scratch.values);
        for (int at = 0; at < count; at += COUNT) some[std::min(COUNT, count - at) - 1](scratch, part, at, partials, mixed);
    }
    part.ahead.ask(2 * PART * MAX_HEAD);  // what is left, which these are more than
}

}  // namespace

void attend_parts(Scratch& scratch, const Work& work, int end, Partial* partials, float* mixed) {
    const Cache& cache = *work.head.cache;
    const int count = scratch.queries.count;
    Rows rows(work.head, work.part * PART);
    for (int part = work.part; part < end; part++) {
        const Rows next = part + 1 < end ? Rows(work.head, (part + 1) * PART) : Rows(work.after, work.after_part * PART);
        Ahead ahead(next, cache.head_dim * cache.wide);
        attend_part(scratch, {cache, rows, ahead, part * PART}, partials, mixed, std::make_integer_sequence<int, COUNT>{});
        if (partials) partials += count, mixed += size_t(count) * cache.head_dim;
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
