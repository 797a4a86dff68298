// A part of a head's positions, read from where it lies and laid out for products.
#pragma once

#include <algorithm>

#include "attention.h"

namespace rackserve {

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
    // A line of each page at once: finding out where pages are takes as long as reading, and can be done for many together.
    Ahead(const Rows& rows, int bytes) : row_(rows.at), end_(rows.at + 2 * rows.count), bytes_(bytes) {
        for (int row = 0; row < 2 * rows.count; row += std::clamp(PAGE / bytes, 1, LANES)) __builtin_prefetch(rows.at[row], 0, 2);
    }

    void ask(int lines) {
        for (; lines > 0 && row_ != end_; lines--) {
            __builtin_prefetch(*row_ + line_, 0, 2);
            line_ += 64;
            if (line_ == bytes_) line_ = 0, row_++;
        }
    }

  private:
    static constexpr int PAGE = 4096;
    const uint8_t *const *row_, *const *end_;
    int bytes_, line_ = 0;
};

// A part -> scratch.floats or, of bf16, scratch.whole.
void lay_out(Scratch& scratch, const Cache& cache, const Rows& rows, Ahead& asking);

// Queries -> whole numbers of them, where keys are.
void round_queries(Queries& queries, int dim);

}  // namespace rackserve
