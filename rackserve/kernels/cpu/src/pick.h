// The likeliest token of a row, found as its logits come, so that nobody reads a whole vocabulary again for it.
#pragma once

#include <cmath>
#include <cstdint>

extern "C" {

// A token and its logit.
struct RkPick {
    int32_t token;
    float logit;
};
}

namespace rackserve {

constexpr RkPick NOTHING = {0, -INFINITY};  // before the first logit; the answer, too, where all are minus infinity

// `next`, of later tokens than `best`, where it is likelier. The lowest id among equals; a NaN counts as the largest, the first
// among several.
inline void prefer(RkPick& best, const RkPick& next) {
    if (best.logit == best.logit && !(next.logit <= best.logit)) best = next;
}

// Joins the tokens from `first` on, `count` of them (a multiple of 16), whose logits are given.
void prefer(RkPick& best, const float* logits, int count, int first);

}  // namespace rackserve
