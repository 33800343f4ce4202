// Router of a mixture of experts (threed/layers/routing.py): choices, weights, losses and their gradients.
//
//   forward    logits [n b e] -> experts and weights [n b k]; counts (choices.cu), and sums for the losses, of each block
//   losses     both losses from the sums of the blocks
//   backward   the gradient of the logits, also that of the losses
//
// A warp processes a token. Lane l has the logits of the experts l, l + 32, and so on, and the choice
// l of the token. Logits are read once in each direction, 4 bytes each, and dlogits written once.

#include "common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP, MOST = 512;  // most experts
constexpr float INFINITE = __builtin_huge_valf();

// A `Routing` and the sizes. aux, z: whether there are these losses.
struct How {
  unsigned experts, count, groups, groups_per_token;
  bool sigmoid, of_chosen, by_scores, normalize, two, aux, z;
  float scale, epsilon;
};

__device__ __forceinline__ float max_over_warp(float x) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, step));
  return x;
}

// Returns a number above 0 that has the order of x. -0 and 0 are equal.
__device__ __forceinline__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.f), order = bits >> 31 ? ~bits : bits | 1u << 31;
  return max(order, 1u);
}

__device__ __forceinline__ float value_of_order(unsigned order) {
  return __uint_as_float(order >> 31 ? order & ~(1u << 31) : ~order);
}

// Removes the largest number with an index in [first, first + size), of equal ones the first, and
// returns its index. order: of the indices lane, lane + 32, ...; 0 for removed ones.
template <int E>
__device__ __forceinline__ unsigned take_best(unsigned (&order)[E], unsigned first, unsigned size, float* value = nullptr) {
  const unsigned lane = threadIdx.x % WARP;
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < E; i++) {
    const unsigned at = lane + WARP * i;
    const uint64_t key = uint64_t(order[i]) << 32 | (MOST - at);
    if (at - first < size && key > best) best = key;
  }
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) {
    const uint64_t other = __shfl_xor_sync(EVERY_LANE, best, step);
    best = other > best ? other : best;
  }
  const unsigned found = MOST - unsigned(best);
#pragma unroll
  for (int i = 0; i < E; i++)
    if (lane + WARP * i == found) order[i] = 0;
  if (value) *value = value_of_order(unsigned(best >> 32));
  return found;
}

// Removes the experts outside of the best groups.
template <int E>
__device__ __forceinline__ void keep_best_groups(unsigned (&order)[E], const How& how) {
  const unsigned lane = threadIdx.x % WARP, size = how.experts / how.groups;
  unsigned rest[E], groups[1] = {}, kept[E] = {};
#pragma unroll
  for (int i = 0; i < E; i++) rest[i] = order[i];
#pragma unroll 1
  for (unsigned group = 0; group < how.groups; group++) {
    float first, second = 0.f;
    take_best(rest, group * size, size, &first);
    if (how.two && size > 1) take_best(rest, group * size, size, &second);
    if (lane == group) groups[0] = order_of(first + second);
  }
#pragma unroll 1
  for (unsigned j = 0; j < how.groups_per_token; j++) {
    const unsigned group = take_best(groups, 0, how.groups);
#pragma unroll
    for (int i = 0; i < E; i++)
      if (lane + WARP * i - group * size < size) kept[i] = order[i];
  }
#pragma unroll
  for (int i = 0; i < E; i++) order[i] = kept[i];
}

// The numbers of a token: x, -infinity for no expert; scores; and if needed, log-sum-exp of x.
template <int E>
struct Token {
  float x[E], scores[E], largest = -INFINITE, sum = 0.f, lse = 0.f;

  __device__ __forceinline__ Token(const float* logits, const How& how) {
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < E; i++) {
      x[i] = lane + WARP * i < how.experts ? __ldg(logits + lane + WARP * i) : -INFINITE;
      largest = fmaxf(largest, x[i]);
    }
    if (!how.sigmoid || how.z) {
      largest = max_over_warp(largest);
#pragma unroll
      for (int i = 0; i < E; i++) sum += expf(x[i] - largest);
      sum = sum_over_warp(sum), lse = how.z ? largest + logf(sum) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < E; i++) scores[i] = how.sigmoid ? sigmoid(x[i]) : softmax(x[i]);
  }

  static __device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }
  __device__ __forceinline__ float softmax(float x) const { return __fdividef(expf(x - largest), sum); }

  // Returns the weight of this lane's choice without the scale, 0 without a choice. x: its logit.
  // total: the sum by which the weight was divided.
  __device__ __forceinline__ float weight(float x, bool active, const How& how, float& total) const {
    float value = how.sigmoid ? sigmoid(x) : softmax(x);
    if (how.of_chosen) value = expf(x - max_over_warp(active ? x : -INFINITE));
    value = active ? value : 0.f, total = 1.f;
    if (how.of_chosen || how.normalize) total = sum_over_warp(value) + (how.of_chosen ? 0.f : how.epsilon);
    return __fdividef(value, total);
  }
};

// Stores the sums over warps of numbers of experts. All threads must participate.
template <int E, class T>
__device__ __forceinline__ void store_sums(T* to, const T (&of_warp)[WARPS][E * WARP], unsigned experts) {
  __syncthreads();
  for (unsigned e = threadIdx.x; e < experts; e += THREADS) {
    T sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += of_warp[w][e];
    to[e] = sum;
  }
}

// A block processes positions of one sequence. counts: int32 [chunks b e]; null if the experts are
// given. sums: fp32 [chunks b e + 1]: of each expert's share of scores, and of squares of lse; or null.
template <int E>
__global__ void __launch_bounds__(THREADS, 2)
    forward(const float* __restrict__ logits, const float* __restrict__ bias, int64_t* __restrict__ experts,
            uint16_t* __restrict__ weights, int* __restrict__ counts, float* __restrict__ sums, unsigned positions,
            unsigned sequences, unsigned chunk, How how) {
  __shared__ float shares_of_warp[WARPS][E * WARP], squares_of_warp[WARPS];
  __shared__ int chosen[WARPS][E * WARP];
  const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, sequence = blockIdx.y, block = blockIdx.x * sequences + sequence;
  const unsigned end = min((blockIdx.x + 1) * chunk, positions);
  const bool active = lane < how.count;
  float shares[E] = {}, squares = 0.f, total;
  for (int i = 0; i < E; i++) chosen[warp][lane + WARP * i] = 0;
#pragma unroll 1
  for (unsigned p = blockIdx.x * chunk + warp; p < end; p += WARPS) {
    const int64_t row = int64_t(p) * sequences + sequence;
    const float* const from = logits + row * how.experts;
    const Token<E> token(from, how);
    unsigned own = active && !counts ? unsigned(experts[row * how.count + lane]) : 0u;
    if (counts) {
      unsigned order[E];
#pragma unroll
      for (int i = 0; i < E; i++) {
        const unsigned at = lane + WARP * i;
        const float score = how.by_scores ? token.scores[i] : token.x[i];
        order[i] = at < how.experts ? order_of(bias ? score + __ldg(bias + at) : score) : 0u;
      }
      if (how.groups > 1) keep_best_groups(order, how);
#pragma unroll 1
      for (unsigned j = 0; j < how.count; j++) {
        const unsigned best = take_best(order, 0, how.experts);
        if (lane == j) own = best;
        if (lane == best % WARP) chosen[warp][best]++;  // no other lane counts this expert
      }
      if (active) experts[row * how.count + lane] = own;
    }
    const float weight = token.weight(active ? __ldg(from + own) : 0.f, active, how, total) * how.scale;
    if (active) weights[row * how.count + lane] = __bfloat16_as_ushort(__float2bfloat16_rn(weight));
    if (!sums) continue;
    float of_all = 0.f;
#pragma unroll
    for (int i = 0; i < E; i++) of_all += token.scores[i];
    of_all = how.sigmoid ? sum_over_warp(of_all) : 1.f;
#pragma unroll
    for (int i = 0; i < E; i++) shares[i] += __fdividef(token.scores[i], of_all);
    squares += token.lse * token.lse;
  }
  if (counts) store_sums<E>(counts + int64_t(block) * how.experts, chosen, how.experts);
  if (!sums) return;  // the complete block
#pragma unroll
  for (int i = 0; i < E; i++) shares_of_warp[warp][lane + WARP * i] = shares[i];
  if (lane == 0) squares_of_warp[warp] = squares;
  float* const to = sums + int64_t(block) * (how.experts + 1);
  store_sums<E>(to, shares_of_warp, how.experts);
  if (threadIdx.x) return;
  for (int w = 1; w < WARPS; w++) squares += squares_of_warp[w];
  to[how.experts] = squares;
}

// out: [2]. blocks: rows of sums [.. b e + 1]. chosen: [b e], or null.
__global__ void __launch_bounds__(1024)
    losses(const float* __restrict__ sums, const float* __restrict__ chosen, float* __restrict__ out, unsigned total,
           unsigned row, unsigned width, float factor) {
  __shared__ float scratch[2][WARP];
  float aux = 0.f, z = 0.f;
#pragma unroll 8
  for (unsigned i = threadIdx.x; i < total; i += 1024) {
    const unsigned at = i % row, e = at % width;
    const float x = __ldg(sums + i);
    if (e == width - 1) z += x;
    else if (chosen) aux += x * __ldg(chosen + at / width * (width - 1) + e);
  }
  aux = sum_over_block<WARP>(aux, scratch[0]), z = sum_over_block<WARP>(z, scratch[1]);
  if (threadIdx.x == 0) out[0] = aux * factor, out[1] = z;
}

template <int E>
__global__ void __launch_bounds__(THREADS, 2)
    backward(const uint16_t* __restrict__ dy, const float* __restrict__ logits, const int64_t* __restrict__ experts,
             const float* __restrict__ chosen, const double* __restrict__ weight, float* __restrict__ dx, unsigned rows,
             unsigned sequences, How how, float aux, float z) {
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (row >= rows) return;
  const float* const from = logits + int64_t(row) * how.experts;
  const int64_t choice = int64_t(row) * how.count + lane;
  const bool active = lane < how.count;
  const float of_step = weight ? float(*weight) : 0.f;
  const Token<E> token(from, how);
  const unsigned own = active ? unsigned(experts[choice]) : 0u;
  float total, d = active ? bf16_at(dy + choice) * how.scale : 0.f, g[E] = {}, a[E] = {};
  const float w = token.weight(active ? __ldg(from + own) : 0.f, active, how, total), along = sum_over_warp(d * w);
  if (how.of_chosen) d = w * (d - along);
  else if (how.normalize) d = __fdividef(d - along, total);
#pragma unroll 1
  for (unsigned j = 0; j < how.count; j++) {
    const unsigned at = __shfl_sync(EVERY_LANE, own, j);
    const float part = __shfl_sync(EVERY_LANE, d, j);
#pragma unroll
    for (int i = 0; i < E; i++) g[i] += at == lane + WARP * i ? part : 0.f;
  }
  if (how.aux) {
    const float* const of_sequence = chosen + row % sequences * how.experts;
    float dot = 0.f, of_all = 0.f;
#pragma unroll
    for (int i = 0; i < E; i++) {
      a[i] = lane + WARP * i < how.experts ? __ldg(of_sequence + lane + WARP * i) * (aux * of_step) : 0.f;
      dot += a[i] * token.scores[i], of_all += token.scores[i];
    }
    of_all = how.sigmoid ? sum_over_warp(of_all) : 1.f, dot = __fdividef(sum_over_warp(dot), of_all);
#pragma unroll
    for (int i = 0; i < E; i++) a[i] = __fdividef(a[i] - dot, of_all);
  }
  float dot = 0.f;  // of the gradient of the scores with the scores, if they are a softmax
#pragma unroll
  for (int i = 0; i < E; i++) dot += g[i] * token.scores[i];
  dot = how.sigmoid || how.of_chosen ? 0.f : sum_over_warp(dot);
#pragma unroll
  for (int i = 0; i < E; i++) {
    const float s = token.scores[i];
    float out = how.sigmoid ? (g[i] + a[i]) * s * (1.f - s) : s * (g[i] + a[i] - dot);
    if (how.of_chosen) out = g[i] + s * a[i];
    if (how.z) out += token.softmax(token.x[i]) * token.lse * (z * of_step);
    if (lane + WARP * i < how.experts) dx[int64_t(row) * how.experts + lane + WARP * i] = out;
  }
}

// Calls start(integral constant E), where 32 lanes with E experts each have all experts.
template <int N>
struct Each {
  static constexpr int value = N;
};
template <class F>
int with_each(int64_t experts, F start) {
  if (experts <= 32) return start(Each<1>());
  if (experts <= 64) return start(Each<2>());
  if (experts <= 128) return start(Each<4>());
  if (experts <= 256) return start(Each<8>());
  if (experts <= MOST) return start(Each<16>());
  return cudaErrorInvalidValue;
}

How how_of(int64_t experts, int64_t count, int64_t groups, int64_t groups_per_token, int64_t flags, double scale,
           double epsilon) {
  const auto has = [&](int bit) { return bool(flags >> bit & 1); };
  return How{unsigned(experts), unsigned(count), unsigned(groups), unsigned(groups_per_token), has(0), has(1), has(2),
             has(3), has(4), has(5), has(6), float(scale), float(epsilon)};
}

}  // namespace

extern "C" {

// experts int64 [positions sequences count] = the choices of each token, best first, or input if
// `counts` is null. weights: bf16, of the choices. bias: fp32 [e], or null. counts: int32 [chunks
// sequences e]. sums: fp32 [chunks sequences e + 1], see `forward`. flags: threed/ops/router.py.
int threed_cuda_router(const float* logits, const float* bias, int64_t* experts, void* weights, int* counts, float* sums,
                       int64_t positions, int64_t sequences, int64_t chunks, int64_t e, int64_t count, int64_t groups,
                       int64_t groups_per_token, int64_t flags, double scale, double epsilon, cudaStream_t stream) {
  const How how = how_of(e, count, groups, groups_per_token, flags, scale, epsilon);
  return with_each(e, [&](auto each) {
    return launch(forward<decltype(each)::value>, dim3(unsigned(chunks), unsigned(sequences)), THREADS, 0, stream, logits,
                  bias, experts, static_cast<uint16_t*>(weights), counts, sums, positions, sequences,
                  ceil_div(positions, chunks), how);
  });
}

// out [2] = the sum over tokens of chosen * factor * shares of scores, 0 without chosen, and of lse^2.
int threed_cuda_router_losses(const float* sums, const float* chosen, float* out, int64_t chunks, int64_t sequences,
                              int64_t e, double factor, cudaStream_t stream) {
  return launch(losses, 1, 1024, 0, stream, sums, chosen, out, chunks * sequences * (e + 1), sequences * (e + 1), e + 1,
                factor);
}

// dlogits: fp32 [rows e]. dy: bf16 [rows count], gradient of the weights. chosen: fp32 [sequences e],
// only used for the auxiliary loss. weight: fp64 scalar, only used for the losses. aux, z: factors.
int threed_cuda_router_backward(const void* dy, const float* logits, const int64_t* experts, const float* chosen,
                                const double* weight, float* dlogits, int64_t rows, int64_t sequences, int64_t e,
                                int64_t count, int64_t flags, double scale, double epsilon, double aux, double z,
                                cudaStream_t stream) {
  const How how = how_of(e, count, 1, 1, flags, scale, epsilon);
  return with_each(e, [&](auto each) {
    return launch(backward<decltype(each)::value>, unsigned(ceil_div(rows, WARPS)), THREADS, 0, stream,
                  static_cast<const uint16_t*>(dy), logits, experts, chosen, weight, dlogits, rows, sequences, how, aux, z);
  });
}

}  // extern "C"
