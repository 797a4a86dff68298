#include "pick.h"

#include "vectors.h"

namespace rackserve {

void prefer(RkPick& best, const float* logits, int count, int first) {
    F32 most = splat(-INFINITY), odd = {};
    for (int at = 0; at < count; at += LANES) {
        const F32 x = load<F32>(logits + at);
        most = x > most ? x : most;
        odd = fma(x, F32{}, odd);  // zero, but NaN for good where one is not finite
    }
    const float found = sum(odd), top = found == found ? peak(most) : NAN;
    if (top <= best.logit) return;
    for (int at = 0; at < count; at++) {
        prefer(best, {first + at, logits[at]});
        if (best.logit == top) return;
    }
}

}  // namespace rackserve
