#include "v41_attend.h"

#include <algorithm>
#include <limits>

namespace rackserve::v41 {

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int AT_ONCE = 8;  // rows or heads whose sums are kept in registers; no effect on any bit

inline F32 larger(F32 a, F32 b) { return a > b ? a : b; }

// Scores of COUNT slots from `slot` on for 16 heads.
template <int COUNT> void dots(const float* const* rows, const float* across, int dim, int wide, float scale, float* out) {
    F32 sums[COUNT] = {};
    for (int d = 0; d < dim; d++) {
        const F32 query = load<F32>(across + size_t(d) * wide);
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) sums[i] = fma(query, splat(rows[i][d]), sums[i]);
    }
    for (int i = 0; i < COUNT; i++) store(out + size_t(i) * wide, sums[i] * splat(scale));
}

// Softmax over slots, for 16 heads; what is summed is summed as if slots were lanes, the sink's first.
void shares_of(const float* const* rows, int count, F32 sink, int wide, float* shares) {
    F32 most = sink;
    for (int slot = 0; slot < count; slot++)
        if (rows[slot]) most = larger(most, load<F32>(shares + size_t(slot) * wide));
    F32 lanes[LANES] = {};
    lanes[0] = power(sink - most);
    for (int slot = 0; slot < count; slot++) {
        if (!rows[slot]) continue;
        float* at = shares + size_t(slot) * wide;
        const F32 e = power(load<F32>(at) - most);
        store(at, e);
        lanes[(slot + 1) % LANES] += e;
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    const F32 inverse = splat(1.0f) / lanes[0];
    for (int slot = 0; slot < count; slot++) {
        float* at = shares + size_t(slot) * wide;
        if (rows[slot]) store(at, load<F32>(at) * inverse);
    }
}

template <int HEADS, int VECTORS>
void mixtures(const float* const* rows, int count, const float* shares, int wide, int dim, int first, float* out) {
    F32 sums[HEADS][VECTORS] = {};
    for (int slot = 0; slot < count; slot++, shares += wide) {
        if (!rows[slot]) continue;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const F32 value = load<F32>(rows[slot] + first + v * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) sums[h][v] = fma(splat(shares[h]), value, sums[h][v]);
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < VECTORS; v++) store(out + size_t(h) * dim + first + v * LANES, sums[h][v]);
}

template <int HEADS> void mix_rows(const float* const* rows, int count, const float* shares, int wide, int dim, float* out) {
    int first = 0;
    for (; first + 4 * LANES <= dim; first += 4 * LANES) mixtures<HEADS, 4>(rows, count, shares, wide, dim, first, out);
    for (; first < dim; first += LANES) mixtures<HEADS, 1>(rows, count, shares, wide, dim, first, out);
}

// Sixteen index keys as they are stored -> [dim][16].
void widen_keys(const Stored& keys, int first, int end, int dim, float* out) {
    const uint8_t* rows[LANES];
    for (int lane = 0; lane < LANES; lane++) rows[lane] = keys.at(std::min(first + lane, end - 1));
    alignas(64) float row[LANES][WIDE];
    for (int at = 0; at < dim; at += WIDE) {
        for (int lane = 0; lane < LANES; lane++) {
            uint8_t part[WIDE / 2 + 1];
            std::memcpy(part, rows[lane] + at / 2, WIDE / 2);
            part[WIDE / 2] = rows[lane][dim / 2 + at / WIDE];
            unpack_fp4(part, WIDE, row[lane]);
        }
        for (int d = 0; d < WIDE; d++)
            for (int lane = 0; lane < LANES; lane++) out[size_t(at + d) * LANES + lane] = row[lane][d];
    }
}

template <int HEADS> void head_dots(const float* keys, const float* queries, int dim, F32* out) {
    F32 sums[HEADS] = {};
    for (int d = 0; d < dim; d++) {
        const F32 key = load<F32>(keys + size_t(d) * LANES);
#pragma GCC unroll 8
        for (int h = 0; h < HEADS; h++) sums[h] = fma(key, splat(queries[size_t(h) * dim + d]), sums[h]);
    }
    for (int h = 0; h < HEADS; h++) out[h] = sums[h];
}

F32 score_of(const float* keys, const float* query, const float* weights, int heads, int dim) {
    F32 total = {}, parts[AT_ONCE];
    for (int head = 0; head < heads; head += AT_ONCE) {
        const int some = std::min(AT_ONCE, heads - head);
        const float* from = query + size_t(head) * dim;
        if (some == AT_ONCE) head_dots<AT_ONCE>(keys, from, dim, parts);
        else
            for (int h = 0; h < some; h += 4)
                if (some - h >= 4) head_dots<4>(keys, from + size_t(h) * dim, dim, parts + h);
                else
                    for (int i = h; i < some; i++) head_dots<1>(keys, from + size_t(i) * dim, dim, parts + i);
        for (int h = 0; h < some; h++) {
            const F32 above = parts[h] < 0.0f ? F32{} : parts[h];
            total += splat(weights[head + h]) * above;
        }
    }
    return total;  // begins at +0, so a sum of zeros is +0 whatever the weights' signs: equal scores are equal bits
}

}  // namespace

void attend(Room& room, const float* queries, int heads, int dim, int count, const float* sink, float* out) {
    const int wide = (heads + LANES - 1) / LANES * LANES;
    float *across = room.across.data(), *shares = room.shares.data();
    for (int head = 0; head < wide; head++)
        for (int d = 0; d < dim; d++) across[size_t(d) * wide + head] = head < heads ? queries[size_t(head) * dim + d] : 0.0f;
    const float* const* rows = room.rows.data();
    const float scale = float(1.0 / std::sqrt(double(dim)));
    for (int head = 0; head < heads; head += LANES) {
        int slot = 0;
        while (slot < count) {
            int some = 0;
            while (some < AT_ONCE && slot + some < count && rows[slot + some]) some++;
            float* to = shares + size_t(slot) * wide + head;
            if (some == AT_ONCE) dots<AT_ONCE>(rows + slot, across + head, dim, wide, scale, to), slot += AT_ONCE;
            else if (some >= 4) dots<4>(rows + slot, across + head, dim, wide, scale, to), slot += 4;
            else if (some >= 1) dots<1>(rows + slot, across + head, dim, wide, scale, to), slot++;
            else slot++;
        }
        F32 sinks = {};
        for (int lane = 0; lane < LANES && head + lane < heads; lane++) sinks[lane] = sink[head + lane];
        shares_of(rows, count, sinks, wide, shares + head);
    }
    int head = 0;
    for (; head + 4 <= heads; head += 4) mix_rows<4>(rows, count, shares + head, wide, dim, out + size_t(head) * dim);
    for (; head < heads; head++) mix_rows<1>(rows, count, shares + head, wide, dim, out + size_t(head) * dim);
}

void score(Room& room, const Stored& keys, const float* const* queries, const float* const* weights, const int* visible, int count,
           int heads, int dim, size_t width) {
    const int end = *std::max_element(visible, visible + count);
    for (int first = 0; first < end; first += LANES) {
        widen_keys(keys, first, end, dim, room.keys.data());
        for (int i = 0; i < count; i++)
            if (first < visible[i])
                store(room.scores.data() + i * width + first, score_of(room.keys.data(), queries[i], weights[i], heads, dim));
    }
}

void best(Room& room, const float* scores, int n, int count, int32_t* chosen) {
    auto& order = room.order;
    order.clear();
    for (int at = 0; at < n; at++) {
        if (scores[at] == NONE) continue;
        uint32_t bits;
        std::memcpy(&bits, scores + at, 4);
        const uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
        order.push_back(uint64_t(~rising) << 32 | uint32_t(at));
    }
    const int found = std::min<int>(count, int(order.size()));
    if (found < int(order.size())) std::nth_element(order.begin(), order.begin() + found, order.end());
    std::fill(chosen, chosen + count - found, -1);
    for (int i = 0; i < found; i++) chosen[count - found + i] = int32_t(order[i] & 0xffffffffu);
    std::sort(chosen + count - found, chosen + count);
}

void candidates(Room& room, const float* scores, int n, int size, int count, uint8_t* mask) {
    const int blocks = (n + size - 1) / size;
    std::vector<float>& most = room.maxima;
    if (int(most.size()) < blocks) most.resize(blocks);
    for (int block = 0; block < blocks; block++)
        most[block] = *std::max_element(scores + block * size, scores + std::min(n, (block + 1) * size));
    most[blocks - 1] = std::numeric_limits<float>::infinity();
    if (int(room.blocks.size()) < count) room.blocks.resize(count);
    best(room, most.data(), blocks, count, room.blocks.data());
    std::fill(mask, mask + blocks, 0);
    for (int i = 0; i < count; i++)
        if (room.blocks[i] >= 0) mask[room.blocks[i]] = 1;
}

}  // namespace rackserve::v41
