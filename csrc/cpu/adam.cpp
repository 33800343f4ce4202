// AdamW (arXiv 1711.05101) on flat arrays in one pass: reads gradients of any format, applies the clip scale, updates
// p, m and v (fp32 or fp64), and may write a narrow copy of the new p.
//
// The kernel (adam_kernel.h) is compiled for AVX-512, AVX2 and the plain architecture; cpuid picks. Which thread does
// which part changes no result.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>

#include "number.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#define X86 1
#endif

// All functions between BEGIN and END may use these instructions.
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define WIDEST
#define TARGET_BEGIN(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#else
#define WIDEST ",prefer-vector-width=512"
#define TARGET_BEGIN(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define TARGET_END PRAGMA(GCC pop_options)
#endif

#define NOINLINE __attribute__((noinline))
#define RESTRICT __restrict__

namespace {

// In numbers: a block, and how far ahead memory is asked for (128 and 384 measured best of 64 to 1024; blocks of 512
// without asking lost a tenth); from where on `out` would not stay in a cache anyway; what a thread must have to be
// worth waking; a part that one takes, and what it is a multiple of.
constexpr int BLOCK = 128, AHEAD = 384;
constexpr int64_t STREAM_FROM = 1 << 20, THREAD_FROM = 1 << 17, PART = 1 << 18, GRAIN = 1024;
constexpr int MOST_THREADS = 256;

struct Call {
  void *p, *m, *v;
  const void* g;
  void* out;
  int64_t n;
  int state_format, grad_format, out_format;
  const double *lr, *step, *scale;
  double beta1, beta2, eps, decay;
};

// Stores past the cache: a line of `out` need not be read before it is written. Both 16-byte aligned.
INLINE void stream(void* to, const void* from, size_t bytes) {
#ifdef X86
  for (size_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i),
                     *reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i));
#else
  std::memcpy(to, from, bytes);
#endif
}

INLINE void stream_end() {
#ifdef X86
  _mm_sfence();
#endif
}

namespace portable {
#include "adam_kernel.h"
}

#ifdef X86
TARGET_BEGIN("avx2")
namespace avx2 {
#include "adam_kernel.h"
}
TARGET_END
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl" WIDEST)
namespace avx512 {
#include "adam_kernel.h"
}
TARGET_END
#endif

using Kernel = void (*)(const Call&, int64_t first, int64_t n);

struct Path {
  const char* name;
  Kernel kernel;
  bool here;
};

// From the fastest to the plainest.
const Path* paths(int& count) {
#ifdef X86
  __builtin_cpu_init();
  static const Path all[] = {
      {"avx512", avx512::adamw, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {"avx2", avx2::adamw, bool(__builtin_cpu_supports("avx2"))},
      {"portable", portable::adamw, true}};
#else
  static const Path all[] = {{"portable", portable::adamw, true}};
#endif
  count = sizeof all / sizeof all[0];
  return all;
}

// The path of that name, or the fastest for a null pointer; null if this processor cannot run it.
const Path* find_path(const char* name) {
  int count;
  const Path* all = paths(count);
  for (int i = 0; i < count; i++)
    if (all[i].here && (!name || !std::strcmp(name, all[i].name))) return &all[i];
  return nullptr;
}

// One call's work: whoever takes part takes parts, so nobody waits for a thread that comes late.
struct Job {
  const Call& call;
  Kernel kernel;
  int64_t size;  // of a part
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t first; (first = next.fetch_add(size)) < call.n;)
      kernel(call, first, std::min(size, call.n - first));
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

void forget_helpers() {
  mutex = PTHREAD_MUTEX_INITIALIZER;
  wake = idle = PTHREAD_COND_INITIALIZER;
  job = nullptr;
  openings = active = made = 0;
}

const int at_fork = pthread_atfork(nullptr, nullptr, forget_helpers);  // at loading

void run_parts(const Call& call, Kernel kernel, int threads) {
  const int64_t useful = std::min<int64_t>({call.n / THREAD_FROM, threads, MOST_THREADS});
  if (useful < 2 || at_fork) return kernel(call, 0, call.n);
  const int64_t share = call.n / useful / 4;
  Job mine{call, kernel, std::clamp<int64_t>(share / GRAIN * GRAIN, GRAIN, PART)};
  const bool helped = call_helpers(mine, int(useful) - 1);
  mine.work();
  if (helped) dismiss_helpers();
}

}  // namespace

extern "C" {

// The instruction set in use: "avx512", "avx2" or "portable".
const char* threed_instructions() { return find_path(nullptr)->name; }

// One update of p, m, v [n] (state_format: FP32 or FP64) from g [n] (any format); out [n] (FP32, BF16, FP16; or null)
// gets the new p. lr, step, scale, skip: numbers read now. *skip != 0: nothing is written. instructions: null for the
// fastest. Arrays need not be aligned. 0, EINVAL for a format that is none of these, ENOTSUP for instructions that this
// processor has not.
int threed_adamw(void* p, void* m, void* v, const void* g, void* out, int64_t n, int state_format, int grad_format,
                 int out_format, const double* lr, const double* step, const double* scale, const double* skip,
                 double beta1, double beta2, double eps, double decay, int threads, const char* instructions) {
  const Path* path = find_path(instructions);
  if (!path) return ENOTSUP;
  if (n < 0 || (state_format != FP32 && state_format != FP64) || grad_format < FP32 || grad_format > FP64 ||
      out_format < NONE || out_format > FP16 || (n > 0 && (out == nullptr) != (out_format == NONE)))
    return EINVAL;
  if (*skip != 0 || n == 0) return 0;
  const Call call{p, m, v, g, out, n, state_format, grad_format, out_format, lr, step, scale, beta1, beta2, eps, decay};
  run_parts(call, path->kernel, threads);
  return 0;
}

}  // extern "C"
