#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace rackserve {

namespace {

// A core that this process may not use leaves the thread where it is: only speed depends on it.
void pin(std::thread& thread, int core) {
#if defined(__linux__)
    if (core < 0 || core >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#else
    (void)thread, (void)core;
#endif
}

}  // namespace

Team::Team(int members, const int32_t* cores) : members_(members < 1 ? 1 : members) {
    try {
        for (int member = 1; member < members_; member++) {
            threads_.emplace_back([this, member] { work(member); });
            if (cores != nullptr) pin(threads_.back(), cores[member]);
        }
    } catch (...) {
        end();
        throw;
    }
}

Team::~Team() { end(); }

void Team::end() {
    ends_.store(true, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
    if (members_ == 1) {
        job(0);
        return;
    }
    job_ = &job;
    busy_.store(members_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    job(0);
    for (int32_t busy; (busy = busy_.load(std::memory_order_acquire)) > 0;) await_change(busy_, busy);
}

void Team::work(int member) {
    for (int32_t seen = 0;; seen++) {
        await_change(round_, seen);
        if (ends_.load(std::memory_order_relaxed)) return;
        (*job_)(member);
        if (busy_.fetch_sub(1, std::memory_order_release) == 1) busy_.notify_one();
    }
}

}  // namespace rackserve
