// For LD_PRELOAD: while `call_with_a_failure` runs, one allocation of the process fails.

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static std::atomic<bool> counts{false};
static std::atomic<long> made{0}, fails_at{-1};

static bool fails() {
  return counts && made++ == fails_at;
}

void* malloc(size_t bytes) {
  return fails() ? nullptr : __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  return fails() ? nullptr : __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) {
  return fails() ? nullptr : __libc_realloc(memory, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return fails() ? nullptr : __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  *memory = aligned_alloc(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}

/// function(argument) with allocation number `which` failing, from 0 on. allocations: how many there were.
int call_with_a_failure(int (*function)(void const*), void const* argument, long which, long* allocations) {
  made = 0;
  fails_at = which;
  counts = true;
  int const result = function(argument);
  counts = false;
  *allocations = made;
  return result;
}
}
