// Softmax attention of grouped query heads over KV that lies in blocks.
//
// A query's result has the same bits in a long prefill, in a chunk, in a batch and alone: positions are taken in parts of PART,
// a part in steps of one vector, in order, and parts are joined in order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace rackserve {

constexpr int PART = 64;       // positions after which a softmax begins afresh; a multiple of LANES
constexpr int MAX_HEAD = 256;  // numbers of a head
constexpr int TILE = 96;       // most queries that share what is read, a multiple of LANES; no effect on any bit

struct Cache {
    uint8_t* data;  // blocks of [layer][key, value][kv head][position][head dim]
    int32_t wide;   // 4: float, 2: bf16
    int32_t layers, kv_heads, head_dim, block_tokens;

    size_t head_bytes() const { return size_t(block_tokens) * head_dim * wide; }
    uint8_t* rows(int64_t block, int layer, int value, int kv_head) const {
        const size_t heads = ((size_t(block) * layers + layer) * 2 + value) * kv_heads + kv_head;
        return data + heads * head_bytes();
    }
};

// Keys and values of one kv head of a sequence.
struct Head {
    const Cache* cache;
    const int32_t* blocks;
    int layer, kv_head, end;  // positions [0, end) may be read
};

// Queries [count][head dim], already scaled so that weights are powers of 2, and their positions, which never fall.
struct Queries {
    alignas(64) float rows[TILE * MAX_HEAD];
    alignas(64) int16_t whole[TILE * MAX_HEAD];
    float units[TILE];  // what one of `whole` stands for
    int32_t last[TILE];
    int count;
};

// What one part of the positions gives for one query: mixed / total is its softmax attention, by weights under 2^peak.
struct Partial {
    float peak, total;
};

// What the parts so far give, for up to TILE queries.
struct Joined {
    float peaks[TILE + LANES], totals[TILE + LANES];  // a vector is read from any query on
    alignas(64) float mixed[TILE * MAX_HEAD];
};

// A part as floats.
struct FloatPart {
    alignas(64) float keys[PART * MAX_HEAD];    // [PART / LANES][head dim][LANES]
    alignas(64) float values[PART * MAX_HEAD];  // [PART][head dim]
};

// A part of bf16 as 16-bit whole numbers, two to a lane, whose products take half the instructions of floats.
//
// Numbers of a key are at most 2^key_bits and a query has the length LENGTH, so that no product of two overflows. A position's values are
// at most 2^VALUE_BITS, and the exponents that makes of them are added to its scores: weights are shares of what is mixed, not of
// attention. With WEIGHT as the largest, no sum overflows.
struct WholePart {
    alignas(64) int32_t keys[PART * MAX_HEAD / 2];    // [PART / LANES][head dim / 2][LANES]
    alignas(64) int32_t values[PART * MAX_HEAD / 2];  // [PART / 2][head dim]: of two positions, the even numbers of 32 before the odd ones
    alignas(64) float units[PART];                    // what one stands for in a key; NaN if any is not finite
    alignas(64) float exponents[PART];                // of values, which are less than 2^exponent; NaN if any is not finite
    alignas(64) float inverses[PART];                 // 2^-exponent
};

constexpr float LENGTH = 32000.0f;
constexpr int key_bits(int head_dim) { return head_dim <= 64 ? 13 : 12; }
constexpr int VALUE_BITS = 12, LEAST_EXPONENT = -30;  // a row of smaller values counts as if they had that exponent
constexpr float WEIGHT = 8191.0f;
// A query's numbers add up to at most the root of their count times LENGTH, and a little for their rounding.
static_assert(8 * LENGTH * (1 << key_bits(64)) < 2.1e9f && 16 * LENGTH * (1 << key_bits(MAX_HEAD)) < 2.1e9f);
static_assert(PART * (long long)WEIGHT * (1 << VALUE_BITS) < 1LL << 31);

// One member's memory.
struct Scratch {
    Queries queries;
    Joined joined;
    FloatPart floats;
    WholePart whole;
};

inline int parts_until(int position) { return position / PART + 1; }

// Parts of a head from `part` on, and where the work that comes next begins, whose memory is asked for meanwhile.
struct Work {
    Head head;
    int part;
    Head after;
    int after_part;
};

// scratch.queries over parts up to `end`. Writes a partial and a mixed row for each part and query that reaches it, as values lie in
// the scratch, or where `partials` is null joins them to scratch.joined.
void attend_parts(Scratch& scratch, const Work& work, int end, Partial* partials, float* mixed);

void begin_join(Joined& joined, int count, int head_dim);

// Takes a part in; those of queries that do not reach it do not count.
void join_part(Joined& joined, const Queries& queries, int part, int head_dim, const Partial* partials, const float* mixed);

// The attention of query `query` -> out [head dim].
void end_join(const Joined& joined, int query, const Cache& cache, float* out);

}  // namespace rackserve
