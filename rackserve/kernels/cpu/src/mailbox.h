// Mailboxes through which the devices of a rank, each a process, tell each other numbers: memory that all of them have mapped.
//
// Every device has a slot in the mailbox of every other one, twice. In a round each device writes numbers into its slots and
// raises their flags (release), waits for the flags of the others (acquire) and reads. The next round uses the other half, so
// nothing waits for readers: who raises the flag of round n + 1 has read round n, and nobody writes round n + 2 before having
// seen the flags of n + 1. A device's threads are lanes with flags of their own; what holds of devices holds of lanes.
//
// A wait ends by itself: after the limit, or as soon as a peer has said that it is gone. From then on all waits fail at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rackserve {

constexpr int MAX_DEVICES = 64;

class Mailbox {
  public:
    // Bytes of the memory, zeros at first. floats: numbers of a slot.
    static size_t bytes(int devices, int lanes, size_t floats);

    Mailbox(uint8_t* memory, int devices, int device, int lanes, size_t floats, double limit_s);
    // Tells the peers that this device is gone.
    ~Mailbox();

    int devices() const { return devices_; }
    int device() const { return device_; }
    size_t floats() const { return floats_; }

    // Where the lane writes its part of [rows][width] numbers of its round. It lies in the mailbox of the next device already.
    float* outgoing(int lane) { return slot(next_device(), device_, rounds_[lane].number); }

    // The lane's columns [first, end) of what is outgoing are there: copies them to the mailboxes they are not in, raises flags.
    void publish(int lane, int rows, int width, int first, int end);

    // Waits for the lanes of all devices, this one's too, to publish rounds of [rows][width]. False if that will not happen.
    bool collect(int lane, int rows, int width);

    // What a device has published in the round, valid until the lane's `advance`.
    const float* incoming(int lane, int from) const { return slot(from == device_ ? next_device() : device_, from, rounds_[lane].number); }

    // The lane has read the round.
    void advance(int lane) { rounds_[lane].number++; }

    // No wait will succeed any more, here or at a peer.
    void give_up(int device);

    // 0: all is well; else 1 + the device that is late, gone or out of step.
    int failed() const { return failed_.load(std::memory_order_acquire); }

  private:
    struct alignas(64) Flag {
        std::atomic<uint32_t> round;  // the last one that is complete
        std::atomic<uint32_t> count;  // its numbers
    };
    struct alignas(64) Round {
        uint32_t number = 1;
    };

    int next_device() const { return (device_ + 1) % devices_; }
    uint8_t* half(int to, int from, uint32_t round) const {
        return memory_ + size_t(devices_) * sizeof(Flag) + ((size_t(to) * devices_ + from) * 2 + round % 2) * stride_;
    }
    Flag& flag(int to, int from, uint32_t round, int lane) const { return reinterpret_cast<Flag*>(half(to, from, round))[lane]; }
    float* slot(int to, int from, uint32_t round) const {
        return reinterpret_cast<float*>(half(to, from, round) + size_t(lanes_) * sizeof(Flag));
    }
    Flag& gone(int device) const { return reinterpret_cast<Flag*>(memory_)[device]; }
    bool await(const Flag& flag, uint32_t round, int from);

    uint8_t* const memory_;
    const int devices_, device_, lanes_;
    const size_t floats_, stride_;
    const int64_t limit_ns_;
    std::vector<Round> rounds_;
    std::atomic<int> failed_{0};
};

}  // namespace rackserve
