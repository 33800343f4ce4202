// Activations of the feed-forward part on bf16 rows. The backwards recompute intermediate values.
//
//   swiglu    out = silu(gate) up     gate_up [rows 2f] -> out [rows f]  6 bytes per element of out, backward 10
//   geglu     out = gelu(gate) up     the same, with GELU in its tanh form
//   gelu      out = gelu(x + bias)    tanh form, [rows f] -> [rows f]    4 bytes, backward 6
//   squared_relu  out = relu(x + bias)^2  the same
//
// A warp processes 32 packs of columns and iterates over rows, AHEAD at a time. So the backward of
// an activation with a bias can accumulate the gradient of the bias in registers. sums.cu adds up
// the partial sums [blocks f] of this gradient.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int AHEAD = 2;  // rows that a thread loads before it uses the first

// blockIdx.x: packs of columns; blockIdx.y: rows
__device__ __forceinline__ int64_t first_row() { return (int64_t(blockIdx.y) * WARPS + threadIdx.x / WARP) * AHEAD; }
__device__ __forceinline__ int64_t next_rows() { return int64_t(gridDim.y) * WARPS * AHEAD; }
__device__ __forceinline__ int64_t my_pack() { return int64_t(blockIdx.x) * WARP + threadIdx.x % WARP; }

// An activation and its derivative at x.
struct Value {
  float y, slope;
};

// x / (1 + exp(-x)). Below -88 the exponential is infinite, and y is 0.
struct Silu {
  static __device__ __forceinline__ Value at(float x) {
    const float s = __fdividef(1.f, 1.f + __expf(-x)), y = x * s;
    return {y, s + y * (1.f - s)};
  }
};

// The tanh form of GELU: x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3), since tanh(u) = 2
// sigmoid(2 u) - 1. All constants are folded into the polynomials.
struct Gelu {
  static __device__ __forceinline__ Value at(float x) {
    constexpr float CUBIC = 0.044715f, TWICE = 1.59576912f, LOG2E = 1.44269504f;  // TWICE: 2 sqrt(2/pi)
    const float square = x * x;
    const float s = __fdividef(1.f, 1.f + exp2f(x * fmaf(-TWICE * LOG2E * CUBIC, square, -TWICE * LOG2E)));
    const float rate = x * fmaf(3.f * CUBIC * TWICE, square, TWICE);  // x d(2 u)/dx
    return {x * s, fmaf(s, fmaf(-s, rate, rate), s)};
  }
};

// The square of max(x, 0); NaN if x is NaN.
struct SquaredRelu {
  static __device__ __forceinline__ Value at(float x) {
    const float r = x < 0.f ? 0.f : x;
    return {r * r, 2.f * r};
  }
};

// GELU or the squared ReLU, of x + bias.
template <bool GELU>
__device__ __forceinline__ Value biased_at(float x) {
  return GELU ? Gelu::at(x) : SquaredRelu::at(x);
}

// Of the gate: GELU, or SiLU.
template <bool GELU>
__device__ __forceinline__ Value gate_at(float x) {
  return GELU ? Gelu::at(x) : Silu::at(x);
}

template <bool GELU>
__global__ void __launch_bounds__(THREADS)
    gated(const uint4* __restrict__ gate_up, uint4* __restrict__ out, int64_t rows, int64_t packs) {
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
      for (int k = 0; k < PACK; k++) up[k] *= gate_at<GELU>(gate[k]).y;
      __stcs(out + (row + u) * packs + at, pack(up));
    }
  }
}

template <bool GELU>
__global__ void __launch_bounds__(THREADS)
    gated_backward(const uint4* __restrict__ dout, const uint4* gate_up, uint4* dgate_up, int64_t rows, int64_t packs) {
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
        const Value of = gate_at<GELU>(gate[k]);
        gate[k] = d[k] * up[k] * of.slope;
        up[k] = d[k] * of.y;
      }
      __stcs(dgate_up + 2 * (row + u) * packs + at, pack(gate));
      __stcs(dgate_up + (2 * (row + u) + 1) * packs + at, pack(up));
    }
  }
}

__device__ __forceinline__ void load_bias(float (&b)[PACK], const uint4* bias, int64_t at) {
  if (bias) unpack(__ldg(bias + at), b);
}

template <bool GELU>
__global__ void __launch_bounds__(THREADS)
    biased(const uint4* __restrict__ x, const uint4* __restrict__ bias, uint4* __restrict__ out, int64_t rows,
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
      for (int k = 0; k < PACK; k++) y[k] = biased_at<GELU>(y[k] + b[k]).y;
      __stcs(out + (row + u) * packs + at, pack(y));
    }
  }
}

// Computes dx and, unless db_parts [gridDim.y f] is null, the sums of dx over the rows of each
// blockIdx.y.
template <bool GELU>
__global__ void __launch_bounds__(THREADS)
    biased_backward(const uint4* __restrict__ dout, const uint4* __restrict__ x, const uint4* __restrict__ bias,
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
        d[k] *= biased_at<GELU>(y[k] + b[k]).slope;
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

template <class K>
int start_gated(K* kernel, const void* gate_up, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return launch(kernel, grid_of(rows, f / PACK), THREADS, 0, stream, static_cast<const uint4*>(gate_up),
                static_cast<uint4*>(out), rows, f / PACK);
}

template <class K>
int start_gated_backward(K* kernel, const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t f,
                         cudaStream_t stream) {
  return launch(kernel, grid_of(rows, f / PACK), THREADS, 0, stream, static_cast<const uint4*>(dout),
                static_cast<const uint4*>(gate_up), static_cast<uint4*>(dgate_up), rows, f / PACK);
}

template <class K>
int start_biased(K* kernel, const void* x, const void* bias, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return launch(kernel, grid_of(rows, f / PACK), THREADS, 0, stream, static_cast<const uint4*>(x),
                static_cast<const uint4*>(bias), static_cast<uint4*>(out), rows, f / PACK);
}

template <class K>
int start_biased_backward(K* kernel, const void* dout, const void* x, const void* bias, void* dx, float* db_parts,
                          int64_t rows, int64_t f, int64_t blocks, cudaStream_t stream) {
  const dim3 grid = db_parts ? dim3(unsigned(ceil_div(f / PACK, WARP)), unsigned(blocks)) : grid_of(rows, f / PACK);
  return launch(kernel, grid, THREADS, 0, stream, static_cast<const uint4*>(dout), static_cast<const uint4*>(x),
                static_cast<const uint4*>(bias), static_cast<uint4*>(dx), db_parts, rows, f / PACK);
}

}  // namespace

extern "C" {

// out [rows f] = silu(gate) up for gate_up [rows 2f].
int threed_cuda_swiglu(const void* gate_up, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return start_gated(gated<false>, gate_up, out, rows, f, stream);
}

// dgate_up [rows 2f] = the gradient of gate_up; may be gate_up itself.
int threed_cuda_swiglu_backward(const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t f,
                                cudaStream_t stream) {
  return start_gated_backward(gated_backward<false>, dout, gate_up, dgate_up, rows, f, stream);
}

// The same with gelu(gate).
int threed_cuda_geglu(const void* gate_up, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return start_gated(gated<true>, gate_up, out, rows, f, stream);
}

int threed_cuda_geglu_backward(const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t f,
                               cudaStream_t stream) {
  return start_gated_backward(gated_backward<true>, dout, gate_up, dgate_up, rows, f, stream);
}

// out [rows f] = gelu(x + bias); bias [f] may be null.
int threed_cuda_gelu(const void* x, const void* bias, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return start_biased(biased<true>, x, bias, out, rows, f, stream);
}

// dx [rows f] = the gradient of x. db_parts, fp32 [blocks f] or null, receives partial sums of dx
// over rows.
int threed_cuda_gelu_backward(const void* dout, const void* x, const void* bias, void* dx, float* db_parts, int64_t rows,
                              int64_t f, int64_t blocks, cudaStream_t stream) {
  return start_biased_backward(biased_backward<true>, dout, x, bias, dx, db_parts, rows, f, blocks, stream);
}

// The same with the squared ReLU.
int threed_cuda_squared_relu(const void* x, const void* bias, void* out, int64_t rows, int64_t f, cudaStream_t stream) {
  return start_biased(biased<false>, x, bias, out, rows, f, stream);
}

int threed_cuda_squared_relu_backward(const void* dout, const void* x, const void* bias, void* dx, float* db_parts,
                                      int64_t rows, int64_t f, int64_t blocks, cudaStream_t stream) {
  return start_biased_backward(biased_backward<false>, dout, x, bias, dx, db_parts, rows, f, blocks, stream);
}

}  // extern "C"
