// A DeepSeek-V4.1 model and one of its passes, as the caller describes them: plain C, mirrored field by field in v41.py.
#pragma once

#include "mailbox.h"
#include "v41_matrix.h"

extern "C" {

struct V41Mixer {
    rackserve::v41::Matrix fn;
    const float* scale;  // [24]
    const float* base;   // [24]
};

struct V41Expert {
    rackserve::v41::Matrix w1, w2, w3;
};

// A layer's or stage's attention and experts. The shared expert is the last of `experts`.
struct V41Block {
    V41Mixer attn_mixer, ffn_mixer;
    rackserve::v41::Matrix wq_a, wq_b, wkv, wo_a, wo_b, gate;
    const float *attn_norm, *ffn_norm, *q_norm, *kv_norm, *sink, *bias;
    const V41Expert* experts;
    int32_t num_experts, top;
};

struct V41Compressor {
    rackserve::v41::Matrix wkv, gate, wk;
    const float *norm, *k_norm;
    int64_t main, index;  // where rows of a block begin, in bytes
};

struct V41Indexer {
    rackserve::v41::Matrix wq_b, weights;
};

// Which parts a layer has: `compressor`, `indexer`, `engram`, `target` and `open` are numbers into the model's lists, -1: none.
// `source`: the compressor whose rows it reads; `open`: its place among pending tokens, for one that joins two.
struct V41Layer {
    V41Block block;
    int32_t ratio, source, compressor, indexer, engram, target, open, is_candidate_source;
};

struct V41Engram {
    rackserve::v41::Matrix wkv;
    const float* weight;  // [4][hidden]
};

struct V41Draft {
    rackserve::v41::Matrix main, markov;
    const float *main_norm, *norm, *confidence;  // confidence: [hidden + rank]
    const uint16_t* embed;                       // bf16 [vocab][rank]
};

struct V41Model {
    int32_t vocab, hidden, layers, stages, heads, head_dim, pairs, q_rank, o_groups, o_rank, inner, window;
    int32_t index_heads, index_dim, topk, candidate_blocks, candidate_size, first_decoder;
    int32_t engrams, engram_inputs, targets, block_size, noise, markov_rank, iterations;
    int32_t max_rows, block_tokens, round_inputs, experts;  // experts: the most that a block has, the shared one counted
    int32_t inline_shared, early_gathers, fused_sums;       // see v41_tuning.py; no effect on any bit
    float hc_eps, norm_eps, swiglu_limit, routed_scale;
    const V41Layer* layer;
    const V41Compressor* compressor;
    const V41Indexer* indexer;
    const V41Engram* engram;
    const V41Block* stage;
    V41Draft draft;
    rackserve::v41::Matrix head;
    const uint16_t* embed;  // bf16 [vocab][hidden]
    const float* norm;
    const float *freqs, *compressed_freqs;  // [pairs]
    uint8_t* arena;
    int64_t block_bytes;
    // To the other devices of the rank; null: there are none. Otherwise heads, o_groups and inner are this device's, head, embed and
    // those of drafts have its part of the vocabulary in rows, and matrices are cut to match.
    rackserve::Mailbox* mailbox;
};

// Positions [start, start + rows) of a sequence. windows: uint8 [layers + stages][window][row bytes]; valid: [layers + stages];
// open: [.][2][head dim]. replayed, full_from: see Span of the model.
struct V41Span {
    const int64_t* blocks;
    const uint8_t* windows;
    const int64_t* valid;
    const float* open;
    int64_t start, full_from;
    int32_t rows, replayed;
};

// What a pass leaves; each row of the pass has its place in `windows` [layers][max_rows][row bytes], `pending`
// [.][max_rows][2][head dim], `features` [max_rows][targets][hidden]; those that reach the end, one after the other in `hidden`.
// Returned: how many those are.
struct V41Result {
    uint8_t* windows;
    float* pending;
    float* features;
    float* hidden;
};
}
