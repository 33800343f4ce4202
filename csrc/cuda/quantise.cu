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
// 2^23: a whole number below it, in the last bits of this, is 2^23 plus that number.
constexpr float WHOLE = 8388608.f;
constexpr unsigned WHOLE_BITS = 0x4B000000u;
constexpr float SMALLEST = 1e-36f;  // of a block's largest number: else the inverse of its scale is infinite, so it is 0

// Whole numbers in words, as fields of BITS. HALF: what makes a field with a sign one without.
template <int BITS>
struct Fields {
  static constexpr unsigned HALF = 1u << (BITS - 1), ONES = BITS == 8 ? 0x01010101u : 0x11111111u;
  static constexpr int IN_WORD = 32 / BITS, IN_HALF_WORD = 16 / BITS;

  // Of IN_WORD numbers plus ROUNDER. The fields hold numbers without sign, until the last step.
  static __device__ __forceinline__ unsigned join(const float* rounded) {
    unsigned word = 0;
#pragma unroll
    for (int k = IN_WORD - 1; k >= 0; k--) word = (word << BITS) + __float_as_uint(rounded[k]);
    return (word - (ROUNDER_BITS - HALF) * ONES) ^ (HALF * ONES);
  }

  // Where field k begins in its half of the word; and the number in it, times 2 to the power of that: it stays in its place.
  static __device__ __forceinline__ int place(int k) { return k % IN_HALF_WORD * BITS; }
  static __device__ __forceinline__ float in_place(unsigned word, int k) {
    const unsigned half_word = (word ^ (HALF * ONES)) >> (k / IN_HALF_WORD * 16);
    const unsigned field = half_word & (((1u << BITS) - 1) << place(k));
    return __uint_as_float(WHOLE_BITS | field) - (WHOLE + float(HALF << place(k)));
  }
};

__device__ __forceinline__ uint2 join(const float (&rounded)[PACK], uint2) {
  return make_uint2(Fields<8>::join(rounded), Fields<8>::join(rounded + 4));
}
__device__ __forceinline__ unsigned join(const float (&rounded)[PACK], unsigned) { return Fields<4>::join(rounded); }

__device__ __forceinline__ float in_place(const uint2& words, int k) {
  return Fields<8>::in_place(k < 4 ? words.x : words.y, k % 4);
}
__device__ __forceinline__ float in_place(unsigned word, int k) { return Fields<4>::in_place(word, k); }

// The largest |x| of a warp's packs. Without their signs, numbers are ordered as their bits are; infinity and NaN are last.
__device__ __forceinline__ float largest_of_warp(const uint4& from) {
  unsigned top = 0;  // in the upper 15 bits
#pragma unroll
  for (const unsigned word : {from.x, from.y, from.z, from.w}) top = max(top, max(word << 17, word << 1));
  return __uint_as_float(__reduce_max_sync(EVERY_LANE, top) >> 1 & 0x7fff0000u);
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
  constexpr int AHEAD = 4;  // ranks whose words a thread asks for before it uses the first
  constexpr float LAST = 1 << (16 - BITS);  // what a number in its half word's last place is multiplied by
  const int lane = threadIdx.x % WARP;
  for (int64_t block = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; block < blocks;
       block += int64_t(gridDim.x) * WARPS) {
    float sum[PACK] = {};
    for (int rank = 0; rank < ranks; rank += AHEAD) {
      typename Packed<BITS>::type words[AHEAD] = {};
      float scale[AHEAD] = {};
#pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        if (rank + u >= ranks) continue;
        const int64_t at = int64_t(rank + u) * blocks + block;
        words[u] = __ldcs(q + at * WARP + lane);
        scale[u] = __ldg(scales + at);
      }
#pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        if (rank + u >= ranks) continue;
        scale[u] *= 1.f / LAST;
#pragma unroll
        for (int k = 0; k < PACK; k++) sum[k] += in_place(words[u], k) * scale[u];
      }
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) sum[k] *= LAST / float(1 << Fields<BITS>::place(k));
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
