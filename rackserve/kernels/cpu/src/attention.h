// Softmax attention of grouped query heads over KV that lies in blocks.
//
// A query's result has the same bits in a long prefill, in a chunk, in a batch and alone: positions are taken in parts of PART,
// a part in steps of one vector, in order, and parts are joined in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace rackserve {

constexpr int PART = 256;      // positions after which a softmax begins afresh; a multiple of LANES
constexpr int MAX_HEAD = 256;  // numbers of a head
constexpr int TILE = 48;       // most queries that share what is read; no effect on any bit

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

// What one part of the positions gives for one query: mixed / total is its softmax attention, by weights under e^peak.
struct Partial {
    float peak, total;
};

// One member's memory for the keys and values of a part, widened.
struct Scratch {
    alignas(64) float keys[PART * MAX_HEAD];    // [PART / LANES][head dim][LANES]
    alignas(64) float values[PART * MAX_HEAD];  // [PART][head dim]
};

// Queries [count][head dim] (count <= TILE), already scaled, whose positions are `last[i]`, over positions [first, first + PART).
// Writes count partials and mixed rows. `blocks`: the sequence's block table.
void attend_part(Scratch& scratch, const Cache& cache, int layer, int kv_head, const int32_t* blocks, int first, int count, const float* queries,
                 const int32_t* last, Partial* partials, float* mixed);

// Joins `parts` partial results, [parts] apart by `apart` entries, into out [head dim].
void join_parts(const Partial* partials, const float* mixed, int parts, int apart, int head_dim, float* out);

}  // namespace rackserve
