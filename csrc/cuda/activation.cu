// Activations of the feed-forward part on bf16 rows. The backwards recompute intermediate values.
//
//   swiglu    out = silu(gate) up     gate_up [rows 2f] -> out [rows f]  6 bytes per element of out, backward 10
//   gelu      out = gelu(x + bias)    tanh form, [rows f] -> [rows f]    4 bytes, backward 6
//
// A warp processes 32 packs of columns and iterates over rows, AHEAD at a time. So GELU's backward
// can accumulate the gradient of the bias in registers. sums.cu adds up the partial sums [blocks f]
// of this gradient.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int AHEAD = 2;  // rows that a thread loads before it uses the first

// blockIdx.x: packs of columns; blockIdx.y: rows
__device__ __forceinline__ int64_t first_row() { return (int64_t(blockIdx.y) * WARPS + threadIdx.x / WARP) * AHEAD; }
__device__ __forceinline__ int64_t next_rows() { return int64_t(gridDim.y) * WARPS * AHEAD; }
__device__ __forceinline__ int64_t my_pack() { return int64_t(blockIdx.x) * WARP + threadIdx.x % WARP; }

// 1 / (1 + exp(-x)). Below -88 the exponential is infinite, and the result 0.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

__global__ void __launch_bounds__(THREADS)
    swiglu(const uint4* __restrict__ gate_up, uint4* __restrict__ out, int64_t rows, int64_t packs) {
  const int64_t at = my_pack();
  if (at >= packs) return;
  for (int64_t row = first_row(); row < rows; row += next_rows()) {
    uint4 gates[AHEAD] = {}, ups[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      gates[u] = __ldcs(gate_up + 2 * (row + u) * packs + at);
      ups[u] = __ldcs(gate_up + (2 * (row + u) + 1) * packs + at);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      float gate[PACK], up[PACK];
      unpack(gates[u], gate), unpack(ups[u], up);
#pragma unroll
      for (int k = 0; k < PACK; k++) up[k] *= gate[k] * sigmoid(gate[k]);
      __stcs(out + (row + u) * packs + at, pack(up));
    }
  }
}

__global__ void __launch_bounds__(THREADS)
    swiglu_backward(const uint4* __restrict__ dout, const uint4* gate_up, uint4* dgate_up, int64_t rows, int64_t packs) {
  const int64_t at = my_pack();
  if (at >= packs) return;
  for (int64_t row = first_row(); row < rows; row += next_rows()) {
    uint4 gates[AHEAD] = {}, ups[AHEAD] = {}, gradients[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      gates[u] = __ldcs(gate_up + 2 * (row + u) * packs + at);
      ups[u] = __ldcs(gate_up + (2 * (row + u) + 1) * packs + at);
      gradients[u] = __ldcs(dout + (row + u) * packs + at);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      float gate[PACK], up[PACK], d[PACK];
      unpack(gates[u], gate), unpack(ups[u], up), unpack(gradients[u], d);
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        const float s = sigmoid(gate[k]), silu = gate[k] * s;
        gate[k] = d[k] * up[k] * (s + silu * (1.f - s));
        up[k] = d[k] * silu;
      }
      __stcs(dgate_up + 2 * (row + u) * packs + at, pack(gate));
      __stcs(dgate_up + (2 * (row + u) + 1) * packs + at, pack(up));
    }
  }
}

// The tanh form of GELU: x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3), since tanh(u) = 2
// sigmoid(2 u) - 1.
constexpr float CUBIC = 0.044715f, TWICE = 1.59576912f, LOG2E = 1.44269504f;  // TWICE: 2 sqrt(2/pi)

// sigmoid(2 u) from x and its square. All constants are folded into the polynomial.
__device__ __forceinline__ float gelu_sigmoid(float x, float square) {
  return __fdividef(1.f, 1.f + exp2f(x * fmaf(-TWICE * LOG2E * CUBIC, square, -TWICE * LOG2E)));
}

__device__ __forceinline__ void load_bias(float (&b)[PACK], const uint4* bias, int64_t at) {
  if (bias) unpack(__ldg(bias + at), b);
}

__global__ void __launch_bounds__(THREADS)
    gelu(const uint4* __restrict__ x, const uint4* __restrict__ bias, uint4* __restrict__ out, int64_t rows,
         int64_t packs) {
  const int64_t at = my_pack();
  if (at >= packs) return;
  float b[PACK] = {};
  load_bias(b, bias, at);
  for (int64_t row = first_row(); row < rows; row += next_rows()) {
    uint4 words[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      if (row + u < rows) words[u] = __ldcs(x + (row + u) * packs + at);
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      float y[PACK];
      unpack(words[u], y);
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        const float in = y[k] + b[k];
        y[k] = in * gelu_sigmoid(in, in * in);
      }
      __stcs(out + (row + u) * packs + at, pack(y));
    }
  }
}

// Computes dx and, unless db_parts [gridDim.y f] is null, the sums of dx over the rows of each
// blockIdx.y.
__global__ void __launch_bounds__(THREADS)
    gelu_backward(const uint4* __restrict__ dout, const uint4* __restrict__ x, const uint4* __restrict__ bias,
                  uint4* __restrict__ dx, float* __restrict__ db_parts, int64_t rows, int64_t packs) {
  const int64_t at = my_pack();
  float b[PACK] = {}, db[PACK] = {};
  if (at < packs) load_bias(b, bias, at);
  for (int64_t row = first_row(); row < rows && at < packs; row += next_rows()) {
    uint4 words[AHEAD] = {}, gradients[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      words[u] = __ldcs(x + (row + u) * packs + at);
      gradients[u] = __ldcs(dout + (row + u) * packs + at);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row + u >= rows) continue;
      float y[PACK], d[PACK];
      unpack(words[u], y), unpack(gradients[u], d);
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        const float in = y[k] + b[k], square = in * in, s = gelu_sigmoid(in, square);
        const float slope = in * fmaf(3.f * CUBIC * TWICE, square, TWICE);  // x d(2 u)/dx
        d[k] *= fmaf(s, fmaf(-s, slope, slope), s);
        db[k] += d[k];
      }
      __stcs(dx + (row + u) * packs + at, pack(d));
    }
  }
  if (!db_parts) return;
  store_sum_of_warps<WARPS>(db_parts + int64_t(blockIdx.y) * packs * PACK, db, at, packs);
}

// Returns a grid with enough blocks for all rows, but at most as many as CUDA allows.
dim3 grid_of(int64_t rows, int64_t packs) {
  const int64_t down = ceil_div(rows, WARPS * AHEAD);
  return dim3(unsigned(ceil_div(packs, WARP)), unsigned(down < 65535 ? down : 65535));
}

}  // namespace

extern "C" {

// out [rows f] = silu(gate) up for gate_up [rows 2f].
int threed_cuda_swiglu(const void* gate_up, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return launch(swiglu, grid_of(rows, f / PACK), THREADS, 0, stream, static_cast<const uint4*>(gate_up),
                static_cast<uint4*>(out), rows, f / PACK);
}

// dgate_up [rows 2f] = the gradient of gate_up; may be gate_up itself.
int threed_cuda_swiglu_backward(const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t f,
                                cudaStream_t stream) {
  return launch(swiglu_backward, grid_of(rows, f / PACK), THREADS, 0, stream, static_cast<const uint4*>(dout),
                static_cast<const uint4*>(gate_up), static_cast<uint4*>(dgate_up), rows, f / PACK);
}

// out [rows f] = gelu(x + bias); bias [f] may be null.
int threed_cuda_gelu(const void* x, const void* bias, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return launch(gelu, grid_of(rows, f / PACK), THREADS, 0, stream, static_cast<const uint4*>(x),
                static_cast<const uint4*>(bias), static_cast<uint4*>(out), rows, f / PACK);
}

// dx [rows f] = the gradient of x. db_parts, fp32 [blocks f] or null, receives partial sums of dx
// over rows.
int threed_cuda_gelu_backward(const void* dout, const void* x, const void* bias, void* dx, float* db_parts, int64_t rows,
                              int64_t f, int64_t blocks, cudaStream_t stream) {
  const dim3 grid = db_parts ? dim3(unsigned(ceil_div(f / PACK, WARP)), unsigned(blocks)) : grid_of(rows, f / PACK);
  return launch(gelu_backward, grid, THREADS, 0, stream, static_cast<const uint4*>(dout), static_cast<const uint4*>(x),
                static_cast<const uint4*>(bias), static_cast<uint4*>(dx), db_parts, rows, f / PACK);
}

}  // extern "C"
