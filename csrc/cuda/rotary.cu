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

// Heads [positions sequences heads d] of any strides, which are in packs. d is contiguous.
struct Heads {
  const uint4* from;
  int64_t of_position, of_sequence, of_head;
};

// The backward, into the packed rows: 4 bytes per element of all heads. Reads the gradients of
// queries, keys and values; those of queries and keys are rotated back.
__global__ void __launch_bounds__(THREADS)
    rotary_backward(Heads dq, Heads dk, Heads dv, uint4* __restrict__ dx, const float4* __restrict__ table, unsigned rows,
                    unsigned sequences, unsigned queries, unsigned keys, unsigned half) {
  constexpr int AHEAD = 2;  // pairs of packs that a thread loads before it uses the first
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (row >= rows) return;
  const unsigned position = row / sequences, sequence = row - position * sequences, turned = queries + keys;
  const float4* const turns = table + int64_t(position) * 4 * half;
  const unsigned pairs = (turned + keys) * half;
  uint4* const out = dx + int64_t(row) * 2 * pairs;
  const auto row_of = [&](const Heads& of) { return of.from + position * of.of_position + sequence * of.of_sequence; };
  const uint4 *const q = row_of(dq), *const k = row_of(dk), *const v = row_of(dv);
  for (unsigned first = threadIdx.x % WARP; first < pairs; first += AHEAD * WARP) {
    uint4 lefts[AHEAD] = {}, rights[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const unsigned i = first + u * WARP;
      if (i >= pairs) continue;
      const unsigned head = i / half, at = i - head * half;
      const uint4* const from = head < queries  ? q + head * dq.of_head
                                : head < turned ? k + (head - queries) * dk.of_head
                                                : v + (head - turned) * dv.of_head;
      lefts[u] = __ldcs(from + at), rights[u] = __ldcs(from + half + at);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const unsigned i = first + u * WARP;
      if (i >= pairs) continue;
      const unsigned head = i / half, at = i - head * half;
      if (head < turned) {
        float left[PACK], right[PACK], c[PACK], s[PACK];
        unpack(lefts[u], left), unpack(rights[u], right);
        load_floats(c, turns + at, half);
        load_floats(s, turns + 2 * half + at, half);
#pragma unroll
        for (int n = 0; n < PACK; n++) {
          const float old = left[n];
          left[n] = old * c[n] + right[n] * s[n];
          right[n] = right[n] * c[n] - old * s[n];
        }
        lefts[u] = pack(left), rights[u] = pack(right);
      }
      uint4* const to = out + 2 * head * half + at;
      __stcs(to, lefts[u]);
      __stcs(to + half, rights[u]);
    }
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

// dx [rows (queries + 2 keys) d] = the gradients of queries, keys and values, rotated back except
// for the values. They are [positions sequences heads d]; for each of the three, the strides of
// positions, sequences and heads are given in elements, multiples of 8. table: as above.
extern "C" int threed_cuda_rotary_backward(const void* dq, const void* dk, const void* dv, void* dx, const float* table,
                                           int64_t q_position, int64_t q_sequence, int64_t q_head, int64_t k_position,
                                           int64_t k_sequence, int64_t k_head, int64_t v_position, int64_t v_sequence,
                                           int64_t v_head, int64_t rows, int64_t sequences, int64_t queries, int64_t keys,
                                           int64_t d, cudaStream_t stream) {
  const auto heads = [](const void* from, int64_t position, int64_t sequence, int64_t head) {
    return Heads{static_cast<const uint4*>(from), position / PACK, sequence / PACK, head / PACK};
  };
  return launch(rotary_backward, unsigned(ceil_div(rows, WARPS)), THREADS, 0, stream,
                heads(dq, q_position, q_sequence, q_head), heads(dk, k_position, k_sequence, k_head),
                heads(dv, v_position, v_sequence, v_head), static_cast<uint4*>(dx),
                reinterpret_cast<const float4*>(table), rows, sequences, queries, keys, d / (2 * PACK));
}
