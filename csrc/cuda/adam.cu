// AdamW (arXiv 1711.05101) on a flat slice, with the formulas of csrc/cpu/adam_kernel.h, and Lion
// (arXiv 2302.06675): fp32 weights and states, gradient in fp32 or bf16.
//
//   reads and writes p, m, v; reads g; writes out: 28 bytes per element with g and out in bf16
//   (30 with an fp32 gradient, 26 without out). Lion has no v: 20 bytes (22, 18).
//
// The values that change from step to step are fp64 scalars on the device: learning rate, step,
// gradient scale (clipping) and skip flag. Stochastic rounding adds 16 random bits below bf16's
// last bit to p and truncates, so that the mean of out is p.

#include "philox.cuh"

namespace {

constexpr int THREADS = 256;

struct Hyper {
  double beta1, beta2, eps, decay;
};

// Factors that are the same for all elements. A block computes them once, because fp64 powers are
// slow.
struct Constants {
  float scale, keep, rest1, beta2, rest2, eps, rate, root;
};

struct Rounding {
  unsigned key0, key1;
  bool stochastic;
};

__device__ __forceinline__ void find(Constants& c, const double* lr, const double* step, const double* scale,
                                     const Hyper& h) {
  const double correction1 = 1 - pow(h.beta1, *step), correction2 = 1 - pow(h.beta2, *step);
  c.scale = float(*scale), c.keep = float(1 - *lr * h.decay), c.rest1 = float(1 - h.beta1);
  c.beta2 = float(h.beta2), c.rest2 = float(1 - h.beta2), c.eps = float(h.eps);
  c.rate = float(*lr / correction1), c.root = float(1 / sqrt(correction2));
}

__device__ __forceinline__ void update(float& p, float& m, float& v, float g, const Constants& c) {
  g *= c.scale;
  m += c.rest1 * (g - m);
  v = c.beta2 * v + c.rest2 * g * g;
  const float root = v > 0.f ? v * rsqrtf(v) : 0.f;
  p = p * c.keep - c.rate * __fdividef(m, root * c.root + c.eps);
}

__device__ __forceinline__ float4 load_gradient(const float* g, int64_t four) {
  return __ldcs(reinterpret_cast<const float4*>(g) + four);
}

__device__ __forceinline__ float4 load_gradient(const uint16_t* g, int64_t four) {
  const uint2 words = __ldcs(reinterpret_cast<const uint2*>(g) + four);
  return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u), __uint_as_float(words.y << 16),
                     __uint_as_float(words.y & 0xffff0000u));
}

// Rounds x to the bf16 number below or above, up with a probability equal to the fraction: adds 16
// random bits and truncates.
__device__ __forceinline__ unsigned short round_randomly(float x, unsigned random) {
  const unsigned bits = __float_as_uint(x), exponent = bits & 0x7f800000u;
  return (unsigned short)((exponent == 0x7f800000u ? bits : bits + (random & 0xffffu)) >> 16);
}

__device__ __forceinline__ uint2 narrow(const float4& p, int64_t four, unsigned step, const Rounding& r) {
  if (!r.stochastic) return make_uint2(pair(p.x, p.y), pair(p.z, p.w));
  const uint4 random = philox(make_uint4(unsigned(four), unsigned(four >> 32), step, 0), r.key0, r.key1);
  return make_uint2(round_randomly(p.x, random.x) | unsigned(round_randomly(p.y, random.y)) << 16,
                    round_randomly(p.z, random.z) | unsigned(round_randomly(p.w, random.w)) << 16);
}

template <class G>
__global__ void __launch_bounds__(THREADS)
    adamw(float4* __restrict__ p, float4* __restrict__ m, float4* __restrict__ v, const G* __restrict__ g,
          uint2* __restrict__ out, int64_t fours, const double* __restrict__ lr, const double* __restrict__ step,
          const double* __restrict__ scale, const double* __restrict__ skip, Hyper hyper, Rounding rounding) {
  __shared__ Constants found;
  if (*skip != 0.0) return;
  if (threadIdx.x == 0) find(found, lr, step, scale, hyper);
  __syncthreads();
  const Constants c = found;
  const unsigned number = rounding.stochastic ? unsigned(*step) : 0u;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < fours; i += int64_t(gridDim.x) * THREADS) {
    float4 ps = __ldcs(p + i), ms = __ldcs(m + i), vs = __ldcs(v + i);
    const float4 gs = load_gradient(g, i);
    update(ps.x, ms.x, vs.x, gs.x, c);
    update(ps.y, ms.y, vs.y, gs.y, c);
    update(ps.z, ms.z, vs.z, gs.z, c);
    update(ps.w, ms.w, vs.w, gs.w, c);
    __stcs(p + i, ps);
    __stcs(m + i, ms);
    __stcs(v + i, vs);
    if (out) __stcs(out + i, narrow(ps, i, number, rounding));
  }
}

struct LionHyper {
  double beta1, beta2, decay;
};

__device__ __forceinline__ void update(float& p, float& m, float g, float lr, float scale, const LionHyper& h) {
  g *= scale;
  const float mean = m + float(1 - h.beta1) * (g - m);
  p = p * (1.f - lr * float(h.decay)) - lr * (mean > 0.f ? 1.f : mean < 0.f ? -1.f : mean);  // NaN stays NaN
  m += float(1 - h.beta2) * (g - m);
}

template <class G>
__global__ void __launch_bounds__(THREADS)
    lion(float4* __restrict__ p, float4* __restrict__ m, const G* __restrict__ g, uint2* __restrict__ out, int64_t fours,
         const double* __restrict__ lr, const double* __restrict__ scale, const double* __restrict__ skip, LionHyper h) {
  if (*skip != 0.0) return;
  const float rate = float(*lr), factor = float(*scale);
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < fours; i += int64_t(gridDim.x) * THREADS) {
    float4 ps = __ldcs(p + i), ms = __ldcs(m + i);
    const float4 gs = load_gradient(g, i);
    update(ps.x, ms.x, gs.x, rate, factor, h);
    update(ps.y, ms.y, gs.y, rate, factor, h);
    update(ps.z, ms.z, gs.z, rate, factor, h);
    update(ps.w, ms.w, gs.w, rate, factor, h);
    __stcs(p + i, ps);
    __stcs(m + i, ms);
    if (out) __stcs(out + i, make_uint2(pair(ps.x, ps.y), pair(ps.z, ps.w)));
  }
}

}  // namespace

// p, m, v: fp32 [n], n a multiple of 4; g: fp32, or bf16 if `narrow_g`; out: bf16 [n] or null. lr,
// step, scale, skip: fp64 on the device. If *skip is not 0, all arrays stay unchanged. stochastic:
// if not 0, p is rounded to out stochastically, by random bits of Philox with the key (key0, key1).
extern "C" int threed_cuda_adamw(float* p, float* m, float* v, const void* g, void* out, int64_t n, int64_t narrow_g,
                                 const double* lr, const double* step, const double* scale, const double* skip,
                                 double beta1, double beta2, double eps, double decay, int64_t stochastic, int64_t key0,
                                 int64_t key1, int64_t blocks, cudaStream_t stream) {
  const auto fours = [](float* x) { return reinterpret_cast<float4*>(x); };
  const Hyper hyper = {beta1, beta2, eps, decay};
  const Rounding rounding = {unsigned(key0), unsigned(key1), stochastic != 0};
  const auto start = [&](auto kernel, auto gradient) {
    return launch(kernel, unsigned(blocks), THREADS, 0, stream, fours(p), fours(m), fours(v), gradient,
                  static_cast<uint2*>(out), n / 4, lr, step, scale, skip, hyper, rounding);
  };
  return narrow_g ? start(adamw<uint16_t>, static_cast<const uint16_t*>(g)) : start(adamw<float>, static_cast<const float*>(g));
}

// The same for Lion, with its momentum m and without stochastic rounding.
extern "C" int threed_cuda_lion(float* p, float* m, const void* g, void* out, int64_t n, int64_t narrow_g, const double* lr,
                                const double* scale, const double* skip, double beta1, double beta2, double decay,
                                int64_t blocks, cudaStream_t stream) {
  const LionHyper hyper = {beta1, beta2, decay};
  const auto start = [&](auto kernel, auto gradient) {
    return launch(kernel, unsigned(blocks), THREADS, 0, stream, reinterpret_cast<float4*>(p), reinterpret_cast<float4*>(m),
                  gradient, static_cast<uint2*>(out), n / 4, lr, scale, skip, hyper);
  };
  return narrow_g ? start(lion<uint16_t>, static_cast<const uint16_t*>(g)) : start(lion<float>, static_cast<const float*>(g));
}
