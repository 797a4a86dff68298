// A fixed team of threads that does one job after another, all members at once. The caller is member 0.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace rackserve {

class Team {
  public:
    explicit Team(int members);
    ~Team();
    int size() const { return members_; }

    // Calls job(member) on every member and returns when all have.
    void run(const std::function<void(int)>& job);

  private:
    void work(int member);

    const int members_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* job_ = nullptr;
    std::atomic<unsigned> round_{0};
    std::atomic<int> busy_{0};
    std::atomic<bool> ends_{false};
};

// Waits at a point that all members of a team pass. Spins for a while, then lets others run.
class Barrier {
  public:
    explicit Barrier(int members) : members_(members) {}
    void wait() {
        if (members_ == 1) return;
        const unsigned phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++)
            if (spins > 20000) std::this_thread::yield();
    }

  private:
    const int members_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> phase_{0};
};

}  // namespace rackserve
