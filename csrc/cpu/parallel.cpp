#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace {

// One call's work: whoever takes part takes parts, so nobody waits for a thread that comes late.
struct Job {
  int64_t n, part;
  void (*of)(const void*, int64_t, int64_t);
  const void* context;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t first; (first = next.fetch_add(part)) < n;) of(context, first, std::min(part, n - first));
  }
};

// Helpers sleep between calls: a thread made for a call begins a millisecond late, and often on its maker's processor.
// They serve one call at a time; another one in the meantime runs without. A forked child makes its own.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
Job* job;          // that of the call being served
int openings;      // helpers that it still takes
int active, made;  // helpers at work on it, and in all

void* help(void*) {
  pthread_mutex_lock(&mutex);
  for (;;) {
    while (!openings) pthread_cond_wait(&wake, &mutex);
    openings--;
    active++;
    Job* mine = job;
    pthread_mutex_unlock(&mutex);
    mine->work();
    pthread_mutex_lock(&mutex);
    if (--active == 0) pthread_cond_signal(&idle);
  }
}

bool make_helper() {
  pthread_t id;
  return pthread_create(&id, nullptr, help, nullptr) == 0 && pthread_detach(id) == 0;
}

// Whether helpers were called: not while they serve another call.
bool call_helpers(Job& mine, int count) {
  pthread_mutex_lock(&mutex);
  const bool here = !job;
  if (here) {
    while (made < count && make_helper()) made++;
    job = &mine;
    openings = std::min(count, made);
    pthread_cond_broadcast(&wake);
  }
  pthread_mutex_unlock(&mutex);
  return here;
}

void dismiss_helpers() {
  pthread_mutex_lock(&mutex);
  openings = 0;
  while (active) pthread_cond_wait(&idle, &mutex);
  job = nullptr;
  pthread_mutex_unlock(&mutex);
}

// torch's threads, where it has OpenMP's: they spin for a while after each of its operations, on the processors that
// helpers of our own would need. OpenMP does not survive a fork.
using Team = void (*)(void (*of)(void*), void* context, unsigned threads, unsigned flags);
bool forked;

Team find_team() {
  static const Team found = reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return forked ? nullptr : found;
}

void forget_helpers() {
  forked = true;
  mutex = PTHREAD_MUTEX_INITIALIZER;
  wake = idle = PTHREAD_COND_INITIALIZER;
  job = nullptr;
  openings = active = made = 0;
}

const int at_fork = pthread_atfork(nullptr, nullptr, forget_helpers);  // at loading

}  // namespace

void run_in_parts(int64_t n, int64_t part, int64_t threads, void (*work)(const void*, int64_t, int64_t),
                  const void* context) {
  if (threads < 2 || at_fork) return work(context, 0, n);
  Job mine{n, part, work, context};
  // 0 threads: a team as large as torch's. libgomp ends threads, and starts them anew, when the size of a team changes.
  if (const Team team = find_team()) return team([](void* job) { static_cast<Job*>(job)->work(); }, &mine, 0, 0);
  const bool helped = call_helpers(mine, int(threads) - 1);
  mine.work();
  if (helped) dismiss_helpers();
}
