// Where the time of a step goes: CPU time of the leading thread, by stage. Costs a branch where it is off.
#pragma once

#include <ctime>

namespace rackserve {

enum Stage { EMBED, NORM, QKV, PLACE, ATTEND, JOIN, OUTPUT, GATE_UP, ACTIVATE, DOWN, HEAD, WAIT, STAGES };

constexpr const char* STAGE_NAMES[STAGES] = {"embed", "norm", "qkv", "place", "attend", "join", "output", "gate_up", "activate", "down", "head", "wait"};

class StageClock {
  public:
    // Begins again from zero.
    void set(bool on) {
        on_ = on;
        for (double& seconds : seconds_) seconds = 0.0;
    }
    void begin() {
        if (on_) last_ = now();
    }
    // What the thread did since `begin` or the last `end` was `stage`.
    void end(Stage stage) {
        if (!on_) return;
        const double here = now();
        seconds_[stage] += here - last_;
        last_ = here;
    }
    double seconds(int stage) const { return seconds_[stage]; }

  private:
    static double now() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
    }
    bool on_ = false;
    double last_ = 0.0, seconds_[STAGES] = {};
};

}  // namespace rackserve
