// Large aligned memory, zero until written, with huge pages where the kernel grants them.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace quire {

// Memory after a piece that nobody may touch: the address sanitizer sees who does. None in other builds.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kGuardBytes = 256;
inline void guard(const void* at, size_t bytes) { __asan_poison_memory_region(at, bytes); }
inline void unguard(const void* at, size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
#else
constexpr size_t kGuardBytes = 0;
inline void guard(const void*, size_t) {}
inline void unguard(const void*, size_t) {}
#endif

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);  // throws std::bad_alloc
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0, mapped_ = 0;
};

// Hands out 64-byte aligned pieces of a Memory; with no memory behind it, it counts what they take.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}

  template <class T>
  T* take(size_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    const size_t bytes = count * sizeof(T), taken = (bytes + 63) / 64 * 64 + kGuardBytes;
    if (base_) guard(base_ + used_ + bytes, taken - bytes);
    used_ += taken;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace quire
