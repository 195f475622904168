// See threads.h. Threads are those of the OpenMP runtime that PyTorch has loaded, so that two pools never wait for the
// same cores.

#include "threads.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace weightonly::cpu {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel gomp_parallel() {
  static auto const found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

/// Whether this process was made by fork without an exec since: a flag of Linux (PF_FORKNOEXEC).
bool was_forked() {
  std::FILE* const file = std::fopen("/proc/self/stat", "r");
  if (file == nullptr) return false;
  unsigned flags = 0;
  int const found = std::fscanf(file, "%*d (%*[^)]%*[)] %*c %*d %*d %*d %*d %*d %u", &flags);
  std::fclose(file);
  return found == 1 && (flags & 0x40) != 0;
}

/// In a child made by fork the OpenMP runtime still counts on the threads that the first thread had in the parent, and
/// would wait for them forever. A helper takes the first thread's place: the runtime gives it threads of its own.
struct Child {
  bool is_child = was_forked();
  bool has_helper = false;
  sem_t asked, done;
  void (*function)(void*);
  void* context;
  int threads;

  Child() {
    pthread_atfork(nullptr, nullptr, [] {
      child.is_child = true;
      child.has_helper = false;
    });
  }

  static Child child;
};

Child Child::child;

void wait(sem_t& semaphore) {
  while (sem_wait(&semaphore) != 0 && errno == EINTR) {
  }
}

bool start_helper(Child& child) {
  sem_init(&child.asked, 0, 0);
  sem_init(&child.done, 0, 0);
  auto const serve = [](void* place) -> void* {
    auto& c = *static_cast<Child*>(place);
    for (;;) {
      wait(c.asked);
      gomp_parallel()(c.function, c.context, unsigned(c.threads), 0);
      sem_post(&c.done);
    }
  };
  pthread_t thread;
  if (pthread_create(&thread, nullptr, serve, &child) != 0) return false;
  pthread_detach(thread);
  return true;
}

struct Piece {
  void* memory;
  size_t bytes;
};

/// Not thread_local, whose first use ends the process where there is no memory.
struct Memory {
  Piece pieces[kPurposes];
  char message[kMessageBytes];
};

void release(void* value) {
  auto* const memory = static_cast<Memory*>(value);
  for (auto const& piece : memory->pieces) std::free(piece.memory);
  std::free(memory);
}

Memory* memory_of_thread() {
  static pthread_key_t key;
  static bool const has_key = pthread_key_create(&key, release) == 0;
  if (!has_key) return nullptr;
  if (void* const found = pthread_getspecific(key)) return static_cast<Memory*>(found);
  void* const made = std::calloc(1, sizeof(Memory));
  if (made != nullptr && pthread_setspecific(key, made) != 0) {
    std::free(made);
    return nullptr;
  }
  return static_cast<Memory*>(made);
}

}  // namespace

bool has_threads() {
  return gomp_parallel() != nullptr;
}

void run_on_threads(void (*function)(void*), void* context, int threads) {
  auto const run = gomp_parallel();
  if (run == nullptr) return function(context);
  Child& child = Child::child;
  if (!child.is_child || syscall(SYS_gettid) != getpid()) return run(function, context, unsigned(threads), 0);
  if (!child.has_helper) child.has_helper = start_helper(child);
  if (!child.has_helper) return function(context);
  child.function = function;
  child.context = context;
  child.threads = threads;
  sem_post(&child.asked);
  wait(child.done);
}

void* scratch(Purpose purpose, int64_t bytes) {
  constexpr size_t kKeptBytes = size_t(16) << 20;
  Memory* const memory = memory_of_thread();
  if (memory == nullptr) return nullptr;
  Piece& piece = memory->pieces[purpose];
  size_t const wanted = (size_t(bytes) + 4095) / 4096 * 4096;
  bool const shrink = piece.bytes > kKeptBytes && wanted < piece.bytes / 2;
  if (wanted > piece.bytes || shrink) {
    std::free(piece.memory);
    piece.memory = std::aligned_alloc(4096, wanted);
    piece.bytes = piece.memory == nullptr ? 0 : wanted;
  }
  return piece.memory;
}

char* message_of_thread() {
  Memory* const memory = memory_of_thread();
  return memory == nullptr ? nullptr : memory->message;
}

}  // namespace weightonly::cpu
