// What the devices of a rank add up or join during a pass, and what they do about it.
//
// The product that makes a partial sum writes it straight into the mailbox of the next device. Who waits for the others' parts
// first does what does not need them; then it adds the parts in the order of the devices and goes on with the row at once. So a
// sum has the same bits on every device, whoever is late.
#pragma once

#include <algorithm>

#include "v41_step.h"

namespace rackserve::v41 {

inline void Step::add_parts(int member, int row, int width, float* sum) const {
    const float* parts[MAX_DEVICES];
    for (int from = 0; from < mail_->devices(); from++) parts[from] = mail_->incoming(member, from) + size_t(row) * width;
    for (int at = 0; at < width; at += LANES) {
        F32 total = load<F32>(parts[0] + at);
        for (int from = 1; from < mail_->devices(); from++) total += load<F32>(parts[from] + at);
        store(sum + at, total);
    }
}

template <class Compute, class Meanwhile, class Use>
void Step::add_up(int member, int rows, int width, float* own, Compute compute, Meanwhile meanwhile, Use use) {
    if (mail_ == nullptr) {
        compute(0, rows, own);
        barrier_.wait();
        share(member, rows, [&](int row) { use(row, own + size_t(row) * width); });
        return;
    }
    const auto [first, end] = columns(member, width);
    const int at_once = int(mail_->floats() / width);
    for (int begin = 0, count; begin < rows; begin += count) {
        count = std::min(at_once, rows - begin);
        float *sums = own + size_t(begin) * width, *out = mail_->outgoing(member);
        compute(begin, count, m_.fused_sums ? out : sums);
        for (int row = 0; !m_.fused_sums && row < count; row++)
            std::copy(sums + size_t(row) * width + first, sums + size_t(row) * width + end, out + size_t(row) * width + first);
        mail_->publish(member, count, width, first, end);
        if (begin == 0) meanwhile();
        mail_->collect(member, count, width);
        share(member, count, [&](int row) {
            float* sum = sums + size_t(row) * width;
            add_parts(member, row, width, sum);
            if (m_.fused_sums) use(begin + row, sum);
        });
        mail_->advance(member);
        if (m_.fused_sums) continue;
        barrier_.wait();
        share(member, count, [&](int row) { use(begin + row, sums + size_t(row) * width); });
        barrier_.wait();
    }
}

template <class Compute> void Step::join(int member, int rows, int width, float* out, size_t out_stride, Compute compute) {
    if (mail_ == nullptr) return compute(0, rows, out, out_stride);
    const auto [first, end] = columns(member, width);
    const int at_once = int(mail_->floats() / width);
    for (int begin = 0, count; begin < rows; begin += count) {
        count = std::min(at_once, rows - begin);
        compute(begin, count, mail_->outgoing(member), width);
        mail_->publish(member, count, width, first, end);
        mail_->collect(member, count, width);
        share(member, count, [&](int row) {
            for (int from = 0; from < mail_->devices(); from++) {
                const float* part = mail_->incoming(member, from) + size_t(row) * width;
                std::copy_n(part, width, out + (begin + row) * out_stride + size_t(from) * width);
            }
        });
        mail_->advance(member);
    }
}

}  // namespace rackserve::v41
