// AdamW (arXiv 1711.05101) on flat arrays in one pass: reads gradients of any format, applies the
// clip scale, updates p, m and v (fp32 or fp64), and can write a copy of the new p in a narrower
// format.
//
// The kernel (adam_kernel.h) is compiled for each instruction set of targets.h. The result does not
// depend on the assignment of parts to threads.

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "number.h"
#include "parallel.h"
#include "targets.h"

namespace {

// All sizes are in elements. BLOCK: block size. AHEAD: prefetch distance. (128 and 384 were the
// fastest of 64 to 1024; blocks of 512 without prefetch were a tenth slower.) STREAM_FROM: from
// this size on, `out` does not fit in a cache, and is written by non-temporal stores. THREAD_FROM:
// minimum work per thread. PART: largest part that a thread takes at once; a multiple of GRAIN.
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

// Copies by non-temporal stores, which do not read a cache line before they write it. Both pointers
// are 16-byte aligned.
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

// Updates p, m, v [n] (state_format: FP32 or FP64) from g [n] (any format); out [n] (FP32, BF16,
// FP16 or null) receives the new p. *lr, *step, *scale and *skip are read during the call. If *skip
// is not 0, all arrays stay unchanged. instructions: a name in PATHS; null selects the fastest.
// Arrays may be unaligned. Returns 0, EINVAL for other formats, or ENOTSUP if the processor lacks
// the instructions.
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
