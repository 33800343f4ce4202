// Quantizes blocks of 256 bf16 numbers to 8-bit or 4-bit integers with one fp32 scale, for
// collectives that send fewer bytes; dequantizes them and sums over ranks (ZeRO++, arXiv
// 2306.10209, section 4).
//
//   quantize            q = round(x / scale), scale = largest |x| / 127 (or 7)       3 bytes per element (2.5 in 4 bits)
//   dequantize, reduce  out = sum over n ranks of q scale                            n + 2 bytes (n / 2 + 2 in 4 bits)
//
// The sum is in fp32, and adds eight ranks at a time. The scales of eight ranks are rounded to
// multiples of 2^-23 of the largest one. Scales come from `quantize`: positive, +0, or NaN if a
// number of the block is not finite; then all dequantized numbers of the block are NaN.
//
// A warp quantizes a block, each lane one pack of eight numbers. In `dequantize` a lane has PACKS
// packs in 16 bytes: lane i has packs i, i + 32 / PACKS, ..., and memory has the same order. So
// both kernels read and write complete sectors. In 4 bits the first number of a byte, plus 8, is in
// the low half; the second, signed, is in the high half.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;

// Type for the bits of eight numbers of BITS bits, least significant first.
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
template <int BITS>
constexpr int PACKS = 16 / BITS;  // packs in 16 bytes

// The last bits of 1.5 2^23 + x, |x| < 2^22, are the integer nearest to x, ties to even.
constexpr float ROUNDER = 12582912.f;
constexpr unsigned ROUNDER_BITS = 0x4B400000u;
// A block whose largest number is below SMALLEST becomes zeros, because `step` in `dequantize`
// would be flushed to zero.
constexpr float SMALLEST = 1e-28f;

// Packs integers of BITS bits into a word. rounded: the integers, each increased by ROUNDER. Until
// the last step, the word is a sum of unsigned numbers.
template <int BITS>
__device__ __forceinline__ unsigned word_of(const float* rounded) {
  constexpr unsigned HALF = 1u << (BITS - 1), ONES = BITS == 8 ? 0x01010101u : 0x11111111u, SIGNS = 0x80808080u;
  unsigned word = 0;
#pragma unroll
  for (int k = 32 / BITS - 1; k >= 0; k--) word = (word << BITS) + __float_as_uint(rounded[k]);
  return (word - (ROUNDER_BITS - HALF) * ONES) ^ SIGNS;
}

__device__ __forceinline__ uint2 join(const float (&rounded)[PACK], uint2) {
  return make_uint2(word_of<8>(rounded), word_of<8>(rounded + 4));
}
__device__ __forceinline__ unsigned join(const float (&rounded)[PACK], unsigned) { return word_of<4>(rounded); }

// Returns the largest |x| of a warp's packs. Without signs, numbers are ordered like their bits,
// with infinity and NaN last.
__device__ __forceinline__ float largest_of_warp(const uint4& from) {
  unsigned top = 0;  // bits of |x|, shifted to the top of the word
#pragma unroll
  for (const unsigned word : {from.x, from.y, from.z, from.w}) top = max(top, max(word << 17, word << 1));
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) top = max(top, __shfl_xor_sync(EVERY_LANE, top, step));
  return __uint_as_float(top >> 1 & 0x7fff0000u);
}

template <int BITS>
__global__ void __launch_bounds__(THREADS)
    quantize(const uint4* __restrict__ x, typename Packed<BITS>::type* __restrict__ out, float* __restrict__ scales,
             int64_t blocks) {
  constexpr float TOP = BITS == 8 ? 127.f : 7.f;
  constexpr int LANES = WARP / PACKS<BITS>;
  const int lane = threadIdx.x % WARP;
  x += lane;
  out += lane % LANES * PACKS<BITS> + lane / LANES;
#pragma unroll 4
  for (int64_t block = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; block < blocks;
       block += int64_t(gridDim.x) * WARPS) {
    const uint4 words = __ldcs(x + block * WARP);
    const float top = largest_of_warp(words), scale = top * (1.f / TOP);
    const float inverse = top >= SMALLEST ? __fdividef(1.f, scale) : 0.f;  // for divisors above 2^126 it returns 0
    float y[PACK];
    unpack(words, y);
#pragma unroll
    for (int k = 0; k < PACK; k++) y[k] = fmaf(y[k], inverse, ROUNDER);
    __stcs(out + block * WARP, join(y, typename Packed<BITS>::type()));
    if (lane == 0) scales[block] = top < INFINITY ? scale : NAN;
  }
}

constexpr int AHEAD = 8;  // ranks that a thread loads before it uses the first; their numbers are summed as integers

// The scales of AHEAD ranks as 24-bit integers times `step`, split into a signed low digit of 16
// bits and a high digit; a word holds the digits of two ranks. low_offset, high_offset: in 4 bits,
// they subtract the 8 that was added to the first number of each byte.
struct Scales {
  unsigned low[AHEAD / 2], high[AHEAD / 2];
  int low_offset, high_offset;
  float step;
};

__device__ __forceinline__ Scales fixed(const float (&scale)[AHEAD]) {
  // ONE is 2^23. For an integer i <= 2^23 the bits of 2^23 + i are ONE_BITS + i; i = 2^23 carries
  // into the exponent.
  constexpr float ONE = 8388608.f;
  constexpr unsigned ONE_BITS = 0x4B000000u, HALF = 0x8000u, MINUS_EIGHTS = 0xf8f8u;
  unsigned top = 0, digits[AHEAD];  // positive numbers are ordered like their bits, with NaN last
#pragma unroll
  for (int u = 0; u < AHEAD; u++) top = max(top, __float_as_uint(scale[u]));
  const float largest = __uint_as_float(top), inverse = largest > 0.f ? __fdividef(1.f, largest) : 0.f;
#pragma unroll
  for (int u = 0; u < AHEAD; u++)
    digits[u] = (__float_as_uint(fmaf(scale[u] * inverse, ONE, ONE)) + (HALF - ONE_BITS)) ^ HALF;
  Scales out;
  out.low_offset = out.high_offset = 0;
  out.step = largest * (1.f / ONE);
#pragma unroll
  for (int u = 0; u < AHEAD / 2; u++) {
    out.low[u] = __byte_perm(digits[2 * u], digits[2 * u + 1], 0x5410u);
    out.high[u] = __byte_perm(digits[2 * u], digits[2 * u + 1], 0x7632u);
    out.low_offset = __dp2a_lo(int(out.low[u]), int(MINUS_EIGHTS), out.low_offset);
    out.high_offset = __dp2a_lo(int(out.high[u]), int(MINUS_EIGHTS), out.high_offset);
  }
  return out;
}

// Returns four numbers of a lane's 16 bytes as signed bytes for __dp2a. In 8 bits: numbers 4 k to 4
// k + 3. In 4 bits, from pack k / 2: with even k the first numbers of its bytes, plus 8; with odd k
// the second ones, times 16.
template <int BITS>
__device__ __forceinline__ unsigned quad(const uint4& from, int k) {
  const unsigned words[] = {from.x, from.y, from.z, from.w};
  return BITS == 8 ? words[k] : words[k / 2] & (k % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
}

// Adds to `sum`: for all ranks, the four numbers of `quad` k times the rank's scale. One __dp2a
// multiplies two ranks' numbers by one digit of their scales.
template <int BITS>
__device__ __forceinline__ void add(float (&sum)[4], const uint4 (&from)[AHEAD], const Scales& scales, int k) {
  const bool first_of_bytes = BITS == 4 && k % 2 == 0, second = BITS == 4 && k % 2 == 1;
  int low[4], high[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    low[i] = first_of_bytes ? scales.low_offset : 0;
    high[i] = first_of_bytes ? scales.high_offset : 0;
  }
#pragma unroll
  for (int u = 0; u < AHEAD; u += 2) {
    const unsigned a = quad<BITS>(from[u], k), b = quad<BITS>(from[u + 1], k);
    const int pairs[] = {int(__byte_perm(a, b, 0x5140u)), int(__byte_perm(a, b, 0x7362u))};
    const int of_low = int(scales.low[u / 2]), of_high = int(scales.high[u / 2]);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      low[i] = __dp2a_lo(of_low, pairs[i / 2], low[i]);
      low[i + 1] = __dp2a_hi(of_low, pairs[i / 2], low[i + 1]);
      high[i] = __dp2a_lo(of_high, pairs[i / 2], high[i]);
      high[i + 1] = __dp2a_hi(of_high, pairs[i / 2], high[i + 1]);
    }
  }
  const float step = second ? scales.step * (1.f / 16) : scales.step;
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] = fmaf(float(high[i]), step * 65536.f, fmaf(float(low[i]), step, sum[i]));
}

// q [ranks blocks 256], scales [ranks blocks] -> out bf16 [blocks 256]
template <int BITS>
__global__ void __launch_bounds__(THREADS)
    dequantize(const uint4* __restrict__ q, const float* __restrict__ scales, uint4* __restrict__ out, int64_t blocks,
               int ranks) {
  constexpr int LANES = WARP / PACKS<BITS>, QUADS = 2 * PACKS<BITS>;
  const int64_t of_rank = blocks * LANES;
  uint4 words[AHEAD] = {};  // a missing rank repeats another's words, with scale 0
  for (int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x; at < of_rank; at += int64_t(gridDim.x) * THREADS) {
    float sum[QUADS][4] = {};
    const uint4* from = q + at;
    const float* scale_at = scales + at / LANES;
    for (int rank = 0; rank < ranks; rank += AHEAD) {
      float scale[AHEAD] = {};
#pragma unroll
      for (int u = 0; u < AHEAD; u++, from += of_rank, scale_at += blocks) {
        if (rank + u >= ranks) continue;
        words[u] = __ldcs(from);
        scale[u] = __ldg(scale_at);
      }
      const Scales whole = fixed(scale);
#pragma unroll
      for (int k = 0; k < QUADS; k++) add<BITS>(sum[k], words, whole, k);
    }
    uint4* const to = out + at / LANES * WARP + at % LANES;
#pragma unroll
    for (int part = 0; part < PACKS<BITS>; part++) {
      float y[PACK];
#pragma unroll
      for (int i = 0; i < PACK; i++) y[i] = BITS == 8 ? sum[2 * part + i / 4][i % 4] : sum[2 * part + i % 2][i / 2];
      __stcs(to + part * LANES, pack(y));
    }
  }
}

}  // namespace

extern "C" {

// out: integers of `bits` (8 or 4) bits [blocks 256]; scales fp32 [blocks]; from x bf16 [blocks
// 256].
int threed_cuda_quantize(const void* x, void* out, float* scales, int64_t blocks, int64_t bits, int64_t grid,
                         cudaStream_t stream) {
  const uint4* const from = static_cast<const uint4*>(x);
  return bits == 8 ? launch(quantize<8>, unsigned(grid), THREADS, 0, stream, from, static_cast<uint2*>(out), scales, blocks)
                   : launch(quantize<4>, unsigned(grid), THREADS, 0, stream, from, static_cast<unsigned*>(out), scales, blocks);
}

// out bf16 [blocks 256] = the sum over ranks of q [ranks blocks 256] times scales [ranks blocks].
int threed_cuda_dequantize(const void* q, const float* scales, void* out, int64_t blocks, int64_t ranks, int64_t bits,
                           int64_t grid, cudaStream_t stream) {
  const uint4* const from = static_cast<const uint4*>(q);
  uint4* const to = static_cast<uint4*>(out);
  return bits == 8 ? launch(dequantize<8>, unsigned(grid), THREADS, 0, stream, from, scales, to, blocks, int(ranks))
                   : launch(dequantize<4>, unsigned(grid), THREADS, 0, stream, from, scales, to, blocks, int(ranks));
}

}  // extern "C"
