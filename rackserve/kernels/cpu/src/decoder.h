// A Llama decoder's step as one call: all rows of a batch through all layers, over buffers that are planned once.
#pragma once

#include <utility>
#include <vector>

#include "attention.h"
#include "blocked.h"
#include "buffer.h"
#include "matrix.h"
#include "pick.h"
#include "stages.h"
#include "team.h"

extern "C" {

struct RkLayer {
    const float* attention_norm;
    const float* ffn_norm;
    rackserve::Matrix qkv, output, gate_up, down;
};

struct RkModel {
    int32_t hidden, heads, kv_heads, head_dim, ffn, vocab, layers, max_rows;
    float norm_eps;
    const RkLayer* layer;
    const float* norm;
    rackserve::Matrix embedding, head;
    const float* cosine;  // [positions][head dim / 2]
    const float* sine;
};

// `rows` consecutive positions from `start` on of a sequence whose KV lies in `blocks`.
struct RkSpan {
    const int32_t* blocks;
    int32_t start, rows;
};
}

namespace rackserve {

// Queries of one kv head at neighbouring positions of a span.
struct Task {
    int span, kv_head, first_row, queries, parts;
    size_t slot;  // of its first partial, where its parts are computed apart
};

struct Range {
    int begin, end;
    int size() const { return end - begin; }
};

class Decoder {
  public:
    Decoder(const RkModel& model, const Cache& cache, int threads, const int32_t* cores);

    void forward(const RkSpan* spans, int num_spans, const int32_t* tokens);

    // The likeliest tokens of rows `wanted` of the last `forward` -> picks [count]. All logits of the first `full` of these rows -> out
    // [full][vocab]; those of the others never leave the cache.
    void logits(const int32_t* wanted, int count, RkPick* picks, float* out, int full);

    StageClock& clock() { return clock_; }

  private:
    int qkv_width() const { return (m_.heads + 2 * m_.kv_heads) * m_.head_dim; }
    int shared() const { return m_.heads / m_.kv_heads; }
    float* hidden(int row) { return hidden_.at(size_t(row) * m_.hidden); }
    Range share(int member, int count) const;
    Range rows_of(int member) const { return by_rows_ ? share(member, rows_) : Range{0, rows_}; }
    Range part(int member, int outputs) const;
    float* inputs_of(Range rows) { return inputs_at(rows, rows.begin, 0); }
    float* inputs_at(Range rows, int row, int width) { return inputs_.at(size_t(rows.begin) * wide_ + size_t(row - rows.begin) * width); }
    void multiply(int member, const Matrix& matrix, const float* inputs, float* out, int stride, bool add);
    ManyInputs many(int first);
    Inputs few(int first, const float* inputs);
    void quantise_row(const float* from, int row, Range rows, const Matrix& matrix);
    void normalise(const float* from, const float* weight, float* to) const;
    void plan(const RkSpan* spans, int num_spans);
    void finish(int member, Stage stage);
    void finish_rows(int member, Stage stage);
    void head(int member, int rows, float* out, int full);
    void run(int member, const RkSpan* spans, const int32_t* tokens);
    void attention(int member, int layer, const RkSpan* spans);
    void mlp(int member, const RkLayer& layer);
    void place(int row, int layer, const RkSpan& span);
    void activate(int row, float* active);
    void load_queries(Scratch& scratch, const Task& task, const RkSpan& span);
    Head head_of(int layer, const Task& task, const RkSpan& span) const;
    void join(Scratch& scratch, const Task& task, const RkSpan& span);
    void end_task(const Scratch& scratch, const Task& task);

    const RkModel m_;
    const Cache cache_;
    Team team_;
    Barrier barrier_;
    const int wide_;  // most inputs of a product
    StageClock clock_;
    int rows_ = 0;
    bool by_rows_ = false;  // members share the rows of products, not their outputs
    Buffer<float> hidden_, inputs_, qkv_, mixed_, gates_;
    Buffer<int8_t> highs_, lows_;
    Buffer<int32_t> pairs_;
    Buffer<float> scales_, sums_;
    Buffer<uint8_t> fine_;
    Buffer<Unit> units_;
    const int head_rows_;        // whose logits are computed at once
    Buffer<float> part_logits_;  // of each member: [head_rows_] of some outputs
    Buffer<RkPick> picks_;
    std::vector<Task> tasks_;
    std::vector<std::pair<int, int>> pieces_;  // task and first part; empty: one piece of work is a task
    std::vector<int> first_row_, owner_;
    std::vector<Partial> partials_;
    std::vector<float> parts_;
    std::vector<Panel> panels_;
    std::vector<Scratch> scratch_;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> joined_{0};
};

}  // namespace rackserve
