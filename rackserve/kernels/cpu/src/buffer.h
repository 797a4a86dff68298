// Memory that is made once and begins on a cache line; large ones ask for huge pages.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rackserve {

constexpr size_t HUGE_PAGE = size_t(2) << 20;

template <class T> class Buffer {
  public:
    // Zeros.
    explicit Buffer(size_t count) : align_(std::align_val_t(count * sizeof(T) >= HUGE_PAGE ? HUGE_PAGE : 64)) {
        const size_t bytes = count * sizeof(T) + 64;
        data_ = static_cast<T*>(::operator new[](bytes, align_));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (size_t(align_) == HUGE_PAGE) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(static_cast<void*>(data_), 0, bytes);
    }
    ~Buffer() { ::operator delete[](data_, align_); }
    Buffer(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : align_(other.align_), data_(other.data_) { other.data_ = nullptr; }
    T* at(size_t index = 0) { return data_ + index; }

  private:
    const std::align_val_t align_;
    T* data_;
};

}  // namespace rackserve
