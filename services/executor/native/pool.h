// Threads that run one function together, with barriers and claimed ranges.
//
// The caller of run() is thread 0. Several models may share a pool: run() takes turns. A thread works through its own
// contiguous range first (one sequential stream of weights a thread), then steals what others have left. Waiting is a
// short spin and then yields, so that a busy neighbour costs little; idle threads sleep.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return int(lanes_.size()); }

  // Calls function(thread) on every thread, 0 .. size - 1; returns when all are done.
  template <class Function>
  void run(Function& function) {
    run_all([](void* f, int thread) { (*static_cast<Function*>(f))(thread); }, &function);
  }

  // Waits for all threads. Only inside run().
  void barrier(int thread);

  // Calls function(i) for i in 0 .. count - 1, each once, spread over the threads. Only inside run(), by all threads
  // alike, with a barrier before the results are read.
  template <class Function>
  void for_each(int thread, int count, Function&& function) {
    const int threads = size();
    const uint32_t stage = lanes_[thread].stage++;
    // Three counters rotate, so that clearing the next one needs no barrier.
    lanes_[thread].claimed[(stage + 1) % 3].store(0, std::memory_order_relaxed);
    for (int distance = 0; distance < threads; distance++) {
      const int owner = (thread + distance) % threads;
      const uint32_t first = first_of(owner, count), size = first_of(owner + 1, count) - first;
      std::atomic<uint32_t>& claimed = lanes_[owner].claimed[stage % 3];
      if (distance > 0 && claimed.load(std::memory_order_relaxed) >= size) continue;
      for (uint32_t i; (i = claimed.fetch_add(1, std::memory_order_relaxed)) < size;) function(int(first + i));
    }
  }

  // Where a thread's own range of `count` items begins.
  int first_of(int thread, int count) const { return int(int64_t(thread) * count / size()); }

 private:
  struct alignas(64) Lane {
    std::atomic<uint32_t> arrived{0};  // barriers passed
    uint32_t stage = 0;
    std::atomic<uint32_t> claimed[3] = {0, 0, 0};
  };

  void run_all(void (*function)(void*, int), void* argument);
  void work(int thread);
  void stop();

  std::vector<Lane> lanes_;
  std::vector<std::thread> threads_;
  pid_t process_;
  std::mutex turn_;  // held for a whole run
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> running_{0};
  void (*function_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  bool stopping_ = false;
};

}  // namespace quire
