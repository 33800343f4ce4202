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

// What 1.5 2^23 and a number of less than 2^22 sum to has the nearest whole number, ties to even, in its last bits.
constexpr float ROUNDER = 12582912.f;
constexpr unsigned ROUNDER_BITS = 0x4B400000u;
constexpr float SMALLEST = 1e-36f;  // of a block's largest number: else the inverse of its scale is infinite, so it is 0

// A word's whole numbers plus ROUNDER, as fields of BITS: summed as numbers without sign, until the last step.
template <int BITS>
__device__ __forceinline__ unsigned word_of(const float* rounded) {
  constexpr unsigned HALF = 1u << (BITS - 1), ONES = BITS == 8 ? 0x01010101u : 0x11111111u;
  unsigned word = 0;
#pragma unroll
  for (int k = 32 / BITS - 1; k >= 0; k--) word = (word << BITS) + __float_as_uint(rounded[k]);
  return (word - (ROUNDER_BITS - HALF) * ONES) ^ (HALF * ONES);
}

__device__ __forceinline__ uint2 join(const float (&rounded)[PACK], uint2) {
  return make_uint2(word_of<8>(rounded), word_of<8>(rounded + 4));
}
__device__ __forceinline__ unsigned join(const float (&rounded)[PACK], unsigned) { return word_of<4>(rounded); }

// Byte k of a word, less `zero`. whole: the bits of 2^23, which is what they stand for with a byte in the last of them.
constexpr unsigned WHOLE_BITS = 0x4B000000u;
__device__ __forceinline__ float byte_of(unsigned word, int k, float zero, unsigned whole) {
  return __uint_as_float(__byte_perm(word, whole, 0x7540u + k)) - (8388608.f + zero);
}

// Adds numbers times `scale`; those of 4 bits in the upper halves of bytes as they lie there, 16 times.
__device__ __forceinline__ void add(float (&sum)[PACK], const uint2& words, float scale, unsigned whole) {
#pragma unroll
  for (int k = 0; k < PACK; k++)
    sum[k] += byte_of((k < 4 ? words.x : words.y) ^ 0x80808080u, k % 4, 128.f, whole) * scale;
}
__device__ __forceinline__ void add(float (&sum)[PACK], unsigned word, float scale, unsigned whole) {
  const unsigned fields = word ^ 0x88888888u, low = fields & 0x0f0f0f0fu, high = fields & 0xf0f0f0f0u;
#pragma unroll
  for (int k = 0; k < PACK; k++)
    sum[k] += byte_of(k % 2 ? high : low, k / 2, k % 2 ? 128.f : 8.f, whole) * scale;
}

// The largest |x| of a warp's packs. Without their signs, numbers are ordered as their bits are; infinity and NaN are last.
__device__ __forceinline__ float largest_of_warp(const uint4& from) {
  unsigned top = 0;  // in the upper 15 bits
#pragma unroll
  for (const unsigned word : {from.x, from.y, from.z, from.w}) top = max(top, max(word << 17, word << 1));
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) top = max(top, __shfl_xor_sync(EVERY_LANE, top, step));
  return __uint_as_float(top >> 1 & 0x7fff0000u);
}

template <int BITS>
__global__ void __launch_bounds__(THREADS)
    quantise(const uint4* __restrict__ x, typename Packed<BITS>::type* __restrict__ out, float* __restrict__ scales,
             int64_t blocks) {
  constexpr float TOP = BITS == 8 ? 127.f : 7.f;
  const int lane = threadIdx.x % WARP;
  for (int64_t block = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; block < blocks;
       block += int64_t(gridDim.x) * WARPS) {
    const uint4 words = __ldcs(x + block * WARP + lane);
    const float top = largest_of_warp(words), inverse = top >= SMALLEST ? __fdividef(TOP, top) : 0.f;
    float y[PACK];
    unpack(words, y);
#pragma unroll
    for (int k = 0; k < PACK; k++) y[k] = fmaf(y[k], inverse, ROUNDER);
    __stcs(out + block * WARP + lane, join(y, typename Packed<BITS>::type()));
    if (lane == 0) scales[block] = top < INFINITY ? top * (1.f / TOP) : NAN;
  }
}

// q [ranks blocks 256], scales [ranks blocks] -> out bf16 [blocks 256]
template <int BITS>
__global__ void __launch_bounds__(THREADS)
    dequantise(const typename Packed<BITS>::type* __restrict__ q, const float* __restrict__ scales, uint4* __restrict__ out,
               int64_t blocks, int ranks) {
  constexpr int AHEAD = 8;  // ranks whose words a thread asks for before it uses the first
  // Nothing but itself, yet not a constant to the compiler: so it is in a register, and the bytes' places in instructions.
  const unsigned whole = WHOLE_BITS + unsigned(ranks < 0);
  const int lane = threadIdx.x % WARP;
  for (int64_t block = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; block < blocks;
       block += int64_t(gridDim.x) * WARPS) {
    float sum[PACK] = {};
    const auto* from = q + block * WARP + lane;
    const float* scale_at = scales + block;
    for (int rank = 0; rank < ranks; rank += AHEAD) {
      typename Packed<BITS>::type words[AHEAD] = {};
      float scale[AHEAD] = {};
#pragma unroll
      for (int u = 0; u < AHEAD; u++, from += blocks * WARP, scale_at += blocks) {
        if (rank + u >= ranks) continue;
        words[u] = __ldcs(from);
        scale[u] = __ldg(scale_at);
      }
#pragma unroll
      for (int u = 0; u < AHEAD; u++) add(sum, words[u], scale[u], whole);  // nothing, from a rank that is not there
    }
#pragma unroll
    for (int k = 1; k < PACK; k += 2) sum[k] *= BITS == 4 ? 1.f / 16 : 1.f;
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
