// A pass of a DeepSeek-V4.1 model: stages of every layer over buffers that are planned once, each shared by all members of a team.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "team.h"
#include "v41_attend.h"
#include "v41_plan.h"
#include "v41_streams.h"

namespace rackserve::v41 {

// Memory that begins on a cache line, zero at first.
template <class T> class Lines {
  public:
    explicit Lines(size_t count) : data_(static_cast<T*>(::operator new[](count * sizeof(T) + 64, std::align_val_t(64)))) {
        std::memset(static_cast<void*>(data_), 0, count * sizeof(T));
    }
    ~Lines() { ::operator delete[](data_, std::align_val_t(64)); }
    Lines(const Lines&) = delete;
    T* at(size_t index = 0) { return data_ + index; }

  private:
    T* data_;
};

constexpr int SMALL = 16;  // rows up to which a pass is made for latency; no effect on any bit

class Step {
  public:
    // cores: where to run the threads behind the caller's, one each; null: wherever the system wants.
    Step(const V41Model& model, int threads, const int32_t* cores);

    // All layers over the rows of `spans`. engram: for each of the model's, [rows][inputs]. Returns the rows that reach the end.
    int forward(const V41Span* spans, int num_spans, const int64_t* tokens, const float* const* engram, const V41Result& out);

    // Logits [count][vocab] of rows [count][hidden].
    void logits(const float* hidden, int count, float* out);

    // Window rows [stages][count][row bytes] of the draft stages, from features [count][targets * hidden] of positions.
    void learn(const float* features, const int64_t* positions, int count, uint8_t* rows);

    // One block of drafts after each sequence's `start` positions: collapsed rows [spans * block][hidden], and their logits.
    void draft(const V41Span* spans, int num_spans, const int64_t* anchors, float* hidden, float* logits);

    // Adds to logits[i] what the token before says, and to confidence[i] what it and hidden[i] say; `apart`: rows between two i.
    void follow(const int64_t* tokens, int count, const float* hidden, float* logits, float* confidence, int apart);

  private:
    struct Run {  // a span of the rows at hand
        const V41Span* span;
        int64_t start;
        int rows, first, replayed;
        size_t context;  // where its rows begin in `context_`, in floats
    };

    template <class F> void share(int member, int count, F each) {
        const int begin = int(int64_t(count) * member / team_.size()), end = int(int64_t(count) * (member + 1) / team_.size());
        for (int at = begin; at < end; at++) each(at);
    }
    // A member's part of so many outputs, in whole tiles.
    std::pair<int, int> columns(int member, int outputs) const {
        const int64_t tiles = outputs / LANES;
        return {int(tiles * member / team_.size()) * LANES, int(tiles * (member + 1) / team_.size()) * LANES};
    }
    // A member's part of the outputs, of all rows: each weight is read by one core only.
    void multiply(int member, const Matrix& m, const float* x, size_t stride, int rows, float* out, size_t out_stride, bool add = false);
    void multiply(int member, const Matrix& m, const float* x, float* out) { multiply(member, m, x, m.inputs, rows_, out, m.outputs); }
    // What the devices of the rank have parts of (v41_devices.h). `compute(begin, count, out)` writes this member's columns of
    // rows [count][width]; `use(row, sum)` is called for each row, all members' together, with the sum over the devices in order.
    template <class Compute, class Meanwhile, class Use>
    void add_up(int member, int rows, int width, float* own, Compute compute, Meanwhile meanwhile, Use use);
    template <class Compute, class Use> void add_up(int member, int rows, int width, float* own, Compute compute, Use use) {
        add_up(member, rows, width, own, compute, [] {}, use);
    }
    // The same for parts that are columns: the devices' widths one after the other, in rows of `out`.
    template <class Compute> void join(int member, int rows, int width, float* out, size_t out_stride, Compute compute);
    void add_parts(int member, int row, int width, float* sum) const;
    // This member's columns of the bf16 rows of `tokens`, zeros for those that another device has.
    void look_up(int member, const uint16_t* table, int width, const int64_t* tokens, int rows, float* out) const;
    int first_entry() const { return mail_ == nullptr ? 0 : mail_->device() * m_.head.outputs; }  // of this device's vocabulary
    bool shares_early() const { return m_.inline_shared && rows_ <= SMALL; }
    void begin(const V41Span* spans, int num_spans, bool drafting);
    void lay_out();
    void enter(int member, const int64_t* tokens);
    void drop_early_rows();
    void round_row(const float* x, int n, float* out, int member) { round_fp8(x, n, out, rooms_[member].bytes.data()); }
    const float* rounded(Lines<float>& plain, Lines<float>& rounded) { return m_.round_inputs ? rounded.at() : plain.at(); }

    // Stages of a layer, in order; a barrier lies between two where one reads what other members wrote.
    void inject(int member, const V41Engram& engram, const float* memory);
    void attention_input(int member, const V41Block& block, int target);
    void compress(int member, const V41Layer& layer);
    void compress_row(const V41Layer& layer, const Run& run, int row, Room& room);
    void sublayers(int member, const V41Layer* layer, const V41Block& block, int number, uint8_t* packed);
    void attention_products(int member, const V41Layer* layer, const V41Block& block);
    void window_rows(int member, bool compressed, const V41Block& block, int number, uint8_t* packed);
    void earlier_rows(int member, int number);
    void query_products(int member, const V41Layer* layer, const V41Block& block);
    void select(int member, const V41Layer& layer);
    void select_rows(const V41Layer& layer, int first, int count, Room& room);
    void attend_rows(int member, const V41Layer* layer, const V41Block& block, int number);
    void attention_output(int member, const V41Block& block);  // all but the last product
    void into_experts(int member, const V41Block& block, int row, const float* y);
    void route(int member, const V41Block& block);
    void group(const V41Block& block);
    void shared_inputs(int member, const V41Block& block);
    void experts(int member, const V41Block& block);
    void combine(int member, const V41Block& block, int begin, int count, float* out);
    void activate(float* gate, const float* up, const F32* weight) const;
    void out_of_experts(int row, const float* y);

    const float* turn(bool compressed, int row) { return turns_.at((size_t(compressed) * m_.max_rows + row) * 2 * m_.pairs); }
    float* streams(int row) { return streams_.at(size_t(row) * STREAMS * m_.hidden); }
    int row_bytes() const { return m_.head_dim + m_.head_dim / WIDE; }
    int width() const { return m_.heads * m_.head_dim; }
    int earlier() const { return drafting_ ? m_.window : m_.window - 1; }
    Stored stored(const V41Layer& layer, const Run& run, bool index) const;
    float* far(int row) { return far_.at(size_t(row) * m_.topk * m_.head_dim); }

    const V41Model m_;
    Mailbox* const mail_;
    bool reads_ahead_ = false;  // earlier rows of the next layer or stage are read while this one waits for devices
    Team team_;
    Barrier barrier_;
    std::vector<Room> rooms_;
    int rows_ = 0;
    bool drafting_ = false;
    V41Result out_{};
    std::vector<Run> runs_;
    std::vector<int> run_of_, kept_;  // of each row at hand: its run, and its place in the pass
    std::vector<int64_t> position_;

    Lines<float> streams_, pre_, x_, x8_, latent_, latent8_, queries_, index_queries_, index_weights_, kv_, mixes_, turns_, attended_,
        low_, low8_, y_, wide_, wide8_, gates_;
    Lines<Mix> mix_;
    Lines<uint8_t> packed_;                     // window rows of drafts, which nobody keeps
    std::vector<int64_t> tokens_;
    std::vector<float> context_;                // of each run: earlier rows, then its own, [head dim] each
    std::vector<std::pair<int, int>> queries_of_;  // rows that are scored together: first and count
    Lines<int32_t> selected_;                   // [row][topk]
    std::vector<uint8_t> candidates_;           // [row][candidates_wide_]
    size_t candidates_wide_ = 0;
    Lines<float> far_;                          // [row][topk][head dim]: selected rows, unpacked once for all layers that read them
    bool has_candidates_ = false;

    // The experts of each row, and rows in the order of their experts; rows of the shared one come last.
    Lines<int32_t> chosen_;
    Lines<float> weights_;
    std::vector<int32_t> place_, row_at_, begin_of_;
    Lines<float> gathered_, gate_part_, up_part_, results_;
};

}  // namespace rackserve::v41
