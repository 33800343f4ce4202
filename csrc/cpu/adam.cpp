// AdamW (arXiv 1711.05101) on flat arrays in one pass: reads gradients of any format, applies the clip scale, updates
// p, m and v (fp32 or fp64), and may write a narrow copy of the new p.
//
// The kernel (adam_kernel.h) is compiled for AVX-512, for AVX2 and for the plain architecture; cpuid picks. Threads are
// made for the call and joined in it: nothing stays behind that a fork could lose.

#include <pthread.h>

#include <algorithm>
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

// Numbers: of a block (a kilobyte or two of each array: 256 and 512 measured best); from where on `out` would not stay in
// a cache anyway; that a thread must have to be worth starting; at whose multiples parts begin.
constexpr int BLOCK = 512;
constexpr int64_t STREAM_FROM = 1 << 20, THREAD_FROM = 1 << 17, GRAIN = 1024;
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

struct Part {
  const Call* call;
  Kernel kernel;
  int64_t first, n;
};

void* work(void* argument) {
  const Part* part = static_cast<const Part*>(argument);
  part->kernel(*part->call, part->first, part->n);
  return nullptr;
}

// Cuts [0, n) into one part a thread; a thread that cannot be had leaves its part to this one.
void run_parts(const Call& call, Kernel kernel, int threads) {
  const int64_t useful = std::max<int64_t>(1, call.n / THREAD_FROM);
  const int count = int(std::min<int64_t>({useful, std::max(threads, 1), MOST_THREADS}));
  const int64_t size = (call.n / count + GRAIN - 1) / GRAIN * GRAIN;
  Part parts[MOST_THREADS];
  pthread_t ids[MOST_THREADS];
  bool made[MOST_THREADS];
  for (int t = 0; t < count; t++) {
    const int64_t first = std::min(call.n, t * size);
    parts[t] = {&call, kernel, first, (t == count - 1 ? call.n : std::min(call.n, first + size)) - first};
    made[t] = t > 0 && pthread_create(&ids[t], nullptr, work, &parts[t]) == 0;
  }
  for (int t = 0; t < count; t++)
    if (!made[t]) work(&parts[t]);
  for (int t = 0; t < count; t++)
    if (made[t]) pthread_join(ids[t], nullptr);
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
      out_format < NONE || out_format > FP16 || (out == nullptr) != (out_format == NONE))
    return EINVAL;
  if (*skip != 0 || n == 0) return 0;
  const Call call{p, m, v, g, out, n, state_format, grad_format, out_format, lr, step, scale, beta1, beta2, eps, decay};
  run_parts(call, path->kernel, threads);
  return 0;
}

}  // extern "C"
