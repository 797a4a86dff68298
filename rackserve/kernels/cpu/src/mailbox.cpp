#include "mailbox.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "team.h"

namespace rackserve {

namespace {

constexpr int64_t YIELDING_NS = 2000000;  // from then on who waits sleeps: a peer that is so late is not computing
constexpr int64_t NAP_NS = 50000;

size_t half_bytes(int lanes, size_t floats) { return size_t(lanes) * 64 + (floats * sizeof(float) + 63) / 64 * 64; }

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

size_t Mailbox::bytes(int devices, int lanes, size_t floats) {
    return size_t(devices) * sizeof(Flag) + size_t(devices) * devices * 2 * half_bytes(lanes, floats);
}

Mailbox::Mailbox(uint8_t* memory, int devices, int device, int lanes, size_t floats, double limit_s)
    : memory_(memory), devices_(devices), device_(device), lanes_(lanes), floats_(floats), stride_(half_bytes(lanes, floats)),
      limit_ns_(int64_t(limit_s * 1e9)), rounds_(lanes) {
    static_assert(sizeof(Flag) == 64 && std::atomic<uint32_t>::is_always_lock_free);
}

Mailbox::~Mailbox() { gone(device_).round.store(1, std::memory_order_release); }

void Mailbox::publish(int lane, int rows, int width, int first, int end) {
    const uint32_t round = rounds_[lane].number;
    const float* from = outgoing(lane);
    for (int to = 0; to < devices_; to++) {
        if (to == device_) continue;
        if (to != next_device())
            for (int row = 0; row < rows; row++) {
                const size_t at = size_t(row) * width + first;
                std::memcpy(slot(to, device_, round) + at, from + at, size_t(end - first) * sizeof(float));
            }
        Flag& there = flag(to, device_, round, lane);
        there.count.store(uint32_t(rows) * width, std::memory_order_relaxed);
        there.round.store(round, std::memory_order_release);
    }
}

bool Mailbox::collect(int lane, int rows, int width) {
    const uint32_t round = rounds_[lane].number;
    for (int from = 0; from < devices_; from++)
        for (int other = 0; other < lanes_; other++) {
            const Flag& there = flag(from == device_ ? next_device() : device_, from, round, other);
            if (!await(there, round, from)) return false;
            if (there.count.load(std::memory_order_relaxed) != uint32_t(rows) * width) {
                give_up(from);
                return false;
            }
        }
    return true;
}

bool Mailbox::await(const Flag& flag, uint32_t round, int from) {
    const auto there = [&] { return flag.round.load(std::memory_order_acquire) == round; };
    if (failed()) return false;
    for (int spin = 0; spin < SPINS; spin++) {
        if (there()) return true;
#if defined(__x86_64__) || defined(__i386__)
        _mm_pause();
#endif
    }
    for (const int64_t begin = now_ns(); !there();) {
        const int64_t waited = now_ns() - begin;
        const bool ended = gone(from).round.load(std::memory_order_acquire) != 0;
        if (failed() || waited > limit_ns_ || (ended && !there())) {
            give_up(from);
            return false;
        }
        if (waited < YIELDING_NS) std::this_thread::yield();
        else std::this_thread::sleep_for(std::chrono::nanoseconds(NAP_NS));
    }
    return true;
}

void Mailbox::give_up(int device) {
    int well = 0;
    failed_.compare_exchange_strong(well, 1 + device, std::memory_order_acq_rel);
    gone(device_).round.store(1, std::memory_order_release);
}

}  // namespace rackserve

using rackserve::Mailbox;

extern "C" {

int64_t rk_mailbox_bytes(int32_t devices, int32_t lanes, int64_t floats) { return int64_t(Mailbox::bytes(devices, lanes, size_t(floats))); }

void* rk_mailbox_new(uint8_t* memory, int32_t devices, int32_t device, int32_t lanes, int64_t floats, double limit_s) {
    try {
        return new Mailbox(memory, devices, device, lanes, size_t(floats), limit_s);
    } catch (...) {
        return nullptr;
    }
}

void rk_mailbox_free(void* mailbox) { delete static_cast<Mailbox*>(mailbox); }

int32_t rk_mailbox_failed(void* mailbox) { return static_cast<Mailbox*>(mailbox)->failed(); }

// One round of one lane, so that the protocol can be tried alone: its columns [first, end) of `mine` [rows][width] go to all
// devices; `found` [devices][rows][width]. Returns `failed`.
int32_t rk_mailbox_round(void* mailbox, int32_t lane, const float* mine, int32_t rows, int32_t width, int32_t first, int32_t end, float* found) {
    Mailbox& box = *static_cast<Mailbox*>(mailbox);
    const size_t count = size_t(rows) * width;
    float* out = box.outgoing(lane);
    for (int row = 0; row < rows; row++) std::copy(mine + size_t(row) * width + first, mine + size_t(row) * width + end, out + size_t(row) * width + first);
    box.publish(lane, rows, width, first, end);
    if (!box.collect(lane, rows, width)) return box.failed();
    for (int from = 0; from < box.devices(); from++) std::copy_n(box.incoming(lane, from), count, found + from * count);
    box.advance(lane);
    return 0;
}
}
