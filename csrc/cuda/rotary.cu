// Rotary positions (arXiv 2104.09864) on the first heads of packed rows, in place: 4 bytes per
// element of these heads.
//
//   left, right = left cos - right sin, right cos + left sin       halves of a head, in Hugging Face's layout
//
// A row [width] is one position of one sequence: heads of queries, of keys, and of values, which
// are not changed. A warp processes a row. All heads of a row use the same part of the table, which
// the L1 cache holds. The backward is the inverse rotation.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;

// Loads eight floats of a table. The first four are at `from`, and the last four are `apart` float4
// further on, so that the reads of a warp are coalesced.
__device__ __forceinline__ void load_floats(float (&x)[PACK], const float4* from, unsigned apart) {
  const float4 low = __ldg(from), high = __ldg(from + apart);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// half: packs in half a head. pairs: pairs of packs (left, right) in a row.
__global__ void __launch_bounds__(THREADS)
    rotary(uint4* __restrict__ x, const float4* __restrict__ table, unsigned rows, unsigned sequences, unsigned pairs,
           unsigned half, int64_t packs, float direction) {
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (row >= rows) return;
  const float4* const turns = table + int64_t(row / sequences) * 4 * half;
  uint4* const mine = x + row * packs;
#pragma unroll 2
  for (unsigned i = threadIdx.x % WARP; i < pairs; i += WARP) {
    const unsigned head = i / half, at = i - head * half;  // 32 bits: a 64-bit division would be a function call
    uint4* const left_at = mine + 2 * head * half + at;
    float left[PACK], right[PACK], c[PACK], s[PACK];
    unpack(__ldcs(left_at), left), unpack(__ldcs(left_at + half), right);
    load_floats(c, turns + at, half);
    load_floats(s, turns + 2 * half + at, half);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      const float turned = direction * s[k], old = left[k];
      left[k] = old * c[k] - right[k] * turned;
      right[k] = right[k] * c[k] + old * turned;
    }
    __stcs(left_at, pack(left));
    __stcs(left_at + half, pack(right));
  }
}

}  // namespace

// x [rows width]: rotates the first `heads` heads of size d in each row by the angles of position
// row / sequences. table: fp32 [positions 2 2 d/16 4], with d/2 cosines and then d/2 sines per
// position. Of the eight numbers that belong to a pack, the first four are in the first half of the
// d/2, and the last four in the second half. direction: 1, or -1 for the backward.
extern "C" int threed_cuda_rotary(void* x, const float* table, int64_t rows, int64_t width, int64_t sequences,
                                  int64_t heads, int64_t d, double direction, cudaStream_t stream) {
  const int64_t half = d / (2 * PACK);
  return launch(rotary, unsigned(ceil_div(rows, WARPS)), THREADS, 0, stream, static_cast<uint4*>(x),
                reinterpret_cast<const float4*>(table), rows, sequences, heads * half, half, width / PACK, direction);
}
