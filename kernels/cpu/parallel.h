// Work that threads share.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "threads.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

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

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
