// What Python calls (library.py, decoder.py).

#include "decoder.h"

using namespace rackserve;

extern "C" {

int rk_abi() { return 6; }

const char* rk_path() {
#if defined(__AVX512VNNI__)
    return "avx512-vnni";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "portable";
#endif
}

// Null where the system has no memory, or no more threads.
void* rk_decoder_new(const RkModel* model, void* cache, int32_t wide, int32_t block_tokens, int32_t threads, const int32_t* cores) {
    try {
        const Cache kv{static_cast<uint8_t*>(cache), wide, model->layers, model->kv_heads, model->head_dim, block_tokens};
        return new Decoder(*model, kv, threads, cores);
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

int rk_decoder_logits(void* decoder, const int32_t* rows, int32_t count, RkPick* picks, float* out, int32_t full) {
    try {
        static_cast<Decoder*>(decoder)->logits(rows, count, picks, out, full);
        return 0;
    } catch (...) {
        return 1;
    }
}

// Null behind the last.
const char* rk_stage_name(int32_t stage) { return stage >= 0 && stage < STAGES ? STAGE_NAMES[stage] : nullptr; }

// Begins to count the leading thread's CPU time by stage, from zero on, or ends it.
void rk_decoder_time(void* decoder, int32_t on) { static_cast<Decoder*>(decoder)->clock().set(on != 0); }

// Seconds by stage.
void rk_decoder_times(void* decoder, double* seconds) {
    for (int stage = 0; stage < STAGES; stage++) seconds[stage] = static_cast<Decoder*>(decoder)->clock().seconds(stage);
}

// Of a row that comes in parts; the first has no tokens and sets `best`.
void rk_pick(const float* logits, int32_t count, int32_t first, RkPick* best) {
    if (!count) *best = NOTHING;
    prefer(*best, logits, count, first);
}

void rk_product(const Matrix* matrix, const float* rows, int32_t count, float* out) {
    const int inputs = matrix->inputs;
    const size_t groups = inputs / GROUP;
    std::vector<float> scales(count * groups), sums(count * groups);
    std::vector<uint8_t> fine(count * groups);
    if (takes_many(*matrix, count)) {
        std::vector<int32_t> pairs(size_t(count) * inputs / 2);
        std::vector<Unit> units(count * groups);
        const ManyInputs many{pairs.data(), scales.data(), sums.data(), fine.data(), units.data()};
        for (int row = 0; row < count; row++) quantise_many(rows + size_t(row) * inputs, *matrix, row, count, many);
        Panel panel(inputs);
        product_many(panel, *matrix, many, count, 0, matrix->outputs, out, matrix->outputs, false);
        return;
    }
    std::vector<int8_t> highs(size_t(count) * inputs), lows(highs.size());
    const Inputs few{highs.data(), lows.data(), scales.data(), sums.data(), fine.data(), rows};
    for (int row = 0; matrix->kind != BF16 && row < count; row++) quantise(rows + size_t(row) * inputs, *matrix, row, few);
    product(*matrix, few, count, 0, matrix->outputs, out, matrix->outputs, false);
}

void rk_unpack_row(const Matrix* matrix, int32_t output, float* row) { unpack_row(*matrix, output, row); }
}
