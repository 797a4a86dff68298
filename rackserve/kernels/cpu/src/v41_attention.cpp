// The attention sublayer of a step, and what comes before it: Engram, compressed rows.

#include <algorithm>

#include "v41_step.h"

namespace rackserve::v41 {

void Step::inject(int member, const V41Engram& engram, const float* memory) {
    const int inputs = m_.engram_inputs, outputs = engram.wkv.outputs;
    share(member, rows_, [&](int row) {
        const float* from = memory + size_t(kept_[row]) * inputs;
        float* to = wide8_.at(size_t(row) * inputs);
        if (m_.round_inputs) round_fp8(from, inputs, to, rooms_[member].bytes.data());
        else std::copy_n(from, inputs, to);
    });
    barrier_.wait();
    multiply(member, engram.wkv, wide8_.at(), wide_.at());
    barrier_.wait();
    share(member, rows_, [&](int row) {
        v41::inject(wide_.at(size_t(row) * outputs), engram.weight, m_.hidden, m_.norm_eps, streams(row), rooms_[member].line.data());
    });
}

void Step::attention_input(int member, const V41Block& block, int target) {
    share(member, rows_, [&](int row) {
        if (target >= 0) mean(streams(row), m_.hidden, out_.features + (size_t(kept_[row]) * m_.targets + target) * m_.hidden);
        float* x = x_.at(size_t(row) * m_.hidden);
        collapse(streams(row), pre_.at(size_t(row) * STREAMS), m_.hidden, x);
        rms_norm(x, block.attn_norm, m_.hidden, m_.norm_eps, x);
        if (m_.round_inputs) round_row(x, m_.hidden, x8_.at(size_t(row) * m_.hidden), member);
    });
}

// ------------------------------------------------------------ compressed rows

void Step::compress(int member, const V41Layer& layer) {
    const V41Compressor& compressor = m_.compressor[layer.compressor];
    const int dim = m_.head_dim;
    float* pending = layer.open < 0 ? nullptr : out_.pending + size_t(layer.open) * m_.max_rows * 2 * dim;
    if (pending == nullptr) {
        multiply(member, compressor.wkv, x_.at(), kv_.at());
    } else {
        multiply(member, compressor.wkv, x_.at(), m_.hidden, rows_, pending, 2 * dim);
        multiply(member, compressor.gate, x_.at(), m_.hidden, rows_, pending + dim, 2 * dim);
    }
    barrier_.wait();
    share(member, rows_, [&](int row) { compress_row(layer, runs_[run_of_[row]], row, rooms_[member]); });
    barrier_.wait();
}

// The row that becomes complete with a position, if one does and the blocks lack it.
void Step::compress_row(const V41Layer& layer, const Run& run, int row, Room& room) {
    const int dim = m_.head_dim;
    const int64_t position = position_[row], number = position / layer.ratio;
    if ((position + 1) % layer.ratio || number < (run.start + run.replayed) / layer.ratio) return;
    const V41Compressor& compressor = m_.compressor[layer.compressor];
    float *latent = room.line.data(), *key = latent + dim;
    const float* now = kv_.at(size_t(row) * dim);
    if (layer.open >= 0) {
        const float* pending = out_.pending + size_t(layer.open) * m_.max_rows * 2 * dim;
        now = pending + size_t(row) * 2 * dim;
        const float* before = row > run.first ? now - 2 * dim : run.span->open + size_t(layer.open) * 2 * dim;
        for (int at = 0; at < dim; at += LANES) {
            const F32 a = load<F32>(before + dim + at), b = load<F32>(now + dim + at), most = a > b ? a : b;
            const F32 first = power(a - most), second = power(b - most), all = first + second;
            store(latent + at, load<F32>(before + at) * (first / all) + load<F32>(now + at) * (second / all));
        }
        now = latent;
    }
    rms_norm(now, compressor.norm, dim, m_.norm_eps, latent);
    float* rotated = key + std::max(dim, m_.index_dim);
    std::copy_n(latent, dim, rotated);
    float* turned = rotated + dim;
    turns(m_.compressed_freqs, m_.pairs, number * layer.ratio, turned);
    rotate(rotated, dim, turned, m_.pairs, false);
    pack_fp4_fine(rotated, dim, const_cast<uint8_t*>(stored(layer, run, false).at(int(number))));
    product(compressor.wk, latent, dim, 1, 0, compressor.wk.outputs, key, compressor.wk.outputs, room.panel.data());
    rms_norm(key, compressor.k_norm, m_.index_dim, m_.norm_eps, key);
    rotate(key, m_.index_dim, turned, m_.pairs, false);
    pack_fp4(key, m_.index_dim, const_cast<uint8_t*>(stored(layer, run, true).at(int(number))));
}

Stored Step::stored(const V41Layer& layer, const Run& run, bool index) const {
    const V41Compressor& source = m_.compressor[layer.source];
    const int bytes = index ? m_.index_dim / 2 + m_.index_dim / WIDE : m_.head_dim / 2 + m_.head_dim / NARROW;
    return {m_.arena + (index ? source.index : source.main), size_t(m_.block_bytes), m_.block_tokens / layer.ratio, bytes, run.span->blocks};
}

// ------------------------------------------------------------ attention

void Step::attention_products(int member, const V41Layer* layer, const V41Block& block) {
    const float* x = rounded(x_, x8_);
    multiply(member, block.wq_a, x, latent_.at());
    multiply(member, block.wkv, x, kv_.at());
    multiply(member, block.attn_mixer.fn, streams_.at(), mixes_.at());
    if (layer != nullptr && layer->indexer >= 0) multiply(member, m_.indexer[layer->indexer].weights, x_.at(), index_weights_.at());
}

void Step::window_rows(int member, bool compressed, const V41Block& block, int number, uint8_t* packed) {
    const int dim = m_.head_dim, bytes = row_bytes(), before = earlier();
    share(member, rows_, [&](int row) {
        const Run& run = runs_[run_of_[row]];
        float *latent = latent_.at(size_t(row) * m_.q_rank), *kv = kv_.at(size_t(row) * dim);
        rms_norm(latent, block.q_norm, m_.q_rank, m_.norm_eps, latent);
        if (m_.round_inputs) round_row(latent, m_.q_rank, latent8_.at(size_t(row) * m_.q_rank), member);
        rms_norm(kv, block.kv_norm, dim, m_.norm_eps, kv);
        rotate(kv, dim, turn(compressed, row), m_.pairs, false);
        uint8_t* to = packed + size_t(kept_[row]) * bytes;
        pack_fp8(kv, dim, to);
        unpack_fp8(to, dim, context_.data() + run.context + size_t(before + row - run.first) * dim);
        mix(streams(row), m_.hidden, mixes_.at(size_t(row) * MIXES_WIDE), block.attn_mixer.scale, block.attn_mixer.base, m_.iterations,
            m_.hc_eps, m_.norm_eps, *mix_.at(row));
    });
    if (!reads_ahead_ || number == 0 || number == m_.layers) earlier_rows(member, number);
}

// Rows of the windows before this pass, to where their run's rows are read.
void Step::earlier_rows(int member, int number) {
    const int dim = m_.head_dim, bytes = row_bytes(), before = earlier();
    share(member, int(runs_.size()) * before, [&](int at) {
        const Run& run = runs_[at / before];
        const int64_t position = run.start - before + at % before;
        if (position < run.span->valid[number]) return;
        const uint8_t* from = run.span->windows + (size_t(number) * m_.window + position % m_.window) * bytes;
        unpack_fp8(from, dim, context_.data() + run.context + size_t(at % before) * dim);
    });
}

void Step::query_products(int member, const V41Layer* layer, const V41Block& block) {
    const float* latent = rounded(latent_, latent8_);
    multiply(member, block.wq_b, latent, queries_.at());
    if (layer != nullptr && layer->indexer >= 0) multiply(member, m_.indexer[layer->indexer].wq_b, latent, index_queries_.at());
}

void Step::select(int member, const V41Layer& layer) {
    if (layer.is_candidate_source) {
        if (member == 0) {
            int64_t last = 0;
            for (const Run& run : runs_) last = std::max(last, run.start + run.rows);
            candidates_wide_ = size_t(last / layer.ratio / m_.candidate_size + 1);
            if (candidates_.size() < candidates_wide_ * rows_) candidates_.resize(candidates_wide_ * rows_);
            has_candidates_ = true;
        }
        barrier_.wait();
    }
    share(member, int(queries_of_.size()), [&](int at) {
        select_rows(layer, queries_of_[at].first, queries_of_[at].second, rooms_[member]);
    });
}

void Step::select_rows(const V41Layer& layer, int first, int count, Room& room) {
    const int heads = m_.index_heads, dim = m_.index_dim, size = m_.candidate_size, wide = m_.indexer[layer.indexer].weights.outputs;
    const float factor = float(std::pow(double(dim), -0.5) * std::pow(double(heads), -0.5));
    const float *queries[QUERIES], *weights[QUERIES];
    int visible[QUERIES], most = 0;
    for (int i = 0; i < count; i++) {
        float* query = index_queries_.at(size_t(first + i) * heads * dim);
        for (int head = 0; head < heads; head++, query += dim) {
            rotate(query, dim, turn(true, first + i), m_.pairs, false);
            round_fp4(query, dim, query, room.bytes.data());
        }
        float* weight = index_weights_.at(size_t(first + i) * wide);
        for (int head = 0; head < heads; head++) weight[head] *= factor;
        queries[i] = query - size_t(heads) * dim;
        weights[i] = weight;
        visible[i] = int((position_[first + i] + 1) / layer.ratio);
        most = std::max(most, visible[i]);
    }
    const size_t width = size_t(most + LANES - 1) / LANES * LANES;
    if (most > m_.topk) {
        if (room.scores.size() < width * QUERIES) room.scores.resize(width * QUERIES);
        score(room, stored(layer, runs_[run_of_[first]], true), queries, weights, visible, count, heads, dim, width);
    }
    for (int i = 0; i < count; i++) {
        int32_t* chosen = selected_.at(size_t(first + i) * m_.topk);
        float* scores = room.scores.data() + i * width;
        const bool all = visible[i] <= m_.topk, narrowed = (visible[i] + size - 1) / size > m_.candidate_blocks;
        if (all) {  // then all its blocks are candidates, too
            for (int at = 0; at < m_.topk; at++) chosen[at] = std::max(-1, visible[i] - m_.topk + at);
            continue;
        }
        uint8_t* mask = candidates_.data() + size_t(first + i) * candidates_wide_;
        if (layer.is_candidate_source && narrowed) candidates(room, scores, visible[i], size, m_.candidate_blocks, mask);
        else if (has_candidates_ && narrowed)
            for (int at = 0; at < visible[i]; at++)
                if (!mask[at / size]) scores[at] = -INFINITY;
        best(room, scores, visible[i], m_.topk, chosen);
    }
}

void Step::attend_rows(int member, const V41Layer* layer, const V41Block& block, int number) {
    const int dim = m_.head_dim, before = earlier();
    const bool compressed = layer != nullptr && layer->ratio > 0;
    share(member, rows_, [&](int row) {
        Room& room = rooms_[member];
        const Run& run = runs_[run_of_[row]];
        const int from = drafting_ ? 0 : row - run.first, near = drafting_ ? m_.window + run.rows : m_.window;
        for (int slot = 0; slot < near; slot++) {
            const bool there = from + slot >= before || run.start - before + from + slot >= run.span->valid[number];
            room.rows[slot] = there ? context_.data() + run.context + size_t(from + slot) * dim : nullptr;
        }
        int slots = near;
        if (compressed) {
            const Stored main = stored(*layer, run, false);
            const int32_t* chosen = selected_.at(size_t(row) * m_.topk);
            const bool keeps = m_.early_gathers && rows_ <= SMALL, there = keeps && layer->indexer < 0;
            float* to = keeps ? far(row) : room.far.data();
            for (int at = 0; at < m_.topk; at++, slots++, to += dim) {
                room.rows[slots] = chosen[at] < 0 ? nullptr : to;
                if (chosen[at] >= 0 && !there) unpack_fp4_fine(main.at(chosen[at]), dim, to);
            }
        }
        float* queries = queries_.at(size_t(row) * width());
        float* out = attended_.at(size_t(row) * width());
        for (int head = 0; head < m_.heads; head++) rotate(queries + size_t(head) * dim, dim, turn(compressed, row), m_.pairs, false);
        attend(room, queries, m_.heads, dim, slots, block.sink, out);
        for (int head = 0; head < m_.heads; head++) rotate(out + size_t(head) * dim, dim, turn(compressed, row), m_.pairs, true);
    });
}

void Step::attention_output(int member, const V41Block& block) {
    const int groups = m_.o_groups, rank = m_.o_rank, inputs = block.wo_a.inputs, low = groups * rank, size = team_.size();
    // A group's outputs see its own heads alone; members share the tiles of each.
    const int tiles = rank / LANES;
    for (int number = 0; number < groups; number++) {
        const int first = number * rank + tiles * member / size * LANES, end = number * rank + tiles * (member + 1) / size * LANES;
        product(block.wo_a, attended_.at(size_t(number) * inputs), width(), rows_, first, end, low_.at(), low, rooms_[member].panel.data());
    }
    barrier_.wait();
    if (m_.round_inputs) {
        share(member, rows_, [&](int row) { round_row(low_.at(size_t(row) * low), low, low8_.at(size_t(row) * low), member); });
        barrier_.wait();
    }
}

}  // namespace rackserve::v41
