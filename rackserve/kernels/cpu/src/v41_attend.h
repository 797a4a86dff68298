// Attention of one position over rows that are keys and values at once, and the choice of the compressed rows among them.
//
// A position's result depends on its own rows alone, taken in the order of their slots: not on chunks, batch or threads.
#pragma once

#include <vector>

#include "v41_rows.h"

namespace rackserve::v41 {

// One member's memory. Sizes: of the model, once; `scores` grows with the longest context.
struct Room {
    std::vector<float> far;              // [topk][head dim], unpacked
    std::vector<const float*> rows;      // slots
    std::vector<float> across;           // queries [head dim][heads, filled up to 16s]
    std::vector<float> shares;           // [slots][heads, filled up]
    std::vector<float> scores;           // [QUERIES][keys, filled up to 16s]
    std::vector<float> keys;             // [index dim][16]
    std::vector<uint64_t> order;
    std::vector<float> panel;            // for products
    std::vector<uint8_t> bytes;          // a packed row
    std::vector<float> line;             // a row as wide as any
    std::vector<int32_t> blocks;         // chosen candidate blocks
    std::vector<float> maxima;           // of candidate blocks
};

constexpr int QUERIES = 8;  // positions that are scored together; no effect on any bit

// Softmax of queries [heads][dim] over `count` slots of room.rows (null: no row), with one logit per head whose value is zero.
void attend(Room& room, const float* queries, int heads, int dim, int count, const float* sink, float* out);

// Packed rows of a sequence in the blocks of an arena.
struct Stored {
    const uint8_t* data;  // of block 0: the first row of that kind
    size_t block_bytes;
    int32_t per_block, row_bytes;
    const int64_t* blocks;
    const uint8_t* at(int number) const {
        return data + size_t(blocks[number / per_block]) * block_bytes + size_t(number % per_block) * row_bytes;
    }
};

// Adds up, for `count` (<= QUERIES) positions, weight times relu(query . key) over heads for keys [0, visible[i]).
// queries[i] [heads][dim], weights[i] [heads]; scores go to room.scores, `width` apart.
void score(Room& room, const Stored& keys, const float* const* queries, const float* const* weights, const int* visible, int count,
           int heads, int dim, size_t width);

// The numbers of the `count` largest of scores [n], lowest first among equals, none of minus infinity: ascending, -1 in front.
void best(Room& room, const float* scores, int n, int count, int32_t* chosen);

// Of blocks of `size` scores each, the `count` with the largest, that of the newest score always among them: mask [blocks].
void candidates(Room& room, const float* scores, int n, int size, int count, uint8_t* mask);

}  // namespace rackserve::v41
