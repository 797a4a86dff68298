// A Llama decoder's step as one call: all rows of a batch through all layers, over buffers that are planned once.

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "team.h"

using namespace rackserve;

extern "C" {

struct RkLayer {
    const float* attention_norm;
    const float* ffn_norm;
    Matrix qkv, output, gate_up, down;
};

struct RkModel {
    int32_t hidden, heads, kv_heads, head_dim, ffn, vocab, layers, max_rows;
    float norm_eps;
    const RkLayer* layer;
    const float* norm;
    Matrix embedding, head;
    const float* cosine;  // [positions][head dim / 2]
    const float* sine;
};

// `rows` consecutive positions from `start` on of a sequence whose KV lies in `blocks`.
struct RkSpan {
    const int32_t* blocks;
    int32_t start, rows;
};
}

namespace {

// Memory that begins on a cache line.
template <class T> class Buffer {
  public:
    explicit Buffer(size_t count) : data_(static_cast<T*>(::operator new[](count * sizeof(T) + 64, std::align_val_t(64)))) {}
    ~Buffer() { ::operator delete[](data_, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    T* at(size_t index = 0) { return data_ + index; }

  private:
    T* data_;
};

struct Task {
    int span, kv_head, first_row, queries, parts;
    size_t slot;  // of its first partial
};

class Decoder {
  public:
    Decoder(const RkModel& model, const Cache& cache, int threads)
        : m_(model), cache_(cache), team_(threads), barrier_(team_.size()),
          wide_(std::max({model.hidden, model.heads * model.head_dim, model.ffn})),
          hidden_(size_t(model.max_rows) * model.hidden), normed_(size_t(model.max_rows) * wide_),
          qkv_(size_t(model.max_rows) * qkv_width()), mixed_(size_t(model.max_rows) * model.heads * model.head_dim),
          gates_(size_t(model.max_rows) * 2 * model.ffn), highs_(size_t(model.max_rows) * wide_), lows_(size_t(model.max_rows) * wide_),
          scales_(size_t(model.max_rows) * wide_ / GROUP), sums_(size_t(model.max_rows) * wide_ / GROUP),
          scratch_(team_.size()) {}

    void forward(const RkSpan* spans, int num_spans, const int32_t* tokens) {
        plan(spans, num_spans);
        team_.run([&](int member) { run(member, spans, tokens); });
    }

    void logits(const int32_t* wanted, int count, float* out) {
        for (int begin = 0; begin < count; begin += m_.max_rows) {
            const int rows = std::min(count - begin, m_.max_rows);
            team_.run([&](int member) {
                share(member, rows, [&](int row) {
                    normalise(hidden_.at(size_t(wanted[begin + row]) * m_.hidden), m_.norm, normed_.at(size_t(row) * m_.hidden));
                    quantise_row(normed_.at(size_t(row) * m_.hidden), row, m_.hidden, m_.head);
                });
                barrier_.wait();
                multiply(member, m_.head, normed_.at(), rows, out + size_t(begin) * m_.vocab, m_.vocab, false);
            });
        }
    }

  private:
    int qkv_width() const { return (m_.heads + 2 * m_.kv_heads) * m_.head_dim; }

    template <class F> void share(int member, int count, F each) {
        const int begin = int(int64_t(count) * member / team_.size()), end = int(int64_t(count) * (member + 1) / team_.size());
        for (int at = begin; at < end; at++) each(at);
    }

    // Every member computes all rows of its own part of the outputs: each weight is read by one core only.
    void multiply(int member, const Matrix& matrix, const float* rows, int count, float* out, int stride, bool add) {
        const int tiles = matrix.outputs / LANES, size = team_.size();
        const int begin = int(int64_t(tiles) * member / size) * LANES, end = int(int64_t(tiles) * (member + 1) / size) * LANES;
        const Inputs inputs{highs_.at(), lows_.at(), scales_.at(), sums_.at(), rows};
        product(matrix, inputs, count, begin, end, out, stride, add);
    }

    void quantise_row(const float* from, int row, int inputs, const Matrix& matrix) {
        if (matrix.kind == BF16) return;
        const size_t groups = inputs / GROUP;
        quantise(from, inputs, highs_.at(size_t(row) * inputs), lows_.at(size_t(row) * inputs), scales_.at(row * groups), sums_.at(row * groups));
    }

    void normalise(const float* from, const float* weight, float* to) const {
        F32 squares = {};
        for (int at = 0; at < m_.hidden; at += LANES) {
            const F32 x = load<F32>(from + at);
            squares = fma(x, x, squares);
        }
        const F32 scale = splat(1.0f / std::sqrt(sum(squares) / float(m_.hidden) + m_.norm_eps));
        for (int at = 0; at < m_.hidden; at += LANES) store(to + at, load<F32>(from + at) * scale * load<F32>(weight + at));
    }

    void plan(const RkSpan* spans, int num_spans) {
        tasks_.clear();
        rows_ = 0;
        size_t slots = 0;
        const int shared = m_.heads / m_.kv_heads, rows_of_tile = std::max(1, TILE / shared);
        first_row_.clear();
        owner_.clear();
        for (int s = 0; s < num_spans; s++) {
            first_row_.push_back(rows_);
            owner_.insert(owner_.end(), spans[s].rows, s);
            for (int row = 0; row < spans[s].rows; row += rows_of_tile) {
                const int rows = std::min(rows_of_tile, spans[s].rows - row);
                const int parts = (spans[s].start + row + rows - 1) / PART + 1;
                for (int kv = 0; kv < m_.kv_heads; kv++) {
                    tasks_.push_back({s, kv, row, rows * shared, parts, slots});
                    slots += size_t(parts) * rows * shared;
                }
            }
            rows_ += spans[s].rows;
        }
        // One piece of work is one part of one task: a long context is shared by all members, a short one is one piece.
        pieces_.clear();
        for (size_t task = 0; task < tasks_.size(); task++)
            for (int part = 0; part < tasks_[task].parts; part++) pieces_.push_back({int(task), part});
        partials_.resize(slots);
        parts_.resize(slots * m_.head_dim);
    }

    void run(int member, const RkSpan* spans, const int32_t* tokens) {
        const int width = qkv_width(), mixed_width = m_.heads * m_.head_dim;
        share(member, rows_, [&](int row) { unpack_row(m_.embedding, tokens[row], hidden_.at(size_t(row) * m_.hidden)); });
        for (int number = 0; number < m_.layers; number++) {
            const RkLayer& layer = m_.layer[number];
            share(member, rows_, [&](int row) {
                float* normed = normed_.at(size_t(row) * m_.hidden);
                normalise(hidden_.at(size_t(row) * m_.hidden), layer.attention_norm, normed);
                quantise_row(normed, row, m_.hidden, layer.qkv);
            });
            if (member == 0) next_.store(0, std::memory_order_relaxed), joined_.store(0, std::memory_order_relaxed);
            barrier_.wait();
            multiply(member, layer.qkv, normed_.at(), rows_, qkv_.at(), width, false);
            barrier_.wait();
            share(member, rows_, [&](int row) { place(row, number, spans[owner_[row]]); });
            barrier_.wait();
            for (int piece; (piece = next_.fetch_add(1)) < int(pieces_.size());) attend(member, number, pieces_[piece], spans);
            barrier_.wait();
            for (int task; (task = joined_.fetch_add(1)) < int(tasks_.size());) join(tasks_[task]);
            barrier_.wait();
            share(member, rows_, [&](int row) {
                quantise_row(mixed_.at(size_t(row) * mixed_width), row, mixed_width, layer.output);
            });
            barrier_.wait();
            multiply(member, layer.output, mixed_.at(), rows_, hidden_.at(), m_.hidden, true);
            barrier_.wait();
            share(member, rows_, [&](int row) {
                float* normed = normed_.at(size_t(row) * m_.hidden);
                normalise(hidden_.at(size_t(row) * m_.hidden), layer.ffn_norm, normed);
                quantise_row(normed, row, m_.hidden, layer.gate_up);
            });
            barrier_.wait();
            multiply(member, layer.gate_up, normed_.at(), rows_, gates_.at(), 2 * m_.ffn, false);
            barrier_.wait();
            share(member, rows_, [&](int row) {
                float* gate = gates_.at(size_t(row) * 2 * m_.ffn);
                float* active = normed_.at(size_t(row) * m_.ffn);
                for (int at = 0; at < m_.ffn; at += LANES) {
                    const F32 x = load<F32>(gate + at), up = load<F32>(gate + m_.ffn + at);
                    // e^-|x| stays in reach of exp on both sides of zero.
                    const F32 small = exp((F32)((U32)x | 0x80000000u));
                    const F32 one = splat(1.0f), share = x > 0.0f ? one / (one + small) : small / (one + small);
                    store(active + at, x * share * up);
                }
                quantise_row(active, row, m_.ffn, layer.down);
            });
            barrier_.wait();
            multiply(member, layer.down, normed_.at(), rows_, hidden_.at(), m_.hidden, true);
            barrier_.wait();
        }
    }

    // Turns queries and keys by their position, scales the queries, and stores keys and values in their block.
    void place(int row, int layer, const RkSpan& span) {
        const int position = span.start + row - first_row_[owner_[row]], dim = m_.head_dim, half = dim / 2;
        float* heads = qkv_.at(size_t(row) * qkv_width());
        const float* cosine = m_.cosine + size_t(position) * half;
        const float* sine = m_.sine + size_t(position) * half;
        const float scale = 1.0f / std::sqrt(float(dim));
        for (int head = 0; head < m_.heads + m_.kv_heads; head++) {
            float* at = heads + head * dim;
            const float factor = head < m_.heads ? scale : 1.0f;
            for (int d = 0; d < half; d++) {
                const float low = at[d], high = at[half + d];
                at[d] = (low * cosine[d] - high * sine[d]) * factor;
                at[half + d] = (high * cosine[d] + low * sine[d]) * factor;
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

    void attend(int member, int layer, const std::pair<int, int>& piece, const RkSpan* spans) {
        const Task& task = tasks_[piece.first];
        const int shared = m_.heads / m_.kv_heads, dim = m_.head_dim;
        float queries[TILE * MAX_HEAD];
        int32_t last[TILE];
        for (int q = 0; q < task.queries; q++) {
            const int row = first_row_[task.span] + task.first_row + q / shared;
            const float* from = qkv_.at(size_t(row) * qkv_width() + (task.kv_head * shared + q % shared) * dim);
            std::copy(from, from + dim, queries + q * dim);
            last[q] = spans[task.span].start + task.first_row + q / shared;
        }
        const size_t slot = task.slot + size_t(piece.second) * task.queries;
        attend_part(scratch_[member], cache_, layer, task.kv_head, spans[task.span].blocks, piece.second * PART, task.queries, queries, last,
                    &partials_[slot], &parts_[slot * dim]);
    }

    void join(const Task& task) {
        const int shared = m_.heads / m_.kv_heads, dim = m_.head_dim;
        for (int q = 0; q < task.queries; q++) {
            const int row = first_row_[task.span] + task.first_row + q / shared;
            float* to = mixed_.at((size_t(row) * m_.heads + task.kv_head * shared + q % shared) * dim);
            join_parts(&partials_[task.slot + q], &parts_[(task.slot + q) * dim], task.parts, task.queries, dim, to);
        }
    }

    const RkModel m_;
    const Cache cache_;
    Team team_;
    Barrier barrier_;
    const int wide_;
    int rows_ = 0;
    Buffer<float> hidden_, normed_, qkv_, mixed_, gates_;
    Buffer<int8_t> highs_, lows_;
    Buffer<float> scales_, sums_;
    std::vector<Task> tasks_;
    std::vector<std::pair<int, int>> pieces_;
    std::vector<int> first_row_, owner_;
    std::vector<Partial> partials_;
    std::vector<float> parts_;
    std::vector<Scratch> scratch_;
    std::atomic<int> next_{0}, joined_{0};
};

}  // namespace

extern "C" {

int rk_abi() { return 2; }

const char* rk_path() {
#if defined(__AVX512VNNI__)
    return "avx512-vnni";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "portable";
#endif
}

void* rk_decoder_new(const RkModel* model, void* cache, int32_t wide, int32_t block_tokens, int32_t threads) {
    try {
        const Cache kv{static_cast<uint8_t*>(cache), wide, model->layers, model->kv_heads, model->head_dim, block_tokens};
        return new Decoder(*model, kv, threads);
    } catch (...) {
        return nullptr;
    }
}

void rk_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

// Returns 0, or 1 where memory ran out.
int rk_decoder_forward(void* decoder, const RkSpan* spans, int32_t num_spans, const int32_t* tokens) {
    try {
        static_cast<Decoder*>(decoder)->forward(spans, num_spans, tokens);
        return 0;
    } catch (...) {
        return 1;
    }
}

int rk_decoder_logits(void* decoder, const int32_t* rows, int32_t count, float* out) {
    try {
        static_cast<Decoder*>(decoder)->logits(rows, count, out);
        return 0;
    } catch (...) {
        return 1;
    }
}

void rk_product(const Matrix* matrix, const float* rows, int32_t count, float* out) {
    std::vector<int8_t> highs(size_t(count) * matrix->inputs), lows(highs.size());
    std::vector<float> scales(highs.size() / GROUP), sums(highs.size() / GROUP);
    for (int row = 0; matrix->kind != BF16 && row < count; row++) {
        const size_t groups = matrix->inputs / GROUP;
        quantise(rows + size_t(row) * matrix->inputs, matrix->inputs, &highs[size_t(row) * matrix->inputs],
                 &lows[size_t(row) * matrix->inputs], &scales[row * groups],
                 &sums[row * groups]);
    }
    product(*matrix, {highs.data(), lows.data(), scales.data(), sums.data(), rows}, count, 0, matrix->outputs, out, matrix->outputs, false);
}

void rk_unpack_row(const Matrix* matrix, int32_t output, float* row) { unpack_row(*matrix, output, row); }
}
