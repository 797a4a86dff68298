#include "v41_streams.h"

#include <algorithm>

namespace rackserve::v41 {

namespace {

// The sum over sources (rows of four lanes) or over targets (lanes of a row) of a 4 x 4 matrix, in order, in every lane.
F32 over_sources(F32 v) {
    const F32 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const F32 b = __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
    const F32 c = __builtin_shufflevector(v, v, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11);
    const F32 d = __builtin_shufflevector(v, v, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15);
    return ((a + b) + c) + d;
}

F32 over_targets(F32 v) {
    const F32 a = __builtin_shufflevector(v, v, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const F32 b = __builtin_shufflevector(v, v, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13);
    const F32 c = __builtin_shufflevector(v, v, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14);
    const F32 d = __builtin_shufflevector(v, v, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15);
    return ((a + b) + c) + d;
}

F32 most_of_targets(F32 v) {
    F32 most = v;
    for (int lane = 0; lane < LANES; lane++) {
        const int first = lane / STREAMS * STREAMS;
        most[lane] = std::max(std::max(v[first], v[first + 1]), std::max(v[first + 2], v[first + 3]));
    }
    return most;
}

}  // namespace

void mix(const float* streams, int hidden, const float* m, const float* scale, const float* base, int iterations, float hc_eps,
         float norm_eps, Mix& out) {
    const int width = STREAMS * hidden;
    const float size = 1.0f / std::sqrt(dot(streams, streams, width) / float(width) + norm_eps);
    float given[MIXES];
    for (int i = 0; i < MIXES; i++) given[i] = float(double(m[i] * size) * double(scale[i]) + double(base[i]));
    for (int i = 0; i < STREAMS; i++) {
        out.pre[i] = sigmoid(given[i]) + hc_eps;
        out.post[i] = 2.0f * sigmoid(given[STREAMS + i]);
    }
    const F32 eps = splat(hc_eps), logits = load<F32>(given + 2 * STREAMS);
    F32 comb = power(logits - most_of_targets(logits));
    comb = comb * (splat(1.0f) / over_targets(comb)) + eps;
    comb = comb / (over_sources(comb) + eps);
    for (int i = 1; i < iterations; i++) {
        comb = comb / (over_targets(comb) + eps);
        comb = comb / (over_sources(comb) + eps);
    }
    store(out.comb, comb);
}

void collapse(const float* streams, const float* pre, int hidden, float* out) {
    for (int at = 0; at < hidden; at += LANES) {
        F32 sum = splat(pre[0]) * load<F32>(streams + at);
        for (int s = 1; s < STREAMS; s++) sum += splat(pre[s]) * load<F32>(streams + size_t(s) * hidden + at);
        store(out + at, sum);
    }
}

void expand(const float* y, const Mix& mix, int hidden, float* streams) {
    for (int at = 0; at < hidden; at += LANES) {
        F32 old[STREAMS];
        for (int s = 0; s < STREAMS; s++) old[s] = load<F32>(streams + size_t(s) * hidden + at);
        const F32 result = load<F32>(y + at);
        for (int target = 0; target < STREAMS; target++) {
            F32 sum = splat(mix.comb[target]) * old[0];
            for (int s = 1; s < STREAMS; s++) sum += splat(mix.comb[s * STREAMS + target]) * old[s];
            store(streams + size_t(target) * hidden + at, splat(mix.post[target]) * result + sum);
        }
    }
}

void mean(const float* streams, int hidden, float* out) {
    for (int at = 0; at < hidden; at += LANES) {
        F32 sum = load<F32>(streams + at);
        for (int s = 1; s < STREAMS; s++) sum += load<F32>(streams + size_t(s) * hidden + at);
        store(out + at, sum * splat(1.0f / STREAMS));
    }
}

void inject(const float* found, const float* weight, int hidden, float eps, float* streams, float* room) {
    const float* value = found + size_t(STREAMS) * hidden;
    const float narrow = float(1.0 / std::sqrt(double(hidden)));
    for (int s = 0; s < STREAMS; s++, found += hidden, weight += hidden, streams += hidden) {
        const float sizes[2] = {dot(streams, streams, hidden) / float(hidden), dot(found, found, hidden) / float(hidden)};
        const float scale = (1.0f / std::sqrt(sizes[0] + eps)) * (1.0f / std::sqrt(sizes[1] + eps));
        for (int at = 0; at < hidden; at += LANES) store(room + at, load<F32>(streams + at) * load<F32>(weight + at));
        const float agree = dot(room, found, hidden) * scale * narrow;
        const float root = std::copysign(std::sqrt(std::max(std::fabs(agree), 1e-6f)), agree);
        const F32 gate = splat(sigmoid(root));
        for (int at = 0; at < hidden; at += LANES) store(streams + at, load<F32>(streams + at) + gate * load<F32>(value + at));
    }
}

}  // namespace rackserve::v41
