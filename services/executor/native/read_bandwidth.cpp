// How fast memory can be read: the bound of a step whose weights do not fit into caches.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "services/executor/native/bindings.h"
#include "services/executor/native/memory.h"

namespace nb = nanobind;

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t read_all(const uint64_t* words, size_t count) {
  uint64_t mix[8] = {};
  for (size_t i = 0; i + 8 <= count; i += 8) {
    for (size_t j = 0; j < 8; j++) mix[j] ^= words[i + j];
  }
  uint64_t all = 0;
  for (uint64_t part : mix) all ^= part;
  return all;
}

// Bytes per second while `threads` threads read a part of `bytes` bytes each, over and over, for `seconds`.
double read_bandwidth(size_t bytes, int threads, double seconds) {
  if (threads < 1 || threads > 1024) throw nb::value_error("threads must be in 1..1024");
  if (bytes < size_t(threads) * 4096) throw nb::value_error("bytes must be at least 4096 a thread");
  if (!(seconds > 0 && seconds <= 60)) throw nb::value_error("seconds must be in (0, 60]");
  nb::gil_scoped_release release;
  const size_t part = bytes / size_t(threads) / 64 * 64;
  std::vector<Memory> parts;
  for (int i = 0; i < threads; i++) parts.emplace_back(part);
  std::atomic<int> ready{0};
  std::atomic<uint64_t> total{0}, mixed{0};
  auto work = [&](int thread) {
    auto* words = reinterpret_cast<uint64_t*>(parts[size_t(thread)].data());
    for (size_t i = 0; i < part / 8; i++) words[i] = i;  // touched by the thread that reads it
    ready++;
    while (ready.load() < threads) std::this_thread::yield();
    const auto start = Clock::now();
    uint64_t passes = 0, mix = 0;
    double elapsed;
    do {
      mix ^= read_all(words, part / 8) + passes;
      passes++;
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    } while (elapsed < seconds);
    mixed ^= mix;
    total += uint64_t(double(passes * part) / elapsed);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
  return double(total.load());
}

}  // namespace

void bind_read_bandwidth(nb::module_& module) {
  module.def("read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("threads"), nb::arg("seconds"),
             "Bytes per second that `threads` threads read from `bytes` bytes of memory, measured for `seconds`.");
}

}  // namespace quire
