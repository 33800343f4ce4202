// GELU, SwiGLU and cross entropy on the CPU, each in one pass over memory, for fp32 and bf16: the
// counterparts of csrc/cuda/activation.cu and cross_entropy.cu. The kernels are in fused_kernel.h.
// The result does not depend on the number of threads.

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "number.h"
#include "parallel.h"
#include "targets.h"

namespace {

constexpr int WIDTH = 512, LANES = 64;               // elements per block; lanes of a sum
constexpr int64_t THREAD_FROM = 1 << 15, GRAIN = 64;  // elements: minimum per thread; unit of GELU's parts

enum What { GELU, SWIGLU, NUMBERS, GRADIENT };

struct Fused {
  What what;
  int format;
  int64_t width, columns;  // columns of a row of x with padding, and without it
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

// n: number of rows of `size` elements; for GELU number of elements, with size 1.
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

// All functions: format is FP32 or BF16; instructions null selects the fastest. They return 0,
// EINVAL for another format, or ENOTSUP if the processor lacks the instructions.

// out [n] = GELU(x) in its tanh form; if dy is not null, the derivative of GELU at x times dy.
int threed_gelu(const void* x, const void* dy, void* out, int64_t n, int format, int threads,
                const char* instructions) {
  Fused call{};
  call.what = GELU, call.format = format, call.x = x, call.dy = dy, call.out = out;
  return run(call, n, 1, threads, instructions);
}

// out [rows f] = silu(gate) up for x = gate_up [rows 2f]; if dy [rows f] is not null, out [rows 2f]
// = the gradient of x.
int threed_swiglu(const void* x, const void* dy, void* out, int64_t rows, int64_t f, int format, int threads,
                  const char* instructions) {
  Fused call{};
  call.what = SWIGLU, call.format = format, call.width = f, call.x = x, call.dy = dy, call.out = out;
  return run(call, rows, f, threads, instructions);
}

// top, total [rows]: maximum and sum of e^(x - maximum) over the first `columns` of each row of x
// [rows width].
int threed_row_numbers(const void* x, int64_t rows, int64_t width, int64_t columns, int format, float* top,
                       float* total, int threads, const char* instructions) {
  Fused call{};
  call.what = NUMBERS, call.format = format, call.width = width, call.columns = columns, call.x = x;
  call.top = top, call.total = total;
  return run(call, rows, width, threads, instructions);
}

// Overwrites the logits x by their gradient: x = e^(x - logarithm) * loss, minus `loss` in the
// column `target` unless that is negative. logarithm: log of the row's sum of e^x. loss: the
// gradient of the row's loss. The padding after the first `columns` becomes zero.
int threed_softmax_gradient(void* x, int64_t rows, int64_t width, int64_t columns, int format,
                            const float* logarithm, const float* loss, const int64_t* target, int threads,
                            const char* instructions) {
  Fused call{};
  call.what = GRADIENT, call.format = format, call.width = width, call.columns = columns, call.out = x;
  call.logarithm = logarithm, call.loss = loss, call.target = target;
  return run(call, rows, width, threads, instructions);
}

}  // extern "C"
