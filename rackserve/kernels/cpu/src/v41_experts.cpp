// The expert sublayer of a step: each row goes to the experts it is routed to and to the shared one, each expert's weights are read
// once.

#include <algorithm>

#include "v41_step.h"

namespace rackserve::v41 {

// From the result of the attention of a row.
void Step::into_experts(int member, const V41Block& block, int row, const float* y) {
    const Mix& mix = *mix_.at(row);
    float* x = x_.at(size_t(row) * m_.hidden);
    expand(y, mix, m_.hidden, streams(row));
    collapse(streams(row), mix.pre, m_.hidden, x);
    rms_norm(x, block.ffn_norm, m_.hidden, m_.norm_eps, x);
    if (m_.round_inputs) round_row(x, m_.hidden, x8_.at(size_t(row) * m_.hidden), member);
}

// The `top` experts with the largest score and bias, the lowest number first among equals; the bias does not weigh.
void Step::route(int member, const V41Block& block) {
    const int routed = block.num_experts - 1, top = block.top, stride = block.gate.outputs;
    share(member, rows_, [&](int row) {
        mix(streams(row), m_.hidden, mixes_.at(size_t(row) * MIXES_WIDE), block.ffn_mixer.scale, block.ffn_mixer.base, m_.iterations,
            m_.hc_eps, m_.norm_eps, *mix_.at(row));
        float* scores = gates_.at(size_t(row) * stride);
        int32_t* chosen = chosen_.at(size_t(row) * top);
        float* weights = weights_.at(size_t(row) * top);
        for (int expert = 0; expert < routed; expert++) scores[expert] = std::sqrt(softplus(scores[expert]));
        for (int slot = 0; slot < top; slot++) {
            int best = -1;
            float most = 0.0f;
            for (int expert = 0; expert < routed; expert++) {
                const float value = scores[expert] + block.bias[expert];
                if (std::find(chosen, chosen + slot, expert) == chosen + slot && (best < 0 || value > most)) best = expert, most = value;
            }
            chosen[slot] = best;
            weights[slot] = scores[best];
        }
        float sum = weights[0];
        for (int slot = 1; slot < top; slot++) sum += weights[slot];
        for (int slot = 0; slot < top; slot++) {
            if (top > 1) weights[slot] /= sum + 1e-20f;
            weights[slot] *= m_.routed_scale;
        }
    });
}

// Orders rows by expert: `place_` of each row and slot, `row_at_` each place, `begin_of_` each expert. The shared one has all rows.
void Step::group(const V41Block& block) {
    const int routed = block.num_experts - 1, count = rows_ * block.top;
    std::fill(begin_of_.begin(), begin_of_.begin() + block.num_experts + 1, 0);
    for (int at = 0; at < count; at++) begin_of_[*chosen_.at(at) + 1]++;
    for (int expert = 0; expert < routed; expert++) begin_of_[expert + 1] += begin_of_[expert];
    for (int at = 0; at < count; at++) {
        const int place = begin_of_[*chosen_.at(at)]++;
        place_[at] = place;
        row_at_[place] = at / block.top;
    }
    for (int expert = routed; expert > 0; expert--) begin_of_[expert] = begin_of_[expert - 1];
    begin_of_[0] = 0;
    begin_of_[routed + 1] = count + rows_;
}

// The shared expert's products of the rows themselves need no routing. Its places come after those of the routed ones.
void Step::shared_inputs(int member, const V41Block& block) {
    const V41Expert& shared = block.experts[block.num_experts - 1];
    const size_t at = size_t(rows_) * block.top * m_.inner;
    multiply(member, shared.w1, rounded(x_, x8_), m_.hidden, rows_, gate_part_.at(at), m_.inner);
    multiply(member, shared.w3, rounded(x_, x8_), m_.hidden, rows_, up_part_.at(at), m_.inner);
}

void Step::experts(int member, const V41Block& block) {
    const int routed = block.num_experts - 1, count = rows_ * block.top, hidden = m_.hidden, inner = m_.inner;
    const float* x = rounded(x_, x8_);
    share(member, count, [&](int at) { std::copy_n(x + size_t(row_at_[at]) * hidden, hidden, gathered_.at(size_t(at) * hidden)); });
    barrier_.wait();
    for (int expert = 0; expert < routed; expert++) {
        const int first = begin_of_[expert], rows = begin_of_[expert + 1] - first;
        if (!rows) continue;
        const float* from = gathered_.at(size_t(first) * hidden);
        multiply(member, block.experts[expert].w1, from, hidden, rows, gate_part_.at(size_t(first) * inner), inner);
        multiply(member, block.experts[expert].w3, from, hidden, rows, up_part_.at(size_t(first) * inner), inner);
    }
    if (!shares_early()) shared_inputs(member, block);
    barrier_.wait();
    share(member, count, [&](int at) {  // by row and slot: there the weight is known
        const F32 weight = splat(*weights_.at(at));
        float* gate = gate_part_.at(size_t(place_[at]) * inner);
        activate(gate, up_part_.at(size_t(place_[at]) * inner), &weight);
        if (m_.round_inputs) round_row(gate, inner, gate, member);
    });
    share(member, rows_, [&](int row) {
        float* gate = gate_part_.at(size_t(count + row) * inner);
        activate(gate, up_part_.at(size_t(count + row) * inner), nullptr);
        if (m_.round_inputs) round_row(gate, inner, gate, member);
    });
    barrier_.wait();
    for (int expert = 0; expert <= routed; expert++) {
        const int first = begin_of_[expert], rows = begin_of_[expert + 1] - first;
        if (rows) multiply(member, block.experts[expert].w2, gate_part_.at(size_t(first) * inner), inner, rows, results_.at(size_t(first) * hidden), hidden);
    }
}

void Step::activate(float* gate, const float* up, const F32* weight) const {
    const F32 limit = splat(m_.swiglu_limit);
    for (int at = 0; at < m_.inner; at += LANES) {
        F32 g = load<F32>(gate + at), u = load<F32>(up + at);
        g = g > limit ? limit : g;
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
        const F32 active = silu(g) * u;
        store(gate + at, weight ? active * *weight : active);
    }
}

// The results of rows [begin, begin + count) over their experts, this member's columns.
void Step::combine(int member, const V41Block& block, int begin, int count, float* out) {
    const int top = block.top, hidden = m_.hidden;
    const auto [first, end] = columns(member, hidden);
    for (int row = begin; row < begin + count; row++, out += hidden) {
        const float* shared = results_.at((size_t(rows_) * top + row) * hidden);
        for (int at = first; at < end; at += LANES) {
            F32 sum = load<F32>(results_.at(size_t(place_[row * top]) * hidden + at));
            for (int slot = 1; slot < top; slot++) sum += load<F32>(results_.at(size_t(place_[row * top + slot]) * hidden + at));
            store(out + at, sum + load<F32>(shared + at));
        }
    }
}

void Step::out_of_experts(int row, const float* y) {
    const Mix& mix = *mix_.at(row);
    expand(y, mix, m_.hidden, streams(row));
    std::copy_n(mix.pre, STREAMS, pre_.at(size_t(row) * STREAMS));
}

}  // namespace rackserve::v41
