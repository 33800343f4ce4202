// Sums in two stages, each in a fixed order: partial sums per block, then their sum.

#include "common.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP, LANES = 8;
constexpr int COLUMNS = 4 * LANES;  // per block of `add_parts`, four per lane

struct Parts {
  const float* parts;
  float* out;
  bool add;
  int count;
};

// out [columns] = (add ? out : 0) + the sum of parts [count columns] over count. blockIdx.y selects
// one of up to three sums. LANES neighboring threads add every THREADS / LANES-th part of their columns; then
// the sums of a warp are added, and the sums of the warps in order. Few columns per block make enough blocks for all
// multiprocessors. columns: a multiple of 4.
__global__ void __launch_bounds__(THREADS) add_parts(Parts first, Parts second, Parts third, int64_t columns) {
  __shared__ float4 of_warp[WARPS][LANES];
  const Parts mine = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
  const float* const __restrict__ parts = mine.parts;
  float* const __restrict__ out = mine.out;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / WARP;
  const int64_t column = int64_t(blockIdx.x) * COLUMNS + 4 * lane;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (column < columns) {
#pragma unroll 4
    for (int part = threadIdx.x / LANES; part < mine.count; part += THREADS / LANES) {
      const float4 x = __ldcs(reinterpret_cast<const float4*>(parts + part * columns + column));
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
#pragma unroll
  for (int step = LANES; step < WARP; step *= 2) {
    sum.x += __shfl_xor_sync(EVERY_LANE, sum.x, step), sum.y += __shfl_xor_sync(EVERY_LANE, sum.y, step);
    sum.z += __shfl_xor_sync(EVERY_LANE, sum.z, step), sum.w += __shfl_xor_sync(EVERY_LANE, sum.w, step);
  }
  if (threadIdx.x % WARP < LANES) of_warp[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x >= LANES || column >= columns) return;
  float4* const to = reinterpret_cast<float4*>(out + column);
  sum = mine.add ? *to : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float4 x = of_warp[w][lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  *to = sum;
}

// parts [gridDim.y columns] = each block's sums over its rows of x, bf16 [rows columns]. A warp
// processes 32 packs of columns.
__global__ void __launch_bounds__(THREADS)
    column_sums(const uint4* __restrict__ x, float* __restrict__ parts, int64_t rows, int64_t packs) {
  constexpr int AHEAD = 4;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int64_t at = int64_t(blockIdx.x) * WARP + lane, step = int64_t(gridDim.y) * WARPS * AHEAD;
  float sum[PACK] = {};
  for (int64_t row = (int64_t(blockIdx.y) * WARPS + warp) * AHEAD; row < rows && at < packs; row += step) {
    uint4 words[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      if (row + u < rows) words[u] = __ldcs(x + (row + u) * packs + at);
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      float y[PACK];
      unpack(words[u], y);
#pragma unroll
      for (int k = 0; k < PACK; k++) sum[k] += y[k];
    }
  }
  store_sum_of_warps<WARPS>(parts + int64_t(blockIdx.y) * packs * PACK, sum, at, packs);
}

__device__ __forceinline__ float squares(const float4& x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }

// parts [gridDim.x] = each block's sum of squares of x [4 fours]. Then `sum_parts` adds up the
// parts in fp64.
__global__ void __launch_bounds__(THREADS)
    square_parts(const float4* __restrict__ x, float* __restrict__ parts, int64_t fours) {
  constexpr int AHEAD = 4;
  __shared__ float scratch[WARPS];
  const int64_t step = int64_t(gridDim.x) * THREADS;
  float sum = 0.f;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < fours; i += step * AHEAD) {
    float4 words[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      words[u] = i + u * step < fours ? __ldcs(x + i + u * step) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int u = 0; u < AHEAD; u++) sum += squares(words[u]);
  }
  sum = sum_over_block<WARPS>(sum, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(WARP) sum_parts(const float* __restrict__ parts, double* __restrict__ out, int count) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += WARP) sum += double(parts[i]);
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(EVERY_LANE, sum, step);
  if (threadIdx.x == 0) *out = sum;
}

}  // namespace

extern "C" {

// out fp32 [columns] = (add ? out : 0) + the sum over parts [count columns]; the same for the second
// and the third sum. The last `3 - sums` are not computed.
int threed_cuda_add_parts(const float* parts, float* out, int64_t add, int64_t count, const float* second_parts,
                          float* second_out, int64_t add_second, int64_t second_count, const float* third_parts,
                          float* third_out, int64_t add_third, int64_t third_count, int64_t sums, int64_t columns,
                          cudaStream_t stream) {
  const dim3 grid(unsigned(ceil_div(columns, COLUMNS)), unsigned(sums));
  return launch(add_parts, grid, THREADS, 0, stream, Parts{parts, out, add != 0, int(count)},
                Parts{second_parts, second_out, add_second != 0, int(second_count)},
                Parts{third_parts, third_out, add_third != 0, int(third_count)}, columns);
}

// parts, fp32 [blocks columns] = each block's sums over its rows of x, bf16 [rows columns].
int threed_cuda_column_sums(const void* x, float* parts, int64_t rows, int64_t columns, int64_t blocks,
                            cudaStream_t stream) {
  return launch(column_sums, dim3(unsigned(ceil_div(columns, PACK * WARP)), unsigned(blocks)), THREADS, 0, stream,
                static_cast<const uint4*>(x), parts, rows, columns / PACK);
}

// out, fp64 scalar = the sum of squares of x fp32 [n], n a multiple of 4. parts: fp32 [blocks],
// working memory.
int threed_cuda_square_sum(const float* x, float* parts, double* out, int64_t n, int64_t blocks, cudaStream_t stream) {
  if (const int error = launch(square_parts, unsigned(blocks), THREADS, 0, stream,
                               reinterpret_cast<const float4*>(x), parts, n / 4))
    return error;
  return launch(sum_parts, 1, WARP, 0, stream, parts, out, blocks);
}

}  // extern "C"
