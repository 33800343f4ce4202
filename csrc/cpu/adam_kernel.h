// AdamW on one part of the arrays, in plain loops over short blocks that the compiler vectorizes.
// adam.cpp includes this file once per instruction set, each in another namespace and target, so it
// has no include guard.
//
//   run:  block by block   widen (gradient -> T, times the scale) -> update (p, m, v) -> narrow (p -> out)
//
// A block stays in the L1 cache between the three loops, so memory is read once. The next blocks
// are prefetched. Every product and sum is rounded separately (no fused multiply-add), so that all
// instruction sets produce the same bits.

template <class T>
struct Constants {
  T scale, keep, rest1, weight, beta2, rest2, eps, rate, root;
};

// Bias corrections and rates are computed in fp64 and rounded once.
template <class T>
inline Constants<T> constants_of(const Call& c) {
  const double t = *c.step, lr = *c.lr;
  const double correction1 = 1 - std::pow(c.beta1, t), correction2 = 1 - std::pow(c.beta2, t);
  const double rest1 = 1 - c.beta1;
  return {T(*c.scale), T(1 - lr * c.decay), T(rest1), T(rest1 < 0.5 ? rest1 : -c.beta1), T(c.beta2), T(1 - c.beta2),
          T(c.eps), T(lr / correction1), T(1 / std::sqrt(correction2))};
}

template <class T, class G>
NOINLINE void widen(T* RESTRICT to, const G* RESTRICT g, int64_t n, T scale) {
  for (int64_t i = 0; i < n; i++) to[i] = T(to_number(g[i])) * scale;
}

// Computes m like torch's lerp: starts from m or from g, whichever is nearer to the result, because
// a smaller weight has a smaller rounding error.
template <bool from_m, class T>
NOINLINE void update(T* RESTRICT p, T* RESTRICT m, T* RESTRICT v, const T* RESTRICT g, int64_t n,
                     const Constants<T>& constants) {
  const Constants<T> c = constants;
  for (int64_t i = 0; i < n; i++) {
    const T step = c.weight * (g[i] - m[i]);
    m[i] = (from_m ? m[i] : g[i]) + step;
    v[i] = c.beta2 * v[i] + c.rest2 * g[i] * g[i];
    p[i] = p[i] * c.keep - c.rate * m[i] / (std::sqrt(v[i]) * c.root + c.eps);
  }
}

template <class T, class O>
NOINLINE void narrow(O* RESTRICT out, const T* RESTRICT p, int64_t n) {
  for (int64_t i = 0; i < n; i++) from_number(float(p[i]), out[i]);
}

template <class T>
inline void prefetch(const T* x) {
  for (int k = 0; k < BLOCK; k += 64 / sizeof(T)) __builtin_prefetch(x + k, 1);
}

template <class T, class G, class O>
void run(const Call& c, int64_t first, int64_t n) {
  const Constants<T> constants = constants_of<T>(c);
  T *p = static_cast<T*>(c.p) + first, *m = static_cast<T*>(c.m) + first, *v = static_cast<T*>(c.v) + first;
  const G* g = static_cast<const G*>(c.g) + first;
  O* out = c.out ? static_cast<O*>(c.out) + first : nullptr;
  const bool past_cache = out && c.n >= STREAM_FROM && reinterpret_cast<uintptr_t>(out) % sizeof(O) == 0;
  alignas(64) T wide[BLOCK];
  alignas(64) O ready[BLOCK];
  for (int64_t i = 0, size; i < n; i += size) {
    // A short first block aligns `out` to a cache line, as non-temporal stores require.
    const int64_t lead = past_cache ? (-reinterpret_cast<uintptr_t>(out + i) & 63) / sizeof(O) : 0;
    size = std::min(lead ? lead : int64_t(BLOCK), n - i);
    // If the gradient is as wide as the states, the hardware prefetches well enough, and software
    // prefetch makes the update up to a fifth slower.
    if (sizeof(G) < sizeof(T))
      for (const T* x : {p, m, v}) prefetch(x + i + AHEAD);
    widen(wide, g + i, size, constants.scale);
    (constants.rest1 < T(0.5) ? update<true, T> : update<false, T>)(p + i, m + i, v + i, wide, size, constants);
    if (!out) continue;
    const bool whole = past_cache && size == BLOCK;
    narrow(whole ? ready : out + i, p + i, size);
    if (whole) stream(out + i, ready, sizeof ready);
  }
  if (past_cache) stream_end();
}

template <class T, class G>
void run_out(const Call& c, int64_t first, int64_t n) {
  switch (c.out_format) {
    case BF16: return run<T, G, bf16>(c, first, n);
    case FP16: return run<T, G, fp16>(c, first, n);
    default: return run<T, G, float>(c, first, n);
  }
}

template <class T>
void run_grad(const Call& c, int64_t first, int64_t n) {
  switch (c.grad_format) {
    case BF16: return run_out<T, bf16>(c, first, n);
    case FP16: return run_out<T, fp16>(c, first, n);
    case FP64: return run_out<T, double>(c, first, n);
    default: return run_out<T, float>(c, first, n);
  }
}

void adamw(const Call& c, int64_t first, int64_t n) {
  c.state_format == FP64 ? run_grad<double>(c, first, n) : run_grad<float>(c, first, n);
}
