// Shared by all kernels: packs of eight bf16 numbers in 16 bytes, sums over warps and blocks, and
// launches.
//
// nvcc compiles these sources for GPUs; g++ compiles the same sources for the emulator
// (tests/cuda). Kernels may therefore use only features of both: no inline PTX, no tensor cores, no
// atomics between blocks. Sums over blocks have two stages, partial sums and then their sum in a
// fixed order, so that a result never depends on the order of blocks.
//
// A launcher is a C function. Its arguments are pointers, integers as int64_t, other numbers as
// double, and the stream last. It does not allocate or synchronize, reads no device memory, and
// returns CUDA's error code. Python checks the arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr unsigned EVERY_LANE = 0xffffffffu;
constexpr int WARP = 32;
constexpr int PACK = 8;  // bf16 numbers in 16 bytes, the widest access

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ------------------------------------------------------------------------------------------------------ bf16 in packs

__device__ __forceinline__ float bf16_at(const uint16_t* at) { return __uint_as_float(unsigned(*at) << 16); }

__device__ __forceinline__ void unpack(const uint4& from, float (&x)[PACK]) {
  const unsigned words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ unsigned pair(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return unsigned(__bfloat16_as_ushort(both.x)) | unsigned(__bfloat16_as_ushort(both.y)) << 16;
}

__device__ __forceinline__ uint4 pack(const float (&x)[PACK]) {
  return make_uint4(pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5]), pair(x[6], x[7]));
}

// Loads eight floats of a table. The first four are at `from`, and the last four are `apart` float4
// further on, so that the reads of a warp are coalesced.
__device__ __forceinline__ void load_floats(float (&x)[PACK], const float4* from, unsigned apart) {
  const float4 low = __ldg(from), high = __ldg(from + apart);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// Stores each lane's eight floats from to + PACK * at on, if at < packs. Neighboring lanes first
// swap halves, so that each store of the warp fills complete sectors. All lanes must participate,
// and `at` must be even in even lanes and odd in odd lanes.
__device__ __forceinline__ void store_floats(float* to, const float (&x)[PACK], int64_t at, int64_t packs) {
  const bool odd = threadIdx.x % 2;
  float first[4], second[4];  // four of the even lane's eight floats, and four of the odd lane's
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float own = odd ? x[4 + k] : x[k], swapped = __shfl_xor_sync(EVERY_LANE, odd ? x[k] : x[4 + k], 1);
    first[k] = odd ? swapped : own;
    second[k] = odd ? own : swapped;
  }
  float4* const both = reinterpret_cast<float4*>(to + (at - odd) * PACK) + odd;
  if (at - odd < packs) both[0] = make_float4(first[0], first[1], first[2], first[3]);
  if (at - odd + 1 < packs) both[2] = make_float4(second[0], second[1], second[2], second[3]);
}

// Adds each lane's eight numbers over the warps of a block, in the order of the warps, and stores
// the eight sums from to + PACK * at on. to: [8 packs]. All threads must participate.
template <int WARPS>
__device__ __forceinline__ void store_sum_of_warps(float* to, float (&sum)[PACK], int64_t at, int64_t packs) {
  __shared__ float of_warp[WARPS][PACK][WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int k = 0; k < PACK; k++) of_warp[warp][k][lane] = sum[k];
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int w = 1; w < WARPS; w++)
#pragma unroll
    for (int k = 0; k < PACK; k++) sum[k] += of_warp[w][k][lane];
  store_floats(to, sum, at, packs);
}

// --------------------------------------------------------------------------------------------------------------- sums

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
  return x;
}

// Returns the sum over a block of WARPS warps to every thread. scratch [WARPS] must not be in use
// by the previous sum: a caller with several sums alternates between two arrays.
template <int WARPS>
__device__ __forceinline__ float sum_over_block(float x, float* scratch) {
  static_assert(WARPS <= WARP && (WARPS & (WARPS - 1)) == 0, "a power of two");
  x = sum_over_warp(x);
  if (WARPS == 1) return x;
  const int lane = threadIdx.x % WARP;
  if (lane == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  x = scratch[lane % WARPS];  // every WARPS neighboring lanes hold the sums of all warps
#pragma unroll
  for (int step = WARPS / 2; step; step /= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
  return x;
}

// ------------------------------------------------------------------------------------------------------------ launches

#ifdef __CUDACC__
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
}

template <class... P>
void enqueue(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, P... given) {
  kernel<<<grid, block, shared, stream>>>(given...);
}
#endif

// Returns the error of this launch and clears it, so that later launches do not report it again.
template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, A... given) {
  enqueue<P...>(kernel, grid, block, shared, stream, P(given)...);
  return cudaGetLastError();
}

constexpr size_t SHARED_WITHOUT_ASKING = 48 << 10;

// Permits a kernel to use `bytes` of dynamic shared memory, if that exceeds the default limit.
template <class K>
int allow_shared(K* kernel, size_t bytes) {
  if (bytes <= SHARED_WITHOUT_ASKING) return cudaSuccess;
  const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error) cudaGetLastError();  // clears the error
  return error;
}
