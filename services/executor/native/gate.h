// What a step waits for that another thread makes meanwhile: shut until opened, once.
#pragma once

#include <atomic>

namespace quire {

class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;

  // What was written before is seen by those who waited.
  void open() {
    is_open_.store(true, std::memory_order_release);
    is_open_.notify_all();
  }

  void wait() const {
    while (!is_open_.load(std::memory_order_acquire)) is_open_.wait(false, std::memory_order_acquire);
  }

 private:
  std::atomic<bool> is_open_{false};
};

}  // namespace quire
