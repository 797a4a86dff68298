// Draft stages of a step (DSpark): their windows, a block of drafts, and what a drafted token says about the next.

#include <algorithm>

#include "v41_devices.h"

namespace rackserve::v41 {

void Step::learn(const float* features, const int64_t* positions, int count, uint8_t* rows) {
    const V41Draft& draft = m_.draft;
    const int inputs = draft.main.inputs, dim = m_.head_dim, bytes = row_bytes();
    team_.run([&](int member) {
        share(member, count, [&](int row) {
            const float* from = features + size_t(row) * inputs;
            float* to = wide_.at(size_t(row) * inputs);
            if (m_.round_inputs) round_row(from, inputs, to, member);
            else std::copy_n(from, inputs, to);
            turns(m_.freqs, m_.pairs, positions[row], turns_.at(size_t(row) * 2 * m_.pairs));
        });
        barrier_.wait();
        multiply(member, draft.main, wide_.at(), inputs, count, x_.at(), m_.hidden);
        barrier_.wait();
        share(member, count, [&](int row) {
            float* x = x_.at(size_t(row) * m_.hidden);
            rms_norm(x, draft.main_norm, m_.hidden, m_.norm_eps, x);
            if (m_.round_inputs) round_row(x, m_.hidden, x8_.at(size_t(row) * m_.hidden), member);
        });
        for (int stage = 0; stage < m_.stages; stage++) {
            barrier_.wait();
            multiply(member, m_.stage[stage].wkv, rounded(x_, x8_), m_.hidden, count, kv_.at(), dim);
            barrier_.wait();
            share(member, count, [&](int row) {
                float* kv = kv_.at(size_t(row) * dim);
                rms_norm(kv, m_.stage[stage].kv_norm, dim, m_.norm_eps, kv);
                rotate(kv, dim, turn(false, row), m_.pairs, false);
                pack_fp8(kv, dim, rows + (size_t(stage) * count + row) * bytes);
            });
        }
    });
}

void Step::draft(const V41Span* spans, int num_spans, const int64_t* anchors, float* hidden, float* logits) {
    begin(spans, num_spans, true);
    std::vector<int64_t>& tokens = tokens_;
    tokens.assign(rows_, m_.noise);
    for (const Run& run : runs_) tokens[run.first] = anchors[&run - runs_.data()];
    team_.run([&](int member) {
        enter(member, tokens.data());
        for (int stage = 0; stage < m_.stages; stage++) {
            attention_input(member, m_.stage[stage], -1);
            barrier_.wait();
            sublayers(member, nullptr, m_.stage[stage], m_.layers + stage, packed_.at());
        }
        share(member, rows_, [&](int row) {
            float* to = hidden + size_t(row) * m_.hidden;
            collapse(streams(row), pre_.at(size_t(row) * STREAMS), m_.hidden, to);
            rms_norm(to, m_.draft.norm, m_.hidden, m_.norm_eps, x_.at(size_t(row) * m_.hidden));
        });
        barrier_.wait();
        multiply(member, m_.head, x_.at(), m_.hidden, rows_, logits + first_entry(), m_.vocab);  // `follow` joins them
    });
}

void Step::follow(const int64_t* tokens, int count, const float* hidden, float* logits, float* confidence, int apart) {
    const int rank = m_.markov_rank, inputs = m_.draft.markov.inputs;
    team_.run([&](int member) {
        const auto embed = [&](int begin, int rows, float* out) { look_up(member, m_.draft.embed, rank, tokens + begin, rows, out); };
        add_up(member, count, rank, wide8_.at(), embed, [&](int row, const float* found) {
            float* to = wide_.at(size_t(row) * inputs);
            std::copy_n(found, rank, to);
            std::fill(to + rank, to + inputs, 0.0f);
            confidence[size_t(row) * apart] = dot(hidden + size_t(row) * apart * m_.hidden, m_.draft.confidence, m_.hidden) +
                                              dot(to, m_.draft.confidence + m_.hidden, rank);
        });
        barrier_.wait();
        const float* base = logits + first_entry();
        const size_t stride = size_t(apart) * m_.vocab;
        join(member, count, m_.draft.markov.outputs, logits, stride, [&](int begin, int rows, float* out, size_t out_stride) {
            const auto [first, end] = columns(member, m_.draft.markov.outputs);
            for (int row = 0; out != base && row < rows; row++)
                std::copy(base + (begin + row) * stride + first, base + (begin + row) * stride + end, out + row * out_stride + first);
            multiply(member, m_.draft.markov, wide_.at(size_t(begin) * inputs), inputs, rows, out, out_stride, true);
        });
    });
}

}  // namespace rackserve::v41

using rackserve::v41::Step;

extern "C" {

void* rk_v41_new(const V41Model* model, int32_t threads, const int32_t* cores) {
    try {
        return new Step(*model, threads, cores);
    } catch (...) {
        return nullptr;
    }
}

void rk_v41_free(void* step) { delete static_cast<Step*>(step); }

// Returns how many rows reached the end, or -1 where memory ran out.
int rk_v41_forward(void* step, const V41Span* spans, int32_t num_spans, const int64_t* tokens, const float* const* engram, const V41Result* out) {
    try {
        return static_cast<Step*>(step)->forward(spans, num_spans, tokens, engram, *out);
    } catch (...) {
        return -1;
    }
}

void rk_v41_logits(void* step, const float* hidden, int32_t count, float* out) { static_cast<Step*>(step)->logits(hidden, count, out); }

void rk_v41_learn(void* step, const float* features, const int64_t* positions, int32_t count, uint8_t* rows) {
    static_cast<Step*>(step)->learn(features, positions, count, rows);
}

int rk_v41_draft(void* step, const V41Span* spans, int32_t num_spans, const int64_t* anchors, float* hidden, float* logits) {
    try {
        static_cast<Step*>(step)->draft(spans, num_spans, anchors, hidden, logits);
        return 0;
    } catch (...) {
        return -1;
    }
}

void rk_v41_follow(void* step, const int64_t* tokens, int32_t count, const float* hidden, float* logits, float* confidence, int32_t apart) {
    static_cast<Step*>(step)->follow(tokens, count, hidden, logits, confidence, apart);
}
}
