// The threads that compute, and the memory of each.
#pragma once

#include <cstdint>

namespace weightonly::cpu {

/// Whether the process has an OpenMP runtime.
bool has_threads();

/// Runs function(context) on `threads` threads of the process's OpenMP runtime, on this one where there is none.
void run_on_threads(void (*function)(void*), void* context, int threads);

/// What memory is for.
enum Purpose : int { kX, kWeight, kScales, kBlock, kSums, kSegments, kSumsOfX, kPurposes };

/// Memory of this thread for one purpose, kept from call to call while it is small. Null where there is none.
void* scratch(Purpose purpose, int64_t bytes);

template <typename T>
T* scratch_of(Purpose purpose, int64_t elems) {
  return static_cast<T*>(scratch(purpose, elems * int64_t(sizeof(T))));
}

constexpr int kMessageBytes = 200;

/// The place of this thread's message, kMessageBytes long. Null where there is no memory.
char* message_of_thread();

}  // namespace weightonly::cpu
