// The kernels of a step one at a time, so that each can be tried against a plain computation.

#include "v41_attend.h"
#include "v41_matrix.h"
#include "v41_streams.h"

using namespace rackserve::v41;

extern "C" {

void rk_v41_product(const Matrix* matrix, const float* rows, int32_t count, float* out) {
    std::vector<float> panel(PANEL);
    product(*matrix, rows, matrix->inputs, count, 0, matrix->outputs, out, matrix->outputs, panel.data());
}

// kind: 0 fp8, 1 fp4, 2 fp4 with fine scales.
void rk_v41_pack(int32_t kind, const float* x, int32_t n, uint8_t* row) { (kind == 0 ? pack_fp8 : kind == 1 ? pack_fp4 : pack_fp4_fine)(x, n, row); }

void rk_v41_unpack(int32_t kind, const uint8_t* row, int32_t n, float* x) {
    (kind == 0 ? unpack_fp8 : kind == 1 ? unpack_fp4 : unpack_fp4_fine)(row, n, x);
}

void rk_v41_rms_norm(const float* x, const float* weight, int32_t n, float eps, float* out) { rms_norm(x, weight, n, eps, out); }

void rk_v41_silu(const float* x, int32_t n, float* out) {
    for (int at = 0; at < n; at += rackserve::LANES) rackserve::store(out + at, silu(rackserve::load<rackserve::F32>(x + at)));
}

void rk_v41_turns(const float* freqs, int32_t pairs, int64_t position, float* out) { turns(freqs, pairs, position, out); }

void rk_v41_rotate(float* x, int32_t n, const float* turn, int32_t pairs, int32_t back) { rotate(x, n, turn, pairs, back != 0); }

// out: pre [4], post [4], comb [4][4].
void rk_v41_mix(const float* streams, int32_t hidden, const float* m, const float* scale, const float* base, int32_t iterations, float hc_eps,
                float norm_eps, float* out) {
    Mix found;
    mix(streams, hidden, m, scale, base, iterations, hc_eps, norm_eps, found);
    std::memcpy(out, &found, sizeof found);
}

void rk_v41_collapse(const float* streams, const float* pre, int32_t hidden, float* out) { collapse(streams, pre, hidden, out); }

// mixed: as `rk_v41_mix` writes it.
void rk_v41_expand(const float* y, const float* mixed, int32_t hidden, float* streams) {
    Mix mix;
    std::memcpy(&mix, mixed, sizeof mix);
    expand(y, mix, hidden, streams);
}

void rk_v41_mean(const float* streams, int32_t hidden, float* out) { mean(streams, hidden, out); }

void rk_v41_inject(const float* found, const float* weight, int32_t hidden, float eps, float* streams) {
    std::vector<float> room(hidden);
    inject(found, weight, hidden, eps, streams, room.data());
}

// rows [count][dim], of which those with `there` exist.
void rk_v41_attend(const float* queries, int32_t heads, int32_t dim, const float* rows, const uint8_t* there, int32_t count, const float* sink,
                   float* out) {
    const int wide = (heads + rackserve::LANES - 1) / rackserve::LANES * rackserve::LANES;
    Room room;
    room.across.resize(size_t(dim) * wide);
    room.shares.resize(size_t(count) * wide);
    for (int at = 0; at < count; at++) room.rows.push_back(there[at] ? rows + size_t(at) * dim : nullptr);
    attend(room, queries, heads, dim, count, sink, out);
}

// keys: packed rows one after the other.
void rk_v41_score(const uint8_t* keys, int32_t n, const float* queries, const float* weights, int32_t heads, int32_t dim, float* out) {
    const int64_t block = 0;
    Room room;
    room.keys.resize(size_t(dim) * rackserve::LANES);
    room.scores.resize(size_t(n) + rackserve::LANES);
    const Stored stored{keys, 0, n, dim / 2 + dim / WIDE, &block};
    score(room, stored, &queries, &weights, &n, 1, heads, dim, room.scores.size());
    std::memcpy(out, room.scores.data(), size_t(n) * sizeof(float));
}

void rk_v41_best(const float* scores, int32_t n, int32_t count, int32_t* chosen) {
    Room room;
    best(room, scores, n, count, chosen);
}

void rk_v41_candidates(const float* scores, int32_t n, int32_t size, int32_t count, uint8_t* mask) {
    Room room;
    candidates(room, scores, n, size, count, mask);
}
}
