#include "team.h"

#include <chrono>

namespace rackserve {

Team::Team(int members) : members_(members < 1 ? 1 : members) {
    for (int member = 1; member < members_; member++) threads_.emplace_back([this, member] { work(member); });
}

Team::~Team() {
    ends_.store(true, std::memory_order_release);
    for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
    if (members_ > 1) {
        job_ = &job;
        busy_.store(members_ - 1, std::memory_order_relaxed);
        round_.fetch_add(1, std::memory_order_release);
    }
    job(0);
    while (busy_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

void Team::work(int member) {
    unsigned seen = 0;
    for (int idle = 0; !ends_.load(std::memory_order_acquire);) {
        const unsigned round = round_.load(std::memory_order_acquire);
        if (round == seen) {
            // A rank that waits for its next step must not keep a core from its neighbours.
            if (++idle < 2000) std::this_thread::yield();
            else std::this_thread::sleep_for(std::chrono::microseconds(100));
            continue;
        }
        seen = round;
        idle = 0;
        (*job_)(member);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace rackserve
