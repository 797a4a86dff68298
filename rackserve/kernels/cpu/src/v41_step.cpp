#include "v41_devices.h"

#include <algorithm>

namespace rackserve::v41 {

namespace {

float bf16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
}

int wide_inputs(const V41Model& m) { return std::max({(STREAMS + 1) * m.hidden, m.targets * m.hidden, m.engram_inputs}); }
int top_of(const V41Model& m) {
    int most = 0;
    for (int layer = 0; layer < m.layers; layer++) most = std::max(most, m.layer[layer].block.top);
    for (int stage = 0; stage < m.stages; stage++) most = std::max(most, m.stage[stage].top);
    return most + 1;
}
int filled(int count) { return (count + LANES - 1) / LANES * LANES; }

}  // namespace

Step::Step(const V41Model& m, int threads, const int32_t* cores)
    : m_(m), mail_(m.mailbox), team_(threads, cores), barrier_(team_.size()), rooms_(team_.size()), streams_(size_t(m.max_rows) * STREAMS * m.hidden),
      pre_(size_t(m.max_rows) * STREAMS), x_(size_t(m.max_rows) * m.hidden), x8_(size_t(m.max_rows) * m.hidden),
      latent_(size_t(m.max_rows) * m.q_rank), latent8_(size_t(m.max_rows) * m.q_rank), queries_(size_t(m.max_rows) * width()),
      index_queries_(size_t(m.max_rows) * m.index_heads * m.index_dim), index_weights_(size_t(m.max_rows) * filled(m.index_heads)),
      kv_(size_t(m.max_rows) * m.head_dim), mixes_(size_t(m.max_rows) * MIXES_WIDE), turns_(size_t(m.max_rows) * 4 * m.pairs),
      attended_(size_t(m.max_rows) * width()), low_(size_t(m.max_rows) * m.o_groups * m.o_rank), low8_(size_t(m.max_rows) * m.o_groups * m.o_rank),
      y_(size_t(m.max_rows) * m.hidden), wide_(size_t(m.max_rows) * wide_inputs(m)), wide8_(size_t(m.max_rows) * wide_inputs(m)),
      gates_(size_t(m.max_rows) * filled(m.experts)), mix_(m.max_rows),
      packed_(size_t(m.max_rows) * row_bytes()), selected_(size_t(m.max_rows) * m.topk), far_(size_t(SMALL) * m.topk * m.head_dim),
      chosen_(size_t(m.max_rows) * top_of(m)), weights_(size_t(m.max_rows) * top_of(m)),
      gathered_(size_t(m.max_rows) * (top_of(m) - 1) * m.hidden), gate_part_(size_t(m.max_rows) * top_of(m) * m.inner),
      up_part_(size_t(m.max_rows) * top_of(m) * m.inner), results_(size_t(m.max_rows) * top_of(m) * m.hidden) {
    const int slots = m.window + m.block_size + m.topk, heads = filled(m.heads);
    for (Room& room : rooms_) {
        room.far.resize(size_t(m.topk) * m.head_dim);
        room.rows.resize(slots);
        room.across.resize(size_t(m.head_dim) * heads);
        room.shares.resize(size_t(slots) * heads);
        room.keys.resize(size_t(m.index_dim) * LANES);
        room.panel.resize(PANEL);
        room.bytes.resize(2 * (wide_inputs(m) + m.inner + m.o_groups * m.o_rank + m.q_rank + width()));
        room.line.resize(std::max(2 * m.head_dim + std::max(m.head_dim, m.index_dim) + 2 * m.pairs, m.hidden));
    }
    place_.resize(size_t(m.max_rows) * top_of(m));
    row_at_.resize(place_.size());
    begin_of_.resize(m.experts + 1);
}

void Step::multiply(int member, const Matrix& m, const float* x, size_t stride, int rows, float* out, size_t out_stride, bool add) {
    const auto [first, end] = columns(member, m.outputs);
    product(m, x, stride, rows, first, end, out, out_stride, rooms_[member].panel.data(), add);
}

// ------------------------------------------------------------ rows at hand

void Step::begin(const V41Span* spans, int num_spans, bool drafting) {
    runs_.clear();
    kept_.clear();
    position_.clear();
    drafting_ = drafting;
    has_candidates_ = false;
    reads_ahead_ = mail_ != nullptr && m_.early_gathers;
    rows_ = 0;
    for (int s = 0; s < num_spans; s++) {
        runs_.push_back({spans + s, spans[s].start, spans[s].rows, rows_, spans[s].replayed, 0});
        for (int row = 0; row < spans[s].rows; row++, rows_++) {
            kept_.push_back(rows_);
            position_.push_back(spans[s].start + row);
        }
    }
    lay_out();
}

// What follows from the runs: whose each row is, which are scored together, and room for what they attend to.
void Step::lay_out() {
    run_of_.assign(rows_, 0);
    queries_of_.clear();
    size_t floats = 0;
    for (size_t number = 0; number < runs_.size(); number++) {
        Run& run = runs_[number];
        std::fill(run_of_.begin() + run.first, run_of_.begin() + run.first + run.rows, int(number));
        for (int row = 0; row < run.rows; row += QUERIES) queries_of_.push_back({run.first + row, std::min(QUERIES, run.rows - row)});
        run.context = floats;
        floats += size_t(earlier() + run.rows) * m_.head_dim;
    }
    if (context_.size() < floats) context_.resize(floats);
}

void Step::look_up(int member, const uint16_t* table, int width, const int64_t* tokens, int rows, float* out) const {
    const auto [first, end] = columns(member, width);
    for (int row = 0; row < rows; row++, out += width) {
        const int64_t number = tokens[row] - first_entry();
        const uint16_t* from = number >= 0 && number < m_.head.outputs ? table + size_t(number) * width : nullptr;
        for (int at = first; at < end; at++) out[at] = from ? bf16(from[at]) : 0.0f;
    }
}

void Step::enter(int member, const int64_t* tokens) {
    const auto embed = [&](int begin, int count, float* out) { look_up(member, m_.embed, m_.hidden, tokens + begin, count, out); };
    add_up(member, rows_, m_.hidden, y_.at(), embed, [&](int row, const float* x) {
        float* to = streams(row);
        std::copy_n(x, m_.hidden, to);
        for (int s = 1; s < STREAMS; s++) std::copy(to, to + m_.hidden, to + size_t(s) * m_.hidden);
        for (int s = 0; s < STREAMS; s++) *pre_.at(size_t(row) * STREAMS + s) = s == 0;
        turns(m_.freqs, m_.pairs, position_[row], turns_.at(size_t(row) * 2 * m_.pairs));
        turns(m_.compressed_freqs, m_.pairs, position_[row], turns_.at(size_t(m_.max_rows + row) * 2 * m_.pairs));
    });
}

// Rows before their sequence's `full_from` end here: the layers from the last compressor on are computed for the others alone.
void Step::drop_early_rows() {
    std::vector<Run> runs;
    int at = 0;
    for (const Run& run : runs_) {
        const int skipped = int(std::min<int64_t>(std::max<int64_t>(0, run.span->full_from - run.start), run.rows));
        if (skipped == run.rows) continue;
        runs.push_back({run.span, run.start + skipped, run.rows - skipped, at, std::max(0, run.replayed - skipped), 0});
        for (int row = run.first + skipped; row < run.first + run.rows; row++, at++) {
            const auto move = [&](Lines<float>& lines, size_t size) { std::copy_n(lines.at(row * size), size, lines.at(at * size)); };
            move(streams_, size_t(STREAMS) * m_.hidden);
            move(pre_, STREAMS);
            move(x_, m_.hidden);
            move(x8_, m_.hidden);
            for (int kind = 0; kind < 2; kind++) std::copy_n(turn(kind, row), 2 * m_.pairs, turns_.at((size_t(kind) * m_.max_rows + at) * 2 * m_.pairs));
            kept_[at] = kept_[row];
            position_[at] = position_[row];
        }
    }
    runs_ = std::move(runs);
    rows_ = at;
    lay_out();
}

// ------------------------------------------------------------ a pass

int Step::forward(const V41Span* spans, int num_spans, const int64_t* tokens, const float* const* engram, const V41Result& out) {
    begin(spans, num_spans, false);
    out_ = out;
    bool drops = false;
    for (const Run& run : runs_) drops |= run.span->full_from > run.start;
    reads_ahead_ &= !drops;
    team_.run([&](int member) {
        enter(member, tokens);
        for (int number = 0; number < m_.layers; number++) {
            const V41Layer& layer = m_.layer[number];
            if (layer.engram >= 0) inject(member, m_.engram[layer.engram], engram[layer.engram]);
            attention_input(member, layer.block, layer.target);
            barrier_.wait();
            if (layer.compressor >= 0) compress(member, layer);
            if (drops && number == m_.first_decoder) {
                if (member == 0) drop_early_rows();
                barrier_.wait();
            }
            sublayers(member, &layer, layer.block, number, out_.windows + size_t(number) * m_.max_rows * row_bytes());
        }
        share(member, rows_, [&](int row) {
            collapse(streams(row), pre_.at(size_t(row) * STREAMS), m_.hidden, out_.hidden + size_t(row) * m_.hidden);
        });
    });
    return rows_;
}

void Step::sublayers(int member, const V41Layer* layer, const V41Block& block, int number, uint8_t* packed) {
    attention_products(member, layer, block);
    barrier_.wait();
    window_rows(member, layer != nullptr && layer->ratio > 0, block, number, packed);
    barrier_.wait();
    query_products(member, layer, block);
    barrier_.wait();
    if (layer != nullptr && layer->indexer >= 0) {
        select(member, *layer);
        barrier_.wait();
    }
    attend_rows(member, layer, block, number);
    barrier_.wait();
    attention_output(member, block);
    const float* low = rounded(low_, low8_);
    const auto project = [&](int begin, int count, float* out) {
        const int inputs = block.wo_b.inputs;
        multiply(member, block.wo_b, low + size_t(begin) * inputs, inputs, count, out, m_.hidden);
    };
    const auto read_ahead = [&] {
        if (reads_ahead_ && number + 1 < (drafting_ ? m_.layers + m_.stages : m_.layers)) earlier_rows(member, number + 1);
    };
    add_up(member, rows_, m_.hidden, y_.at(), project, read_ahead, [&](int row, const float* y) { into_experts(member, block, row, y); });
    barrier_.wait();
    if (shares_early()) shared_inputs(member, block);
    multiply(member, block.gate, x_.at(), gates_.at());
    multiply(member, block.ffn_mixer.fn, streams_.at(), mixes_.at());
    barrier_.wait();
    route(member, block);
    barrier_.wait();
    if (member == 0) group(block);
    barrier_.wait();
    experts(member, block);
    const auto combined = [&](int begin, int count, float* out) { combine(member, block, begin, count, out); };
    add_up(member, rows_, m_.hidden, y_.at(), combined, [&](int row, const float* y) { out_of_experts(row, y); });
}

void Step::logits(const float* hidden, int count, float* out) {
    for (int begin = 0; begin < count; begin += m_.max_rows) {
        const int rows = std::min(count - begin, m_.max_rows);
        team_.run([&](int member) {
            share(member, rows, [&](int row) {
                rms_norm(hidden + size_t(begin + row) * m_.hidden, m_.norm, m_.hidden, m_.norm_eps, x_.at(size_t(row) * m_.hidden));
            });
            barrier_.wait();
            const auto head = [&](int at, int count, float* to, size_t stride) {
                multiply(member, m_.head, x_.at(size_t(at) * m_.hidden), m_.hidden, count, to, stride);
            };
            join(member, rows, m_.head.outputs, out + size_t(begin) * m_.vocab, m_.vocab, head);
        });
    }
}

}  // namespace rackserve::v41
