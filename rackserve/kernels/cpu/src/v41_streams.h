// The four residual streams of a row: how a sublayer's input is collapsed from them, how its result is mixed in, and how Engram's
// rows enter them.
#pragma once

#include "v41_rows.h"

namespace rackserve::v41 {

constexpr int STREAMS = 4;
constexpr int MIXES = (2 + STREAMS) * STREAMS;  // numbers that a mix is made of: pre, post, comb
constexpr int MIXES_WIDE = 32;                  // filled up to whole tiles

// One row's weights of one sublayer: to collapse the next one's input, and to mix [source][target].
struct Mix {
    float pre[STREAMS], post[STREAMS], comb[STREAMS * STREAMS];
};

// From the product `m` [MIXES] of the streams [4 * hidden] with the mixing matrix.
void mix(const float* streams, int hidden, const float* m, const float* scale, const float* base, int iterations, float hc_eps,
         float norm_eps, Mix& out);

// [4][hidden] -> [hidden]
void collapse(const float* streams, const float* pre, int hidden, float* out);

// Replaces the streams [4][hidden] by what a sublayer's result y [hidden] and they are mixed to.
void expand(const float* y, const Mix& mix, int hidden, float* streams);

// Mean of the streams: [4][hidden] -> [hidden].
void mean(const float* streams, int hidden, float* out);

// Adds to the streams from found [5 * hidden]: a key for each and one value. weight [4][hidden]. room: [hidden].
void inject(const float* found, const float* weight, int hidden, float eps, float* streams, float* room);

}  // namespace rackserve::v41
