// A fixed team of threads that does one job after another, all members at once. The caller is member 0.
//
// Who waits spins for a short while, because the others are about to arrive, and then sleeps: a rank without a step costs its
// neighbours nothing.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace rackserve {

constexpr int SPINS = 2000;  // about a hundred microseconds

// Returns once `value` is no longer `old`.
template <class T> inline void await_change(std::atomic<T>& value, T old) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__) || defined(__i386__)
        _mm_pause();
#endif
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class Team {
  public:
    // cores: where to run the members behind the caller, one each; null: wherever the system wants. Throws where the system has no
    // room for so many.
    explicit Team(int members, const int32_t* cores = nullptr);
    ~Team();
    int size() const { return members_; }

    // Calls job(member) on every member and returns when all have.
    void run(const std::function<void(int)>& job);

  private:
    void work(int member);
    void end();

    const int members_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(64) std::atomic<int32_t> round_{0};
    alignas(64) std::atomic<int32_t> busy_{0};
    std::atomic<bool> ends_{false};
};

// Waits at a point that all members of a team pass.
class Barrier {
  public:
    explicit Barrier(int members) : members_(members) {}
    void wait() {
        if (members_ == 1) return;
        const int32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
            return;
        }
        await_change(phase_, phase);
    }

  private:
    const int members_;
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<int32_t> phase_{0};
};

}  // namespace rackserve
