// Cross entropy of bf16 logits over a vocabulary that may be sharded over ranks. The gradient
// overwrites the logits.
//
//   whole      unsharded: loss and gradient in one pass                    4 bytes per logit
//   stats      sharded: maximum, sum of exponentials, the target's logit   2 bytes
//   gradient   sharded, from the stats of all ranks: loss and gradient     4 bytes
//
// One block per row. `whole` first reads a row and then writes its gradient. In between, the row is
// in shared memory: 2 bytes per column. The end of a row that does not fit there is read again when
// its gradient is written, from the L2 cache: with one block per multiprocessor, 152,000 columns
// leave 9 MiB for all rows of an H100. Rows are `width` columns apart, a multiple of 8. Columns
// from `columns` on are padding: excluded from sums, with gradient zero. A target outside the
// vocabulary has loss 0. All sums are fp32, in an order that depends on the shape only.

#include "common.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int AHEAD = 4;  // packs that a thread loads before it uses the first
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// Statistics of numbers x in powers of two: `base` is the maximum of x LOG2E, rounded; `sum` is the
// sum of 2^(x LOG2E - base). The sum of exp(x) is 2^base sum. Rounding base is harmless as long as
// this base is used everywhere.
struct Stats {
  float base, sum;
};

// 2^(x LOG2E - base), in one multiply-add and one ex2 instruction.
__device__ __forceinline__ float power(float x, float base) { return exp2f(fmaf(x, LOG2E, -base)); }

// The base of no numbers is minus infinity. Here it is replaced by 0, because the difference of two
// such bases would be NaN.
__device__ __forceinline__ float finite(float base) { return base == -INFINITY ? 0.f : base; }

__device__ __forceinline__ Stats join(Stats a, Stats b) {
  const float base = fmaxf(a.base, b.base), less = finite(base);
  return {base, a.sum * exp2f(a.base - less) + b.sum * exp2f(b.base - less)};
}

__device__ __forceinline__ Stats join_over_warp(Stats s) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2)
    s = join(s, {__shfl_xor_sync(EVERY_LANE, s.base, step), __shfl_xor_sync(EVERY_LANE, s.sum, step)});
  return s;
}

template <int COUNT>
__device__ __forceinline__ void add(Stats& s, const uint4 (&words)[COUNT]) {
  float x[PACK], top = -INFINITY;
#pragma unroll
  for (int u = 0; u < COUNT; u++) {
    unpack(words[u], x);
#pragma unroll
    for (int k = 0; k < PACK; k++) top = fmaxf(top, x[k]);
  }
  const float base = fmaxf(s.base, top * LOG2E), less = finite(base);
  s.sum *= exp2f(s.base - less);
  s.base = base;
#pragma unroll
  for (int u = 0; u < COUNT; u++) {
    unpack(words[u], x);
#pragma unroll
    for (int k = 0; k < PACK; k++) s.sum += power(x[k], less);
  }
}

// Replaces the padding in a row's last pack by minus infinity.
__device__ __forceinline__ uint4 without_padding(uint4 words, int columns) {
  float x[PACK];
  unpack(words, x);
#pragma unroll
  for (int k = 0; k < PACK; k++) x[k] = k < columns ? x[k] : -INFINITY;
  return pack(x);
}

// How much of a row is in shared memory while its gradient is written.
constexpr int NOTHING = 0, ALL = 1, BEGIN = 2;

// Reads a row and returns its statistics to every thread; copies its first `packs` packs to shared
// memory. The L2 cache shall hold the others, so they are not marked as read for the last time.
template <int keep>
__device__ __forceinline__ Stats read_row(const uint4* from, uint4* row, int packs, int columns) {
  __shared__ float2 of_warp[WARPS];
  const uint4 nothing = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);  // minus infinities
  const int complete = columns / PACK;
  Stats s = {-INFINITY, 0.f};
  for (int first = threadIdx.x; first < complete; first += THREADS * AHEAD) {
    uint4 words[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int at = first + u * THREADS;
      words[u] = at >= complete ? nothing : keep == BEGIN ? __ldcg(from + at) : __ldcs(from + at);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int at = first + u * THREADS;
      if (keep != NOTHING && at < (keep == ALL ? complete : min(packs, complete))) row[at] = words[u];
    }
    add(s, words);
  }
  if (threadIdx.x == 0 && columns % PACK) {
    const uint4 last[1] = {without_padding(__ldcs(from + complete), columns % PACK)};
    if (keep == ALL) row[complete] = last[0];
    add(s, last);
  }
  const int lane = threadIdx.x % WARP;
  s = join_over_warp(s);
  if (lane == 0) of_warp[threadIdx.x / WARP] = make_float2(s.base, s.sum);
  __syncthreads();
  const float2 other = lane < WARPS ? of_warp[lane] : make_float2(-INFINITY, 0.f);
  return join_over_warp({other.x, other.y});
}

// Overwrites a thread's share of a row with its gradient: (softmax - (column is target)) weight, and
// zero in the padding. row: the first `packs` packs, in shared memory.
template <int keep>
__device__ __forceinline__ void write_gradient(uint4* to, const uint4* row, int packs, int columns, int width,
                                               int target, float log2_sum, float weight) {
  const int complete = columns / PACK, used = int(ceil_div(columns, PACK)), aim = target < 0 ? -1 : target / PACK;
  const auto write = [&](int at, uint4 words) {
    if (keep != ALL && at >= complete) words = without_padding(words, columns % PACK);
    float x[PACK];
    unpack(words, x);
#pragma unroll
    for (int k = 0; k < PACK; k++) x[k] = power(x[k], log2_sum) * weight;
    if (at == aim) {
#pragma unroll
      for (int k = 0; k < PACK; k++) x[k] -= k == target % PACK ? weight : 0.f;
    }
    __stcs(to + at, pack(x));
  };
  const int end = keep == BEGIN ? packs : used;
  int at = threadIdx.x;
#pragma unroll 2
  for (; at < end; at += THREADS) write(at, keep == NOTHING ? __ldcs(to + at) : row[at]);
  for (; keep == BEGIN && at < used; at += THREADS * AHEAD) {
    uint4 words[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      words[u] = at + u * THREADS < used ? __ldcs(to + at + u * THREADS) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      if (at + u * THREADS < used) write(at + u * THREADS, words[u]);
  }
  for (int rest = used + threadIdx.x; rest < width / PACK; rest += THREADS) __stcs(to + rest, make_uint4(0, 0, 0, 0));
}

// Returns a target's column in [0, columns), or -1.
__device__ __forceinline__ int column_of(int64_t target, int64_t first, int columns) {
  return target >= first && target < first + columns ? int(target - first) : -1;
}

// log(sum of exp(x)) - the target's logit. The multiply-add compensates for the rounding of the
// base.
__device__ __forceinline__ float loss_of(Stats s, float logit) { return LN2 * (fmaf(-logit, LOG2E, s.base) + log2f(s.sum)); }

template <int keep>
__global__ void __launch_bounds__(THREADS, 2)
    whole(uint16_t* __restrict__ logits, const int64_t* __restrict__ targets, const float* __restrict__ weight,
          float* __restrict__ loss, int columns, int width, int packs) {
  uint4* const row = dynamic_shared<uint4>();
  uint16_t* const logits_of_row = logits + int64_t(blockIdx.x) * width;
  uint4* const mine = reinterpret_cast<uint4*>(logits_of_row);
  const int target = column_of(targets[blockIdx.x], 0, columns);
  // A logit outside shared memory is read before the barrier, after which its gradient may be written.
  const bool here = keep == ALL || target < packs * PACK;
  float hit = 0.f;
  if (threadIdx.x == 0 && !here) hit = bf16_at(logits_of_row + target);
  const Stats s = read_row<keep>(mine, row, packs, columns);
  if (threadIdx.x == 0) {
    if (here) hit = bf16_at(reinterpret_cast<const uint16_t*>(row) + max(target, 0));
    loss[blockIdx.x] = target < 0 ? 0.f : loss_of(s, hit);
  }
  write_gradient<keep>(mine, row, packs, columns, width, target, s.base + log2f(s.sum), target < 0 ? 0.f : *weight);
}

__global__ void __launch_bounds__(THREADS, 2)
    stats(const uint16_t* __restrict__ logits, const int64_t* __restrict__ targets, float* __restrict__ out, int columns,
          int width, int64_t first) {
  const uint16_t* const mine = logits + int64_t(blockIdx.x) * width;
  const Stats s = read_row<NOTHING>(reinterpret_cast<const uint4*>(mine), nullptr, 0, columns);
  if (threadIdx.x != 0) return;
  const int target = column_of(targets[blockIdx.x], first, columns);
  float* const numbers = out + 3 * int64_t(blockIdx.x);
  numbers[0] = s.base;
  numbers[1] = s.sum;
  numbers[2] = target < 0 ? 0.f : bf16_at(mine + target);
}

// Computes loss and gradient of a shard. numbers: [ranks rows 3], the output of `stats` on each
// rank.
__global__ void __launch_bounds__(THREADS, 2)
    gradient(uint16_t* __restrict__ logits, const int64_t* __restrict__ targets, const float* __restrict__ weight,
             const float* __restrict__ numbers, float* __restrict__ loss, int columns, int width, int64_t first,
             int64_t vocabulary, int ranks) {
  const int64_t target = targets[blockIdx.x];
  const bool counts = target >= 0 && target < vocabulary;
  Stats s = {-INFINITY, 0.f};
  float hit = 0.f;
  for (int rank = 0; rank < ranks; rank++) {
    const float* const of_rank = numbers + 3 * (int64_t(rank) * gridDim.x + blockIdx.x);
    s = join(s, {__ldg(of_rank), __ldg(of_rank + 1)});
    hit += __ldg(of_rank + 2);
  }
  if (threadIdx.x == 0) loss[blockIdx.x] = counts ? loss_of(s, hit) : 0.f;
  uint4* const mine = reinterpret_cast<uint4*>(logits + int64_t(blockIdx.x) * width);
  write_gradient<NOTHING>(mine, nullptr, 0, columns, width, column_of(target, first, columns), s.base + log2f(s.sum),
                        counts ? *weight : 0.f);
}

// Multiplies x by *factor in place. If *factor is 1, x is not read.
__global__ void __launch_bounds__(THREADS) scale(uint4* __restrict__ x, const float* __restrict__ factor, int64_t packs) {
  const float by = *factor;
  if (by == 1.f) return;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < packs; i += int64_t(gridDim.x) * THREADS) {
    float y[PACK];
    unpack(__ldcs(x + i), y);
#pragma unroll
    for (int k = 0; k < PACK; k++) y[k] *= by;
    __stcs(x + i, pack(y));
  }
}

}  // namespace

extern "C" {

// Multiplies x [n], n a multiple of 8, by *factor in place.
int threed_cuda_scale(void* x, const float* factor, int64_t n, int64_t blocks, cudaStream_t stream) {
  return launch(scale, unsigned(blocks), THREADS, 0, stream, static_cast<uint4*>(x), factor, n / PACK);
}

// loss [rows] = the loss of each row; logits [rows width] = d(sum of the losses *
// *weight)/d(logits), in place. packs: the first packs of 8 columns, which shared memory holds.
int threed_cuda_cross_entropy(void* logits, const int64_t* targets, const float* weight, float* loss, int64_t rows,
                              int64_t columns, int64_t width, int64_t packs, cudaStream_t stream) {
  const size_t shared = size_t(packs) * sizeof(uint4);
  const auto kernel = packs < ceil_div(columns, PACK) ? whole<BEGIN> : whole<ALL>;
  if (const int error = allow_shared(kernel, shared)) return error;
  return launch(kernel, unsigned(rows), THREADS, shared, stream, static_cast<uint16_t*>(logits), targets, weight, loss,
                columns, width, packs);
}

// out [rows 3] = base, sum and the target's logit (or 0) of a shard whose first column has the
// global id `first`.
int threed_cuda_cross_entropy_stats(const void* logits, const int64_t* targets, float* out, int64_t rows, int64_t columns,
                                    int64_t width, int64_t first, cudaStream_t stream) {
  return launch(stats, unsigned(rows), THREADS, 0, stream, static_cast<const uint16_t*>(logits), targets, out, columns,
                width, first);
}

// loss [rows] = the loss of each row; the gradient overwrites the shard's logits. numbers: [ranks
// rows 3], of all shards.
int threed_cuda_cross_entropy_gradient(void* logits, const int64_t* targets, const float* weight, const float* numbers,
                                       float* loss, int64_t rows, int64_t columns, int64_t width, int64_t first,
                                       int64_t vocabulary, int64_t ranks, cudaStream_t stream) {
  return launch(gradient, unsigned(rows), THREADS, 0, stream, static_cast<uint16_t*>(logits), targets, weight, numbers,
                loss, columns, width, first, vocabulary, ranks);
}

}  // extern "C"
