// AdamW (arXiv 1711.05101) on flat arrays in one pass: reads gradients of any format, applies the clip scale, updates
// p, m and v (fp32 or fp64), and may write a narrow copy of the new p.
//
// The kernel (adam_kernel.h) is compiled for each instruction set of targets.h. Which thread does which part changes no
// result.

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "number.h"
#include "parallel.h"
#include "targets.h"

namespace {

// In numbers: a block, and how far ahead memory is asked for (128 and 384 measured best of 64 to 1024; blocks of 512
// without asking lost a tenth); from where on `out` would not stay in a cache anyway; what a thread must have to be
// worth waking; a part that one takes, and what it is a multiple of.
constexpr int BLOCK = 128, AHEAD = 384;
constexpr int64_t STREAM_FROM = 1 << 20, THREAD_FROM = 1 << 17, PART = 1 << 18, GRAIN = 1024;

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

#define KERNEL_HEADER "adam_kernel.h"
#include "each_target.h"

using Kernel = void (*)(const Call&, int64_t first, int64_t n);

constexpr Kernel KERNELS[] = OF_TARGETS(adamw);

void run_parts(const Call& call, Kernel kernel, int threads) {
  const int64_t useful = useful_threads(call.n / THREAD_FROM, threads);
  const int64_t part = std::clamp<int64_t>(call.n / useful / 4 / GRAIN * GRAIN, GRAIN, PART);
  in_parts(call.n, part, useful, [&](int64_t first, int64_t n) { kernel(call, first, n); });
}

}  // namespace

extern "C" {

// The instruction set in use: "avx512", "avx2" or "portable".
const char* threed_instructions() { return PATHS[find_path(nullptr)]; }

// One update of p, m, v [n] (state_format: FP32 or FP64) from g [n] (any format); out [n] (FP32, BF16, FP16; or null)
// gets the new p. lr, step, scale, skip: numbers read now. *skip != 0: nothing is written. instructions: null for the
// fastest. Arrays need not be aligned. 0, EINVAL for a format that is none of these, ENOTSUP for instructions that this
// processor has not.
int threed_adamw(void* p, void* m, void* v, const void* g, void* out, int64_t n, int state_format, int grad_format,
                 int out_format, const double* lr, const double* step, const double* scale, const double* skip,
                 double beta1, double beta2, double eps, double decay, int threads, const char* instructions) {
  const int path = find_path(instructions);
  if (path < 0) return ENOTSUP;
  if (n < 0 || (state_format != FP32 && state_format != FP64) || grad_format < FP32 || grad_format > FP64 ||
      out_format < NONE || out_format > FP16 || (n > 0 && (out == nullptr) != (out_format == NONE)))
    return EINVAL;
  if (*skip != 0 || n == 0) return 0;
  const Call call{p, m, v, g, out, n, state_format, grad_format, out_format, lr, step, scale, beta1, beta2, eps, decay};
  run_parts(call, KERNELS[path], threads);
  return 0;
}

}  // extern "C"
