// RMSNorm and LayerNorm over rows of bf16, with the residual addition before them.
//
//   forward    s = x + residual + before, rounded to bf16;  y = norm(s)    8 bytes per element, 4 without the addition
//   backward   ds = d norm(s)/ds dy + dresidual;  dw, db: sums over rows   8 bytes, 6 without dresidual
//
// A row is held in registers by one warp, or by a block of 4, 8 or 16 warps. Every thread has the
// same columns in all of its rows. In the backward, a block can therefore iterate over rows and
// accumulate the gradients of weight and bias in registers. sums.cu adds up these partial sums
// [blocks h]. All sums are fp32, in an order that depends on the shape and the number of blocks.

#include "common.cuh"

namespace {

// Parameters of the templates: LAYER: LayerNorm, else RMSNorm. OF_ROW: warps per row. PACKS: packs
// per thread; h <= OF_ROW * WARP * PACK * PACKS, a multiple of PACK.
template <int OF_ROW>
struct Shape {
  static constexpr int THREADS = OF_ROW > 1 ? OF_ROW * WARP : 256;
  static constexpr int ROWS = THREADS / (OF_ROW * WARP);  // rows that a block processes at a time
};

// Returns the sum over a row to all of its threads. Successive sums alternate between the two
// halves of scratch.
template <int OF_ROW>
__device__ __forceinline__ float sum_over_row(float x, float (*scratch)[OF_ROW], int& turn) {
  if (OF_ROW == 1) return sum_over_warp(x);
  turn ^= 1;
  return sum_over_block<OF_ROW>(x, scratch[turn]);
}

__device__ __forceinline__ void add(float (&sum)[PACK], const uint4& words) {
  float x[PACK];
  unpack(words, x);
#pragma unroll
  for (int k = 0; k < PACK; k++) sum[k] += x[k];
}

template <bool LAYER, int OF_ROW, int PACKS>
__global__ void __launch_bounds__(Shape<OF_ROW>::THREADS)
    forward(const uint4* __restrict__ x, const uint4* __restrict__ residual, const uint4* __restrict__ before,
            const uint4* __restrict__ weight, const uint4* __restrict__ bias, uint4* __restrict__ sum,
            uint4* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, unsigned rows, int packs,
            float share, float eps) {
  __shared__ float scratch[2][OF_ROW];
  const int column = threadIdx.x % (OF_ROW * WARP);
  int turn = 0;
  const unsigned row = blockIdx.x * Shape<OF_ROW>::ROWS + threadIdx.x / (OF_ROW * WARP);
  if (row >= rows) return;  // complete warps return; no other warp waits for them
  const int64_t first = int64_t(row) * packs;
  float s[PACKS][PACK] = {}, total = 0.f;
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    const int at = p * OF_ROW * WARP + column;
    if (at >= packs) continue;
    unpack(__ldcs(x + first + at), s[p]);
    if (residual) add(s[p], __ldcs(residual + first + at));
    if (before) add(s[p], __ldg(before + at));
    if (sum) {
      const uint4 rounded = pack(s[p]);
      __stcs(sum + first + at, rounded);
      unpack(rounded, s[p]);
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) total += LAYER ? s[p][k] : s[p][k] * s[p][k];
  }
  total = sum_over_row<OF_ROW>(total, scratch, turn) * share;
  const float mean = LAYER ? total : 0.f;
  if (LAYER) {  // from here on, s is the row minus its mean
    float squares = 0.f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      if (p * OF_ROW * WARP + column >= packs) continue;
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        s[p][k] -= mean;
        squares += s[p][k] * s[p][k];
      }
    }
    total = sum_over_row<OF_ROW>(squares, scratch, turn) * share;
  }
  const float scale = rsqrtf(total + eps);
  if (column == 0) {
    if (LAYER) means[row] = mean;
    scales[row] = scale;
  }
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    const int at = p * OF_ROW * WARP + column;
    if (at >= packs) continue;
    float w[PACK], b[PACK] = {};
    unpack(__ldg(weight + at), w);
    if (LAYER && bias) unpack(__ldg(bias + at), b);
#pragma unroll
    for (int k = 0; k < PACK; k++) w[k] = s[p][k] * scale * w[k] + b[k];
    __stcs(y + first + at, pack(w));
  }
}

// Writes a block's partial sum over rows to parts [blocks h]. If a block processes several rows at
// a time, their sums are added in order.
template <int OF_ROW, int PACKS>
__device__ __forceinline__ void write_part(float* parts, float (&mine)[PACKS][PACK], int packs, int column, int lane_row) {
  constexpr int ROWS = Shape<OF_ROW>::ROWS, COLUMNS = OF_ROW * WARP;
  __shared__ float so_far[ROWS > 1 ? PACK : 1][ROWS > 1 ? PACKS * COLUMNS : 1];
  for (int turn = 0; turn < ROWS; turn++) {
    if (lane_row == turn) {
#pragma unroll
      for (int p = 0; p < PACKS; p++)
#pragma unroll
        for (int k = 0; k < PACK; k++) {
          float& sum = so_far[k][ROWS > 1 ? p * COLUMNS + column : 0];
          if (turn > 0) mine[p][k] += sum;
          if (turn < ROWS - 1) sum = mine[p][k];
        }
    }
    if (ROWS > 1) __syncthreads();
  }
  if (lane_row < ROWS - 1) return;
#pragma unroll
  for (int p = 0; p < PACKS; p++)
    store_floats(parts + int64_t(blockIdx.x) * packs * PACK, mine[p], p * COLUMNS + column, packs);
}

// A thread's part of a row's operands. The residual is zero if it is absent or loaded later.
template <int PACKS>
struct Operands {
  uint4 x[PACKS], dy[PACKS], residual[PACKS];
  float mean, scale;
};

// The sums that a row's gradient needs: plain = sum of w dy, scaled = sum of w dy times the
// normalized x.
struct Sums {
  float plain, scaled;
};

// AHEAD: up to two packs per thread leave enough registers to keep the weights for all rows, and to
// load the operands of the next row before the sums of this one. So loads are in flight while the
// block waits for its sums. EARLY: the residual is loaded with x and dy, not after the sums.
template <bool LAYER, int OF_ROW, int PACKS>
__global__ void __launch_bounds__(Shape<OF_ROW>::THREADS, PACKS > 1 ? 512 / Shape<OF_ROW>::THREADS : 3)
    backward(const uint4* __restrict__ dy, const uint4* __restrict__ x, const uint4* __restrict__ weight,
             const float* __restrict__ means, const float* __restrict__ scales, const uint4* __restrict__ residual,
             uint4* __restrict__ dx, float* __restrict__ dw_parts, float* __restrict__ db_parts, int64_t rows, int h,
             float share) {
  constexpr int ROWS = Shape<OF_ROW>::ROWS, COLUMNS = OF_ROW * WARP;  // columns of packs
  constexpr bool AHEAD = PACKS <= 2, EARLY = AHEAD || !LAYER;
  __shared__ float scratch[2][OF_ROW];
  const int packs = h / PACK, column = threadIdx.x % COLUMNS, lane_row = threadIdx.x / COLUMNS;
  const int64_t step = int64_t(gridDim.x) * ROWS;
  float dw[PACKS][PACK] = {}, db[LAYER ? PACKS : 1][PACK] = {};
  uint4 weights[PACKS] = {};
  const auto load = [&](int64_t row) {
    Operands<PACKS> of = {};
    if (row >= rows) return of;
    of.mean = LAYER ? __ldg(means + row) : 0.f, of.scale = __ldg(scales + row);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      const int at = p * COLUMNS + column;
      if (at >= packs) continue;
      of.x[p] = __ldcs(x + row * packs + at);
      of.dy[p] = __ldcs(dy + row * packs + at);
      if (EARLY && residual) of.residual[p] = __ldcs(residual + row * packs + at);
    }
    return of;
  };
  if (AHEAD)
#pragma unroll
    for (int p = 0; p < PACKS; p++)
      if (p * COLUMNS + column < packs) weights[p] = __ldg(weight + p * COLUMNS + column);
  int turn = 0;
  int64_t row = int64_t(blockIdx.x) * ROWS + lane_row;
  Operands<PACKS> next = AHEAD ? load(row) : Operands<PACKS>();
  for (; row < rows; row += step) {
    const Operands<PACKS> of = AHEAD ? next : load(row);
    if (AHEAD) next = load(row + step);
    Sums sums = {0.f, 0.f};
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      const int at = p * COLUMNS + column;
      if (at >= packs) continue;
      float a[PACK], g[PACK], w[PACK];
      unpack(of.x[p], a), unpack(of.dy[p], g), unpack(AHEAD ? weights[p] : __ldg(weight + at), w);
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        const float normal = (a[k] - of.mean) * of.scale;
        dw[p][k] += g[k] * normal;
        if (LAYER) db[p][k] += g[k];
        if (LAYER) sums.plain += w[k] * g[k];
        sums.scaled += w[k] * g[k] * normal;
      }
    }
    sums.scaled = sum_over_row<OF_ROW>(sums.scaled, scratch, turn) * share * of.scale;
    if (LAYER) sums.plain = sum_over_row<OF_ROW>(sums.plain, scratch, turn) * share;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      const int at = p * COLUMNS + column;
      if (at >= packs) continue;
      float a[PACK], g[PACK], w[PACK], d[PACK];
      unpack(of.x[p], a), unpack(of.dy[p], g), unpack(AHEAD ? weights[p] : __ldg(weight + at), w);
      unpack(!EARLY && residual ? __ldcs(residual + row * packs + at) : of.residual[p], d);
#pragma unroll
      for (int k = 0; k < PACK; k++) d[k] += of.scale * (w[k] * g[k] - sums.plain - (a[k] - of.mean) * sums.scaled);
      __stcs(dx + row * packs + at, pack(d));
    }
  }
  write_part<OF_ROW, PACKS>(dw_parts, dw, packs, column, lane_row);
  if constexpr (LAYER)
    if (db_parts) write_part<OF_ROW, PACKS>(db_parts, db, packs, column, lane_row);
}

template <int OF_ROW_, int PACKS_>
struct Kernel : Shape<OF_ROW_> {
  static constexpr int OF_ROW = OF_ROW_, PACKS = PACKS_;
  static constexpr int MOST = OF_ROW * WARP * PACKS;  // packs per row
};

// Calls start(Kernel) with the smallest shape for rows of `packs`.
template <class F>
int with_shape(int64_t packs, F start) {
  if (packs <= Kernel<1, 1>::MOST) return start(Kernel<1, 1>());
  if (packs <= Kernel<1, 4>::MOST) return start(Kernel<1, 4>());
  if (packs <= Kernel<4, 2>::MOST) return start(Kernel<4, 2>());
  if (packs <= Kernel<8, 2>::MOST) return start(Kernel<8, 2>());
  if (packs <= Kernel<16, 2>::MOST) return start(Kernel<16, 2>());
  if (packs <= Kernel<16, 4>::MOST) return start(Kernel<16, 4>());
  return cudaErrorInvalidValue;
}

template <bool LAYER>
int start_forward(const void* x, const void* residual, const void* before, const void* weight, const void* bias, void* sum,
                  void* y, float* means, float* scales, int64_t rows, int64_t h, double eps, cudaStream_t stream) {
  const auto packs = [](const void* of) { return static_cast<const uint4*>(of); };
  return with_shape(h / PACK, [&](auto shape) {
    using K = decltype(shape);
    return launch(forward<LAYER, K::OF_ROW, K::PACKS>, unsigned(ceil_div(rows, K::ROWS)), K::THREADS, 0, stream, packs(x),
                  packs(residual), packs(before), packs(weight), packs(bias), static_cast<uint4*>(sum),
                  static_cast<uint4*>(y), means, scales, unsigned(rows), int(h / PACK), 1.f / float(h), eps);
  });
}

template <bool LAYER>
int start_backward(const void* dy, const void* x, const void* weight, const float* means, const float* scales,
                   const void* residual, void* dx, float* dw_parts, float* db_parts, int64_t rows, int64_t h,
                   int64_t blocks, cudaStream_t stream) {
  const auto packs = [](const void* of) { return static_cast<const uint4*>(of); };
  return with_shape(h / PACK, [&](auto shape) {
    using K = decltype(shape);
    return launch(backward<LAYER, K::OF_ROW, K::PACKS>, unsigned(blocks), K::THREADS, 0, stream, packs(dy), packs(x),
                  packs(weight), means, scales, packs(residual), static_cast<uint4*>(dx), dw_parts, db_parts, rows, h,
                  1.f / float(h));
  });
}

}  // namespace

extern "C" {

// y = norm(s) for bf16 rows [rows h], s = x + residual + before. residual [rows h] and before [h]
// may be null. `sum` receives s; it is null if both `residual` and `before` are null. means (null
// for RMSNorm) and scales, fp32 [rows], are saved for the backward.
int threed_cuda_norm(const void* x, const void* residual, const void* before, const void* weight, const void* bias,
                     void* sum, void* y, float* means, float* scales, int64_t rows, int64_t h, double eps,
                     cudaStream_t stream) {
  return (means ? start_forward<true> : start_forward<false>)(x, residual, before, weight, bias, sum, y, means, scales,
                                                              rows, h, eps, stream);
}

// dx [rows h] = the gradient of x, plus `residual` [rows h] unless it is null. dw_parts and
// db_parts (null without a bias), fp32 [blocks h], receive each block's sums over rows.
int threed_cuda_norm_backward(const void* dy, const void* x, const void* weight, const float* means, const float* scales,
                              const void* residual, void* dx, float* dw_parts, float* db_parts, int64_t rows, int64_t h,
                              int64_t blocks, cudaStream_t stream) {
  return (means ? start_backward<true> : start_backward<false>)(dy, x, weight, means, scales, residual, dx, dw_parts,
                                                                db_parts, rows, h, blocks, stream);
}

}  // extern "C"
