#include "services/executor/native/pool.h"

#include <sched.h>
#include <unistd.h>

#include <stdexcept>

namespace quire {
namespace {

constexpr int kSpins = 200;        // before a waiting thread gives its core away
constexpr int kIdleYields = 2000;  // before an idle thread sleeps: it outlasts the host's work between two steps

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
void spin_until(Condition condition) {
  for (int spins = 0; !condition();) {
    relax();
    if (++spins >= kSpins) {
      sched_yield();
      spins = kSpins - 50;
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads) : lanes_(size_t(threads)), process_(getpid()) {
  threads_.reserve(size_t(threads - 1));
  try {
    for (int thread = 1; thread < threads; thread++) threads_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  if (getpid() != process_) {  // a forked child has no workers to wait for
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  stopping_ = true;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::barrier(int thread) {
  const uint32_t mine = lanes_[thread].arrived.load(std::memory_order_relaxed) + 1;
  lanes_[thread].arrived.store(mine, std::memory_order_release);
  for (Lane& other : lanes_) {
    spin_until([&] { return int32_t(other.arrived.load(std::memory_order_acquire) - mine) >= 0; });
  }
}

void ThreadPool::run_all(void (*function)(void*, int), void* argument) {
  if (getpid() != process_) throw std::runtime_error("a thread pool does not survive a fork");
  const std::lock_guard<std::mutex> turn(turn_);
  function_ = function;
  argument_ = argument;
  running_.store(int(threads_.size()), std::memory_order_relaxed);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  function(argument, 0);
  // The function lives on the caller's stack: nobody may still be in it.
  spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int waits = 0;
    while (job_.load(std::memory_order_acquire) == seen) {
      if (waits < kSpins) {
        relax();
      } else if (waits < kSpins + kIdleYields) {
        sched_yield();
      } else {
        job_.wait(seen, std::memory_order_acquire);
      }
      waits++;
    }
    seen++;
    if (stopping_) return;
    function_(argument_, thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace quire
