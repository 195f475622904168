// Threads: those of the OpenMP runtime that PyTorch has loaded, so that two pools never wait for the same cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace weightonly::cpu {

/// Runs function(context) on `threads` threads of the process's OpenMP runtime, on this one where there is none.
void run_on_threads(void (*function)(void*), void* context, int threads);

namespace WEIGHTONLY_VARIANT {

/// Calls body(i) for each i < count, each once, on any thread: who is free takes the next one. What a body computes
/// must depend on i alone, so that results depend neither on the threads nor on their number.
template <typename Body>
void parallel_for(int64_t count, int threads, Body const& body) {
  if (threads > count) threads = int(count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    Body const& body;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{body, count, {0}};
  run_on_threads(
      [](void* context) {
        auto& s = *static_cast<Shared*>(context);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.body(i);
      },
      &shared, threads);
}

/// Memory of one thread for one purpose, kept from call to call while it is small. Null where there is none.
template <int kPurpose>
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  template <typename T>
  static T* get(int64_t elems) {
    thread_local Scratch scratch;
    return static_cast<T*>(scratch.resize(size_t(elems) * sizeof(T)));
  }

 private:
  static constexpr size_t kKeptBytes = size_t(16) << 20;

  void* resize(size_t bytes) {
    bool const shrink = bytes_ > kKeptBytes && bytes < bytes_ / 2;
    if (bytes > bytes_ || shrink) {
      std::free(memory_);
      bytes_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(4096, bytes_);
      if (memory_ == nullptr) bytes_ = 0;
    }
    return memory_;
  }

  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace WEIGHTONLY_VARIANT
}  // namespace weightonly::cpu
