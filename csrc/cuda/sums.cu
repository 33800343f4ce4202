// Sums whose parts blocks have written: second stages, each in a fixed order.

#include "common.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP, COLUMNS = 4 * WARP;  // of a block: four to a lane

// out [columns] = (add ? out : 0) + the sum of parts [count columns] over count. A warp takes each WARPS-th part; then the
// warps' sums are added in order. columns: a multiple of 4.
__global__ void __launch_bounds__(THREADS)
    add_parts(const float* __restrict__ parts, float* __restrict__ out, int count, int64_t columns, bool add) {
  __shared__ float4 of_warp[WARPS][WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int64_t column = int64_t(blockIdx.x) * COLUMNS + 4 * lane;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (column < columns) {
#pragma unroll 4
    for (int part = warp; part < count; part += WARPS) {
      const float4 x = __ldcs(reinterpret_cast<const float4*>(parts + part * columns + column));
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  float4* const to = reinterpret_cast<float4*>(out + column);
  sum = add ? *to : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float4 x = of_warp[w][lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  *to = sum;
}

}  // namespace

extern "C" int threed_cuda_add_parts(const float* parts, float* out, int64_t count, int64_t columns, int64_t add,
                                     cudaStream_t stream) {
  return launch(add_parts, unsigned(ceil_div(columns, COLUMNS)), THREADS, 0, stream, parts, out, count, columns, add != 0);
}
