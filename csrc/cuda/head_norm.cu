// RMSNorm of every query and key head, followed by rotary positions.
//
//   forward    y = rotate(norm(x) weight)             4 bytes per element of queries and keys
//   backward   dx, dweight: a sum over heads          6 bytes per element of queries and keys, 4 of values
//
// A row [width] is one position of one sequence: heads of queries, of keys, and of values. HALF
// lanes process a head: each has a pack of the head's left half, and the pack of its right half
// that it is rotated with. So a lane has the same elements of all heads. In the backward it adds
// up their gradients in registers; sums.cu adds the sums of blocks.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;

// Returns the sum over the lanes of a head to each of them.
template <int HALF>
__device__ __forceinline__ float sum_over_head(float x) {
#pragma unroll
  for (int step = HALF / 2; step; step /= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
  return x;
}

// HALF: packs in half a head. packs: packs in a row of x. turned: number of query and key heads.
template <int HALF>
__global__ void __launch_bounds__(THREADS)
    forward(const uint4* __restrict__ x, const uint4* __restrict__ q_weight, const uint4* __restrict__ k_weight,
            const float4* __restrict__ table, uint4* __restrict__ y, unsigned rows, unsigned sequences, unsigned queries,
            unsigned turned, int64_t packs, float offset, float eps) {
  constexpr float SHARE = 1.f / (2 * HALF * PACK);
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP, at = lane % HALF;
  if (row >= rows) return;
  const float4* const turns = table + int64_t(row / sequences) * 4 * HALF + at;
  const uint4* const from = x + row * packs + at;
  uint4* const to = y + int64_t(row) * 2 * HALF * turned + at;
  float c[PACK], s[PACK];
  load_floats(c, turns, HALF), load_floats(s, turns + 2 * HALF, HALF);
#pragma unroll 2
  for (unsigned first = 0; first < turned * HALF; first += WARP) {
    const unsigned head = (first + lane) / HALF;
    const bool active = head < turned;  // all lanes take part in the sums
    float left[PACK] = {}, right[PACK] = {}, w[PACK], u[PACK], squares = 0.f;
    if (active) unpack(__ldcs(from + 2 * HALF * head), left), unpack(__ldcs(from + 2 * HALF * head + HALF), right);
#pragma unroll
    for (int k = 0; k < PACK; k++) squares += left[k] * left[k] + right[k] * right[k];
    const float scale = rsqrtf(sum_over_head<HALF>(squares) * SHARE + eps);
    const uint4* const weight = (head < queries ? q_weight : k_weight) + at;
    unpack(__ldg(weight), w), unpack(__ldg(weight + HALF), u);
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      const float a = left[k] * scale * (w[k] + offset), b = right[k] * scale * (u[k] + offset);
      left[k] = a * c[k] - b * s[k];
      right[k] = b * c[k] + a * s[k];
    }
    if (!active) continue;
    __stcs(to + 2 * HALF * head, pack(left));
    __stcs(to + 2 * HALF * head + HALF, pack(right));
  }
}

// Heads [positions sequences heads d] of queries, keys or values. The strides are in packs, and d
// is contiguous. before: number of heads before them in a row. weight: null for values.
struct Heads {
  const uint4 *from, *weight;
  int64_t of_position, of_sequence, of_head;
  unsigned heads, before;
};

// blockIdx.y: 0 for queries, 1 for keys, 2 for values, whose gradients are only copied.
// parts: fp32 [2 blocks d], the sums of each block.
template <int HALF>
__global__ void __launch_bounds__(THREADS, 2)
    backward(Heads dq, Heads dk, Heads dv, const uint4* __restrict__ x, const float4* __restrict__ table,
             uint4* __restrict__ dx, float* __restrict__ parts, unsigned rows, unsigned sequences, int64_t packs,
             float offset, float eps) {
  constexpr float SHARE = 1.f / (2 * HALF * PACK);
  const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, at = lane % HALF;
  const Heads of = blockIdx.y == 0 ? dq : blockIdx.y == 1 ? dk : dv;
  const unsigned count = of.heads * HALF;
  float w[PACK] = {}, u[PACK] = {}, dw[PACK] = {}, du[PACK] = {};
  if (of.weight) {
    unpack(__ldg(of.weight + at), w), unpack(__ldg(of.weight + HALF + at), u);
#pragma unroll
    for (int k = 0; k < PACK; k++) w[k] += offset, u[k] += offset;
  }
  for (unsigned row = blockIdx.x * WARPS + warp; row < rows; row += gridDim.x * WARPS) {
    const unsigned position = row / sequences, sequence = row - position * sequences;
    const uint4* const dy = of.from + position * of.of_position + sequence * of.of_sequence + at;
    const int64_t start = row * packs + 2 * HALF * int64_t(of.before) + at;
    if (!of.weight) {
#pragma unroll 1
      for (unsigned i = lane; i < count; i += WARP) {
        const uint4 left = __ldcs(dy + i / HALF * of.of_head), right = __ldcs(dy + i / HALF * of.of_head + HALF);
        __stcs(dx + start + 2 * HALF * (i / HALF), left);
        __stcs(dx + start + 2 * HALF * (i / HALF) + HALF, right);
      }
      continue;
    }
    const float4* const turns = table + int64_t(position) * 4 * HALF + at;
    float c[PACK], s[PACK];
    load_floats(c, turns, HALF), load_floats(s, turns + 2 * HALF, HALF);
    for (unsigned first = 0; first < count; first += WARP) {
      const unsigned head = (first + lane) / HALF;
      const bool active = head < of.heads;  // all lanes take part in the sums
      float a[PACK] = {}, b[PACK] = {}, g[PACK] = {}, h[PACK] = {}, squares = 0.f, along = 0.f;
      if (active) {
        unpack(__ldcs(x + start + 2 * HALF * head), a), unpack(__ldcs(x + start + 2 * HALF * head + HALF), b);
        unpack(__ldcs(dy + head * of.of_head), g), unpack(__ldcs(dy + head * of.of_head + HALF), h);
      }
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        const float left = g[k] * c[k] + h[k] * s[k], right = h[k] * c[k] - g[k] * s[k];
        g[k] = left, h[k] = right;
        squares += a[k] * a[k] + b[k] * b[k];
        along += w[k] * left * a[k] + u[k] * right * b[k];
      }
      const float scale = rsqrtf(sum_over_head<HALF>(squares) * SHARE + eps);
      along = sum_over_head<HALF>(along) * SHARE * scale * scale;
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        dw[k] += g[k] * a[k] * scale, du[k] += h[k] * b[k] * scale;
        a[k] = scale * (w[k] * g[k] - a[k] * along), b[k] = scale * (u[k] * h[k] - b[k] * along);
      }
      if (!active) continue;
      __stcs(dx + start + 2 * HALF * head, pack(a));
      __stcs(dx + start + 2 * HALF * head + HALF, pack(b));
    }
  }
  if (!of.weight) return;  // the complete block
#pragma unroll
  for (int k = 0; k < PACK; k++)
#pragma unroll
    for (int step = HALF; step < WARP; step *= 2) {
      dw[k] += __shfl_xor_sync(EVERY_LANE, dw[k], step);
      du[k] += __shfl_xor_sync(EVERY_LANE, du[k], step);
    }
  float* const to = parts + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * 2 * HALF * PACK;
  store_sum_of_warps<WARPS>(to, dw, lane, HALF);
  __syncthreads();  // both sums use the same shared memory
  store_sum_of_warps<WARPS>(to + HALF * PACK, du, lane, HALF);
}

// Calls start(integral constant HALF) for heads of size d.
template <int N>
struct Half {
  static constexpr int value = N;
};
template <class F>
int with_half(int64_t d, F start) {
  if (d == 64) return start(Half<4>());
  if (d == 128) return start(Half<8>());
  if (d == 256) return start(Half<16>());
  return cudaErrorInvalidValue;
}

}  // namespace

extern "C" {

// y [rows (queries + keys) d] = the normalized and rotated heads of x [rows width], for d of 64, 128
// or 256. The weights [d] plus `offset` multiply the normalized heads. table: as in rotary.cu.
int threed_cuda_head_norm(const void* x, const void* q_weight, const void* k_weight, const float* table, void* y,
                          int64_t rows, int64_t width, int64_t sequences, int64_t queries, int64_t keys, int64_t d,
                          double offset, double eps, cudaStream_t stream) {
  const auto packs = [](const void* of) { return static_cast<const uint4*>(of); };
  return with_half(d, [&](auto half) {
    return launch(forward<decltype(half)::value>, unsigned(ceil_div(rows, WARPS)), THREADS, 0, stream, packs(x),
                  packs(q_weight), packs(k_weight), reinterpret_cast<const float4*>(table), static_cast<uint4*>(y), rows,
                  sequences, queries, queries + keys, width / PACK, offset, eps);
  });
}

// dx [rows (queries + 2 keys) d] = the gradient of x; that of the values is copied. dq, dk, dv and
// their strides: as in rotary.cu. parts: fp32 [2 blocks d], sums of the weights' gradients over the
// query heads and over the key heads of each block.
int threed_cuda_head_norm_backward(const void* dq, const void* dk, const void* dv, const void* x, const void* q_weight,
                                   const void* k_weight, const float* table, void* dx, float* parts, int64_t q_position,
                                   int64_t q_sequence, int64_t q_head, int64_t k_position, int64_t k_sequence,
                                   int64_t k_head, int64_t v_position, int64_t v_sequence, int64_t v_head, int64_t rows,
                                   int64_t sequences, int64_t queries, int64_t keys, int64_t d, int64_t blocks,
                                   double offset, double eps, cudaStream_t stream) {
  const auto packs = [](const void* of) { return static_cast<const uint4*>(of); };
  const auto heads = [&](const void* from, const void* weight, int64_t position, int64_t sequence, int64_t head,
                         int64_t count, int64_t before) {
    return Heads{packs(from), packs(weight), position / PACK, sequence / PACK, head / PACK, unsigned(count), unsigned(before)};
  };
  return with_half(d, [&](auto half) {
    return launch(backward<decltype(half)::value>, dim3(unsigned(blocks), 3), THREADS, 0, stream,
                  heads(dq, q_weight, q_position, q_sequence, q_head, queries, 0),
                  heads(dk, k_weight, k_position, k_sequence, k_head, keys, queries),
                  heads(dv, nullptr, v_position, v_sequence, v_head, keys, queries + keys), packs(x),
                  reinterpret_cast<const float4*>(table), static_cast<uint4*>(dx), parts, rows, sequences,
                  (queries + 2 * keys) * d / PACK, offset, eps);
  });
}

}  // extern "C"
