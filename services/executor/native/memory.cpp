#include "services/executor/native/memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace quire {
namespace {
constexpr size_t kHugePage = size_t(2) << 20;
}

Memory::Memory(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const bool huge = bytes >= kHugePage;
  mapped_ = (bytes + kGuardBytes + 4095) / 4096 * 4096;
  void* at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  // Advice: where it is not taken, the pages are small and all works the same.
  if (huge) madvise(at, mapped_, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(at);
  guard(data_ + bytes, mapped_ - bytes);
}

Memory::~Memory() {
  if (!data_) return;
  unguard(data_, mapped_);
  munmap(data_, mapped_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_), mapped_(other.mapped_) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace quire
