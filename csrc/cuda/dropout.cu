// Dropout of bf16 rows with a counter-based mask (threed/core/rng.py), fused with bias and residual.
//
//   forward    out = residual + (x + bias) keep / (1 - p)     6 bytes per element, 4 without residual
//   backward   dx = dout keep / (1 - p)                       4 bytes; the mask is computed again
//
// x: [s b h], or a rank's part of the sequence. Whether element e of a sample's [s h] is kept
// depends on word e % 4 of Philox at the counter (e / 4, the two words of the sample's index, the
// step). A warp processes a row; a lane evaluates two counters for eight columns.

#include "philox.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int AHEAD = 2;  // packs that a lane loads before it uses the first

struct Stream {
  unsigned key0, key1, step, threshold;  // threshold: an element is kept if its random word is at least this
  float scale;
};

__global__ void __launch_bounds__(THREADS)
    dropout(const uint4* __restrict__ x, const uint4* __restrict__ bias, const uint4* __restrict__ residual,
            const int64_t* __restrict__ samples, const int64_t* __restrict__ at_step, uint4* __restrict__ out,
            unsigned rows, unsigned sequences, unsigned first_position, unsigned packs, Stream stream) {
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (row >= rows) return;
  const unsigned position = first_position + row / sequences;
  const int64_t sample = samples[row % sequences];
  if (at_step) stream.step = unsigned(*at_step);
  for (unsigned first = threadIdx.x % WARP; first < packs; first += AHEAD * WARP) {
    uint4 words[AHEAD] = {}, added[AHEAD] = {};
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (first + u * WARP >= packs) continue;
      words[u] = __ldcs(x + int64_t(row) * packs + first + u * WARP);
      if (residual) added[u] = __ldcs(residual + int64_t(row) * packs + first + u * WARP);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const unsigned at = first + u * WARP;
      if (at >= packs) continue;
      float y[PACK], b[PACK] = {}, r[PACK];
      if (bias) unpack(__ldg(bias + at), b);
      unpack(words[u], y), unpack(added[u], r);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const unsigned counter = 2 * (position * packs + at) + half;
        const uint4 drawn = philox(make_uint4(counter, unsigned(sample), unsigned(sample >> 32), stream.step), stream.key0,
                                   stream.key1);
        const unsigned random[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          float& one = y[4 * half + k];
          one = r[4 * half + k] + (random[k] >= stream.threshold ? (one + b[4 * half + k]) * stream.scale : 0.f);
        }
      }
      __stcs(out + int64_t(row) * packs + at, pack(y));
    }
  }
}

}  // namespace

// out [rows h] from x [rows h]; bias [h] and residual [rows h] may be null. Rows are the positions
// from first_position on of `sequences` samples. samples: int64 global indices. key0, key1, step
// and threshold have 32 bits. If at_step is not null, the step is read there: a CUDA graph replays
// the value of `step`.
extern "C" int threed_cuda_dropout(const void* x, const void* bias, const void* residual, const int64_t* samples,
                                   const int64_t* at_step, void* out, int64_t rows, int64_t h, int64_t sequences,
                                   int64_t first_position, int64_t key0, int64_t key1, int64_t step, int64_t threshold,
                                   double scale, cudaStream_t stream) {
  const Stream random = {unsigned(key0), unsigned(key1), unsigned(step), unsigned(threshold), float(scale)};
  return launch(dropout, unsigned(ceil_div(rows, WARPS)), THREADS, 0, stream, static_cast<const uint4*>(x),
                static_cast<const uint4*>(bias), static_cast<const uint4*>(residual), samples, at_step,
                static_cast<uint4*>(out), rows, sequences, first_position, h / PACK, random);
}
