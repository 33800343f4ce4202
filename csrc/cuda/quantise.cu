// Blocks of 256 bf16 numbers as whole numbers of 8 or 4 bits and one fp32 scale, for collectives that send less; and back,
// summed over ranks (ZeRO++, arXiv 2306.10209, section 4).
//
//   quantise            q = round(x / scale), scale = largest |x| / 127 (or 7)       3 bytes an element (2.5 in 4 bits)
//   dequantise, reduce  out = sum over ranks of q scale, in fp32, in their order     n + 2 bytes (n / 2 + 2)
//
// A warp has a block, a lane eight of its numbers. Four bits: the first number of a byte is in its low half. Where a block has
// a number that is not finite its scale is NaN, and so is all that comes back.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;

// Bits of eight numbers, least significant first, of BITS each.
template <int BITS>
struct Packed;
template <>
struct Packed<8> {
  using type = uint2;
};
template <>
struct Packed<4> {
  using type = unsigned;
};

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, step));
  return x;
}

__device__ __forceinline__ uint2 join(const int (&q)[PACK], uint2) {
  unsigned words[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < PACK; k++) words[k / 4] |= (unsigned(q[k]) & 0xffu) << (k % 4 * 8);
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ unsigned join(const int (&q)[PACK], unsigned) {
  unsigned word = 0;
#pragma unroll
  for (int k = 0; k < PACK; k++) word |= (unsigned(q[k]) & 0xfu) << (k * 4);
  return word;
}

__device__ __forceinline__ void split(uint2 from, int (&q)[PACK]) {
#pragma unroll
  for (int k = 0; k < PACK; k++) q[k] = int((k < 4 ? from.x : from.y) << (24 - k % 4 * 8)) >> 24;
}

__device__ __forceinline__ void split(unsigned from, int (&q)[PACK]) {
#pragma unroll
  for (int k = 0; k < PACK; k++) q[k] = int(from << (28 - k * 4)) >> 28;
}

template <int BITS>
__global__ void __launch_bounds__(THREADS)
    quantise(const uint4* __restrict__ x, typename Packed<BITS>::type* __restrict__ out, float* __restrict__ scales,
             int64_t blocks) {
  constexpr float TOP = BITS == 8 ? 127.f : 7.f;
  const int lane = threadIdx.x % WARP;
  for (int64_t block = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; block < blocks;
       block += int64_t(gridDim.x) * WARPS) {
    float y[PACK], top = 0.f, odd = 0.f;
    unpack(__ldcs(x + block * WARP + lane), y);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      top = fmaxf(top, fabsf(y[k]));
      odd += y[k] - y[k];  // NaN for what is not finite
    }
    top = largest_of_warp(top);
    const bool finite = __all_sync(EVERY_LANE, odd == 0.f);
    const float scale = finite ? top * (1.f / TOP) : NAN, inverse = top > 0.f ? __fdividef(TOP, top) : 0.f;
    int q[PACK];
#pragma unroll
    for (int k = 0; k < PACK; k++) q[k] = finite ? __float2int_rn(fminf(fmaxf(y[k] * inverse, -TOP), TOP)) : 0;
    __stcs(out + block * WARP + lane, join(q, typename Packed<BITS>::type()));
    if (lane == 0) scales[block] = scale;
  }
}

// q [ranks blocks 256], scales [ranks blocks] -> out bf16 [blocks 256]
template <int BITS>
__global__ void __launch_bounds__(THREADS)
    dequantise(const typename Packed<BITS>::type* __restrict__ q, const float* __restrict__ scales, uint4* __restrict__ out,
               int64_t blocks, int ranks) {
  const int lane = threadIdx.x % WARP;
  for (int64_t block = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; block < blocks;
       block += int64_t(gridDim.x) * WARPS) {
    float sum[PACK] = {};
#pragma unroll 4
    for (int rank = 0; rank < ranks; rank++) {
      const int64_t at = int64_t(rank) * blocks + block;
      const float scale = __ldg(scales + at);
      int one[PACK];
      split(__ldcs(q + at * WARP + lane), one);
#pragma unroll
      for (int k = 0; k < PACK; k++) sum[k] += float(one[k]) * scale;
    }
    __stcs(out + block * WARP + lane, pack(sum));
  }
}

}  // namespace

extern "C" {

// out: whole numbers of `bits` (8 or 4) [blocks 256]; scales fp32 [blocks]; from x bf16 [blocks 256].
int threed_cuda_quantise(const void* x, void* out, float* scales, int64_t blocks, int64_t bits, int64_t grid,
                         cudaStream_t stream) {
  const uint4* const from = static_cast<const uint4*>(x);
  return bits == 8 ? launch(quantise<8>, unsigned(grid), THREADS, 0, stream, from, static_cast<uint2*>(out), scales, blocks)
                   : launch(quantise<4>, unsigned(grid), THREADS, 0, stream, from, static_cast<unsigned*>(out), scales, blocks);
}

// out bf16 [blocks 256] = the sum over ranks of q [ranks blocks 256] times scales [ranks blocks].
int threed_cuda_dequantise(const void* q, const float* scales, void* out, int64_t blocks, int64_t ranks, int64_t bits,
                           int64_t grid, cudaStream_t stream) {
  uint4* const to = static_cast<uint4*>(out);
  return bits == 8 ? launch(dequantise<8>, unsigned(grid), THREADS, 0, stream, static_cast<const uint2*>(q), scales, to,
                            blocks, ranks)
                   : launch(dequantise<4>, unsigned(grid), THREADS, 0, stream, static_cast<const unsigned*>(q), scales, to,
                            blocks, ranks);
}

}  // extern "C"
