#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace {

// The work of one call. Every thread takes the next part when it is free, so a late thread delays
// no other.
struct Job {
  int64_t n, part;
  void (*of)(const void*, int64_t, int64_t);
  const void* context;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t first; (first = next.fetch_add(part)) < n;) of(context, first, std::min(part, n - first));
  }
};

// Helper threads sleep between calls: a thread created for a call starts a millisecond late, and
// often on the creator's processor. The helpers serve one call at a time; a concurrent call runs
// without helpers. A forked child creates new helpers.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
Job* job;          // of the call being served
int openings;      // number of helpers that may still join the job
int active, made;  // number of helpers working on the job, and in total

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

// Wakes up to `count` helpers for a job. Returns false if the helpers serve another call.
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

// `find_team` returns libgomp's function that runs work on torch's OpenMP threads, or null if torch
// does not use libgomp. These threads spin for a while after each operation, on the processors that
// separate helper threads would need. In a forked child OpenMP does not work, so helpers run there.
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

const int at_fork = pthread_atfork(nullptr, nullptr, forget_helpers);  // runs when the library is loaded

}  // namespace

void run_in_parts(int64_t n, int64_t part, int64_t threads, void (*work)(const void*, int64_t, int64_t),
                  const void* context) {
  if (threads < 2 || at_fork) return work(context, 0, n);
  Job mine{n, part, work, context};
  // The third argument, 0, asks for a team as large as torch's: libgomp ends and restarts threads
  // when the size of the team changes.
  if (const Team team = find_team()) return team([](void* job) { static_cast<Job*>(job)->work(); }, &mine, 0, 0);
  const bool helped = call_helpers(mine, int(threads) - 1);
  mine.work();
  if (helped) dismiss_helpers();
}
