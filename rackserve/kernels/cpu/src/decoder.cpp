#include "decoder.h"

#include <algorithm>

namespace rackserve {

namespace {

constexpr int RUN = 4;    // parts that one piece of work takes where a task is split
constexpr int AMPLE = 4;  // tasks to a member from which on none is split

constexpr int OWN_ROWS = 36;  // rows of a member from which on (with two) it is better to unpack all weights than to read what another wrote
constexpr int HEAD_ROWS = 128, HEAD_OUTPUTS = 256;  // whose logits are in the cache at once

// `count` outputs of a matrix from `first` on, both multiples of 16.
Matrix outputs_of(const Matrix& matrix, int first, int count) {
    const size_t tile = size_t(matrix.inputs / GROUP) * group_bytes(matrix.kind);
    return {matrix.data + first / LANES * tile, matrix.kind, count, matrix.inputs};
}

}  // namespace

Decoder::Decoder(const RkModel& model, const Cache& cache, int threads, const int32_t* cores)
    : m_(model), cache_(cache), team_(threads, cores), barrier_(team_.size()),
      wide_(std::max({model.hidden, model.heads * model.head_dim, model.ffn})),
      hidden_(size_t(model.max_rows) * model.hidden), inputs_(size_t(model.max_rows) * wide_),
      qkv_(size_t(model.max_rows) * qkv_width()), mixed_(size_t(model.max_rows) * model.heads * model.head_dim),
      gates_(size_t(model.max_rows) * 2 * model.ffn), highs_(size_t(model.max_rows) * wide_), lows_(size_t(model.max_rows) * wide_),
      pairs_(size_t(model.max_rows) * wide_ / 2), scales_(size_t(model.max_rows) * wide_ / GROUP),
      sums_(size_t(model.max_rows) * wide_ / GROUP), fine_(size_t(model.max_rows) * wide_ / GROUP), units_(size_t(model.max_rows) * wide_ / GROUP),
      head_rows_(std::min(model.max_rows, HEAD_ROWS)), part_logits_(size_t(team_.size()) * head_rows_ * HEAD_OUTPUTS),
      picks_(size_t(team_.size()) * head_rows_), scratch_(team_.size()) {
    for (int member = 0; member < team_.size(); member++) panels_.emplace_back(wide_);
}

void Decoder::forward(const RkSpan* spans, int num_spans, const int32_t* tokens) {
    plan(spans, num_spans);
    team_.run([&](int member) { run(member, spans, tokens); });
}

void Decoder::logits(const int32_t* wanted, int count, RkPick* picks, float* out, int full) {
    for (int begin = 0; begin < count; begin += head_rows_) {
        const int rows = std::min(count - begin, head_rows_);
        team_.run([&](int member) {
            if (member == 0) clock_.begin();
            const Range mine = share(member, rows);
            for (int row = mine.begin; row < mine.end; row++) {
                float* normed = inputs_at({0, rows}, row, m_.hidden);
                normalise(hidden(wanted[begin + row]), m_.norm, normed);
                quantise_row(normed, row, {0, rows}, m_.head);
            }
            finish(member, NORM);
            head(member, rows, begin < full ? out + size_t(begin) * m_.vocab : nullptr, std::min(full - begin, rows));
            finish(member, HEAD);
        });
        for (int row = 0; row < rows; row++) {
            picks[begin + row] = NOTHING;
            for (int member = 0; member < team_.size(); member++) prefer(picks[begin + row], *picks_.at(member * head_rows_ + row));
        }
    }
}

// A member's part of the logits, some outputs of all rows at a time.
void Decoder::head(int member, int rows, float* out, int full) {
    const auto [begin, end] = part(member, m_.head.outputs);
    float* part_logits = part_logits_.at(size_t(member) * head_rows_ * HEAD_OUTPUTS);
    RkPick* best = picks_.at(member * head_rows_);
    std::fill_n(best, rows, NOTHING);
    for (int first = begin; first < end; first += HEAD_OUTPUTS) {
        const int count = std::min(HEAD_OUTPUTS, end - first);
        const Matrix part = outputs_of(m_.head, first, count);
        if (takes_many(part, rows)) product_many(panels_[member], part, many(0), rows, 0, count, part_logits, HEAD_OUTPUTS, false);
        else product(part, few(0, inputs_.at()), rows, 0, count, part_logits, HEAD_OUTPUTS, false);
        for (int row = 0; row < rows; row++) {
            const float* logits = part_logits + size_t(row) * HEAD_OUTPUTS;
            prefer(best[row], logits, count, first);
            if (row < full) std::copy_n(logits, count, out + size_t(row) * m_.vocab + first);
        }
    }
}

// The end of a stage, for all members.
void Decoder::finish(int member, Stage stage) {
    if (member == 0) clock_.end(stage);
    barrier_.wait();
    if (member == 0) clock_.end(WAIT);
}

// The end of a stage after which a member that has rows of its own goes on with them: others need not have come so far.
void Decoder::finish_rows(int member, Stage stage) {
    if (!by_rows_) return finish(member, stage);
    if (member == 0) clock_.end(stage);
}

Range Decoder::share(int member, int count) const {
    return {int(int64_t(count) * member / team_.size()), int(int64_t(count) * (member + 1) / team_.size())};
}

// Whole tiles of the outputs.
Range Decoder::part(int member, int outputs) const {
    const Range tiles = share(member, outputs / LANES);
    return {tiles.begin * LANES, tiles.end * LANES};
}

// The rows of one member lie together, whatever others do meanwhile.
ManyInputs Decoder::many(int first) {
    const size_t number = size_t(first) * wide_, group = number / GROUP;
    return {pairs_.at(number / 2), scales_.at(group), sums_.at(group), fine_.at(group), units_.at(group)};
}

Inputs Decoder::few(int first, const float* inputs) {
    const size_t number = size_t(first) * wide_, group = number / GROUP;
    return {highs_.at(number), lows_.at(number), scales_.at(group), sums_.at(group), fine_.at(group), inputs};
}

// Few rows: all of them with a part of the outputs, so that each weight is read by one core only. Many rows: all outputs of some.
void Decoder::multiply(int member, const Matrix& matrix, const float* inputs, float* out, int stride, bool add) {
    const Range rows = rows_of(member), outputs = by_rows_ ? Range{0, matrix.outputs} : part(member, matrix.outputs);
    out += size_t(rows.begin) * stride;
    if (takes_many(matrix, rows.size())) product_many(panels_[member], matrix, many(rows.begin), rows.size(), outputs.begin, outputs.end, out, stride, add);
    else product(matrix, few(rows.begin, inputs), rows.size(), outputs.begin, outputs.end, out, stride, add);
}

// A row as `multiply` of `rows` by the matrix wants it.
void Decoder::quantise_row(const float* from, int row, Range rows, const Matrix& matrix) {
    if (matrix.kind == BF16) return;
    if (takes_many(matrix, rows.size())) quantise_many(from, matrix, row - rows.begin, rows.size(), many(rows.begin));
    else quantise(from, matrix, row - rows.begin, few(rows.begin, nullptr));
}

void Decoder::normalise(const float* from, const float* weight, float* to) const {
    F32 squares = {};
    for (int at = 0; at < m_.hidden; at += LANES) {
        const F32 x = load<F32>(from + at);
        squares = fma(x, x, squares);
    }
    const F32 scale = splat(1.0f / std::sqrt(sum(squares) / float(m_.hidden) + m_.norm_eps));
    for (int at = 0; at < m_.hidden; at += LANES) store(to + at, load<F32>(from + at) * scale * load<F32>(weight + at));
}

void Decoder::plan(const RkSpan* spans, int num_spans) {
    tasks_.clear();
    first_row_.clear();
    owner_.clear();
    pieces_.clear();
    rows_ = 0;
    size_t slots = 0;
    const int rows_of_tile = std::max(1, TILE / shared());
    for (int s = 0; s < num_spans; s++) {
        first_row_.push_back(rows_);
        owner_.insert(owner_.end(), spans[s].rows, s);
        for (int row = 0; row < spans[s].rows; row += rows_of_tile) {
            const int rows = std::min(rows_of_tile, spans[s].rows - row);
            const int parts = parts_until(spans[s].start + row + rows - 1);
            for (int kv = 0; kv < m_.kv_heads; kv++) {
                tasks_.push_back({s, kv, row, rows * shared(), parts, slots});
                slots += size_t(parts) * rows * shared();
            }
        }
        rows_ += spans[s].rows;
    }
    // The longest first: when tasks run out, what others still do is short.
    std::sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.parts != b.parts ? a.parts > b.parts : a.slot < b.slot; });
    by_rows_ = team_.size() > 1 && rows_ >= OWN_ROWS * team_.size();
    if (team_.size() == 1 || int(tasks_.size()) >= AMPLE * team_.size()) return;
    // Few long contexts are shared by all members, part by part, and joined afterwards.
    for (size_t task = 0; task < tasks_.size(); task++)
        for (int part = 0; part < tasks_[task].parts; part += RUN) pieces_.push_back({int(task), part});
    partials_.resize(slots);
    parts_.resize(slots * m_.head_dim);
}

void Decoder::run(int member, const RkSpan* spans, const int32_t* tokens) {
    const Range mine = share(member, rows_), rows = rows_of(member);
    const int width = m_.heads * m_.head_dim;
    if (member == 0) clock_.begin();
    for (int row = mine.begin; row < mine.end; row++) unpack_row(m_.embedding, tokens[row], hidden(row));
    if (member == 0) clock_.end(EMBED);
    for (int number = 0; number < m_.layers; number++) {
        const RkLayer& layer = m_.layer[number];
        for (int row = mine.begin; row < mine.end; row++) {
            float* normed = inputs_at(rows, row, m_.hidden);
            normalise(hidden(row), layer.attention_norm, normed);
            quantise_row(normed, row, rows, layer.qkv);
        }
        if (member == 0) next_.store(0, std::memory_order_relaxed), joined_.store(0, std::memory_order_relaxed);
        finish_rows(member, NORM);
        multiply(member, layer.qkv, inputs_of(rows), qkv_.at(), qkv_width(), false);
        finish_rows(member, QKV);
        for (int row = mine.begin; row < mine.end; row++) place(row, number, spans[owner_[row]]);
        finish(member, PLACE);
        attention(member, number, spans);
        for (int row = mine.begin; row < mine.end; row++) quantise_row(mixed_.at(size_t(row) * width), row, rows, layer.output);
        finish_rows(member, NORM);
        multiply(member, layer.output, mixed_.at(size_t(rows.begin) * width), hidden_.at(), m_.hidden, true);
        finish_rows(member, OUTPUT);
        mlp(member, layer);
    }
    if (by_rows_) finish(member, DOWN);
}

void Decoder::mlp(int member, const RkLayer& layer) {
    const Range mine = share(member, rows_), rows = rows_of(member);
    const bool gated = GATED && takes_many(layer.gate_up, rows.size());
    for (int row = mine.begin; row < mine.end; row++) {
        float* normed = inputs_at(rows, row, m_.hidden);
        normalise(hidden(row), layer.ffn_norm, normed);
        quantise_row(normed, row, rows, layer.gate_up);
    }
    finish_rows(member, NORM);
    float* inputs = inputs_of(rows);
    if (gated) {
        const Range outputs = by_rows_ ? Range{0, m_.ffn} : part(member, m_.ffn);
        product_gated(panels_[member], layer.gate_up, many(rows.begin), rows.size(), outputs.begin, outputs.end, inputs, m_.ffn);
    } else multiply(member, layer.gate_up, inputs, gates_.at(), 2 * m_.ffn, false);
    finish_rows(member, GATE_UP);
    for (int row = mine.begin; row < mine.end; row++) {
        float* active = inputs_at(rows, row, m_.ffn);
        if (!gated) activate(row, active);
        quantise_row(active, row, rows, layer.down);
    }
    finish_rows(member, ACTIVATE);
    multiply(member, layer.down, inputs, hidden_.at(), m_.hidden, true);
    finish_rows(member, DOWN);
}

void Decoder::activate(int row, float* active) {
    const float* gate = gates_.at(size_t(row) * 2 * m_.ffn);
    for (int at = 0; at < m_.ffn; at += LANES) store(active + at, gated(load<F32>(gate + at), load<F32>(gate + m_.ffn + at)));
}

// Turns queries and keys by their position, scales the queries, and stores keys and values in their block.
void Decoder::place(int row, int layer, const RkSpan& span) {
    const int position = span.start + row - first_row_[owner_[row]], dim = m_.head_dim, half = dim / 2;
    float* heads = qkv_.at(size_t(row) * qkv_width());
    const float* cosine = m_.cosine + size_t(position) * half;
    const float* sine = m_.sine + size_t(position) * half;
    const float scale = LOG2_E / std::sqrt(float(dim));  // attention's weights are powers of 2
    for (int head = 0; head < m_.heads + m_.kv_heads; head++) {
        float* at = heads + head * dim;
        const F32 factor = splat(head < m_.heads ? scale : 1.0f);
        for (int d = 0; d < half; d += LANES) {
            const F32 low = load<F32>(at + d), high = load<F32>(at + half + d), c = load<F32>(cosine + d), s = load<F32>(sine + d);
            store(at + d, (low * c - high * s) * factor);
            store(at + half + d, (high * c + low * s) * factor);
        }
    }
    const int64_t block = span.blocks[position / cache_.block_tokens];
    const size_t offset = size_t(position % cache_.block_tokens) * dim * cache_.wide;
    for (int kv = 0; kv < m_.kv_heads; kv++)
        for (int value = 0; value < 2; value++) {
            const float* from = heads + (m_.heads + value * m_.kv_heads + kv) * dim;
            uint8_t* to = cache_.rows(block, layer, value, kv) + offset;
            for (int d = 0; d < dim; d += LANES) {
                if (cache_.wide == 2) store(to + 2 * d, to_bf16(load<F32>(from + d)));
                else store(to + 4 * d, load<F32>(from + d));
            }
        }
}

void Decoder::attention(int member, int layer, const RkSpan* spans) {
    Scratch& scratch = scratch_[member];
    const bool apart = !pieces_.empty();
    const int count = int(apart ? pieces_.size() : tasks_.size());
    const auto task = [&](int at) -> const Task& { return tasks_[apart ? pieces_[at].first : at]; };
    const auto part = [&](int at) { return apart ? pieces_[at].second : 0; };
    // Where there are many, all kv heads of a task's rows are taken at once: they lie on the same pages.
    const int run = !apart && count >= AMPLE * team_.size() * m_.kv_heads ? m_.kv_heads : 1;
    // The next piece of work is taken early, so that its memory can be asked for.
    for (int at = next_.fetch_add(run), then; at < count; at = then) {
        then = (at + 1) % run ? at + 1 : next_.fetch_add(run);
        const int after = std::min(then, count - 1);
        const Task& here = task(at);
        load_queries(scratch, here, spans[here.span]);
        const Work work{head_of(layer, here, spans[here.span]), part(at), head_of(layer, task(after), spans[task(after).span]), part(after)};
        if (apart) {
            const size_t slot = here.slot + size_t(work.part) * here.queries;
            attend_parts(scratch, work, std::min(work.part + RUN, here.parts), &partials_[slot], &parts_[slot * m_.head_dim]);
            continue;
        }
        begin_join(scratch.joined, here.queries, m_.head_dim);
        attend_parts(scratch, work, here.parts, nullptr, nullptr);
        end_task(scratch, here);
    }
    finish(member, ATTEND);
    if (!apart) return;
    for (int at; (at = joined_.fetch_add(1)) < int(tasks_.size());) join(scratch, tasks_[at], spans[tasks_[at].span]);
    finish(member, JOIN);
}

void Decoder::load_queries(Scratch& scratch, const Task& task, const RkSpan& span) {
    const int dim = m_.head_dim;
    Queries& queries = scratch.queries;
    queries.count = task.queries;
    for (int q = 0; q < task.queries; q++) {
        const int row = first_row_[task.span] + task.first_row + q / shared();
        const float* from = qkv_.at(size_t(row) * qkv_width() + (task.kv_head * shared() + q % shared()) * dim);
        std::copy(from, from + dim, queries.rows + q * dim);
        queries.last[q] = span.start + task.first_row + q / shared();
    }
}

Head Decoder::head_of(int layer, const Task& task, const RkSpan& span) const {
    return {&cache_, span.blocks, layer, task.kv_head, span.start + task.first_row + (task.queries - 1) / shared() + 1};
}

void Decoder::join(Scratch& scratch, const Task& task, const RkSpan& span) {
    load_queries(scratch, task, span);
    begin_join(scratch.joined, task.queries, m_.head_dim);
    for (int part = 0; part < task.parts; part++) {
        const size_t slot = task.slot + size_t(part) * task.queries;
        join_part(scratch.joined, scratch.queries, part, m_.head_dim, &partials_[slot], &parts_[slot * m_.head_dim]);
    }
    end_task(scratch, task);
}

void Decoder::end_task(const Scratch& scratch, const Task& task) {
    for (int q = 0; q < task.queries; q++) {
        const int row = first_row_[task.span] + task.first_row + q / shared();
        end_join(scratch.joined, q, cache_, mixed_.at((size_t(row) * m_.heads + task.kv_head * shared() + q % shared()) * m_.head_dim));
    }
}

}  // namespace rackserve
