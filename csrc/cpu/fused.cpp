// GELU, SwiGLU and cross entropy on the CPU, each in one pass over memory: twins of csrc/cuda/activation.cu and
// cross_entropy.cu for fp32 and bf16. The kernels are in fused_kernel.h. The result does not depend on the threads.

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "number.h"
#include "parallel.h"
#include "targets.h"

namespace {

constexpr int WIDTH = 512, LANES = 64;               // numbers of a block, and of a sum's lanes
constexpr int64_t THREAD_FROM = 1 << 15, GRAIN = 64;  // numbers a thread must have; parts of GELU begin at multiples

enum What { GELU, SWIGLU, NUMBERS, GRADIENT };

struct Fused {
  What what;
  int format;
  int64_t width, columns;  // of a row of x, and those that count
  const void *x, *dy;      // dy: null in a forward
  void* out;
  float *top, *total;
  const float *logarithm, *loss;
  const int64_t* target;
};

#define KERNEL_HEADER "fused_kernel.h"
#include "each_target.h"

using Kernel = void (*)(const Fused&, int64_t first, int64_t n);

constexpr Kernel KERNELS[] = OF_TARGETS(fused);

// n: rows, or numbers where `size` of a row is 1.
int run(const Fused& call, int64_t n, int64_t size, int threads, const char* instructions) {
  const int path = find_path(instructions);
  if (path < 0) return ENOTSUP;
  if ((call.format != FP32 && call.format != BF16) || n < 0 || call.width < 0) return EINVAL;
  const int64_t useful = useful_threads(n * size / THREAD_FROM, threads);
  const int64_t part = std::max<int64_t>(1, n / useful / 4), grain = size == 1 ? GRAIN : 1;
  in_parts(n, (part + grain - 1) / grain * grain, useful,
           [&](int64_t first, int64_t count) { KERNELS[path](call, first, count); });
  return 0;
}

}  // namespace

extern "C" {

// All: format FP32 or BF16; instructions null for the fastest. 0, EINVAL for another format, ENOTSUP for instructions
// that this processor has not.

// out [n] = GELU(x), in its tanh form; or its slope times dy, where that is given.
int threed_gelu(const void* x, const void* dy, void* out, int64_t n, int format, int threads,
                const char* instructions) {
  Fused call{};
  call.what = GELU, call.format = format, call.x = x, call.dy = dy, call.out = out;
  return run(call, n, 1, threads, instructions);
}

// out [rows f] = silu(gate) up of x = gate_up [rows 2f]; or, where dy [rows f] is given, out [rows 2f] = the gradient.
int threed_swiglu(const void* x, const void* dy, void* out, int64_t rows, int64_t f, int format, int threads,
                  const char* instructions) {
  Fused call{};
  call.what = SWIGLU, call.format = format, call.width = f, call.x = x, call.dy = dy, call.out = out;
  return run(call, rows, f, threads, instructions);
}

// Of each row of x [rows width], of whose columns so many count: the largest number, and the sum of e^(x - largest).
int threed_row_numbers(const void* x, int64_t rows, int64_t width, int64_t columns, int format, float* top,
                       float* total, int threads, const char* instructions) {
  Fused call{};
  call.what = NUMBERS, call.format = format, call.width = width, call.columns = columns, call.x = x;
  call.top = top, call.total = total;
  return run(call, rows, width, threads, instructions);
}

// In place: x = e^(x - logarithm) loss, less loss in the column `target` (none below 0); columns that do not count are
// zero.
int threed_softmax_gradient(void* x, int64_t rows, int64_t width, int64_t columns, int format,
                            const float* logarithm, const float* loss, const int64_t* target, int threads,
                            const char* instructions) {
  Fused call{};
  call.what = GRADIENT, call.format = format, call.width = width, call.columns = columns, call.out = x;
  call.logarithm = logarithm, call.loss = loss, call.target = target;
  return run(call, rows, width, threads, instructions);
}

}  // extern "C"
