// Activations and cross entropy on rows of fp32 or bf16, computed in fp32. The file is included
// once per instruction set, so it has no include guard.
//
// The compiler vectorizes the loops over short blocks, which widen a block to fp32, compute, and
// narrow the result. Every product and sum is rounded separately (no fused multiply-add), so that
// all instruction sets produce the same bits. Sums of a row use LANES accumulators.

// e^x within 2 ulp: 2^n e^r with |r| <= ln 2 / 2, and e^r by a polynomial (Cephes' expf). Infinite
// for x >= 88, and 0 below -87.
INLINE float exponential(float power) {
  float x = power >= 88.0f ? 88.0f : power;
  x = x < -87.0f ? -87.0f : x;
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to an integer
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float s = 1.9875691500e-4f;
  s = s * r + 1.3981999507e-3f;
  s = s * r + 8.3334519073e-3f;
  s = s * r + 4.1665795894e-2f;
  s = s * r + 1.6666665459e-1f;
  s = s * r + 5.0000001201e-1f;
  const float e = s * r * r + r + 1.0f;
  const float scaled = e * float_of(uint32_t(int32_t(n) + 127) << 23);
  return power < -87.0f ? 0.0f : power >= 88.0f ? INFINITY : scaled;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// GELU in its tanh form is x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float TWICE = 1.5957691216057308f, CUBE = 0.044715f;
INLINE float gelu(float x) { return x * sigmoid(TWICE * (x + CUBE * x * x * x)); }
INLINE float gelu_slope(float x) {
  const float s = sigmoid(TWICE * (x + CUBE * x * x * x));
  return s + x * s * (1.0f - s) * (TWICE * (1.0f + 3.0f * CUBE * x * x));
}

template <class N>
NOINLINE void widen_block(float* RESTRICT to, const N* RESTRICT from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = to_number(from[i]);
}

template <class N>
NOINLINE void narrow_block(N* RESTRICT to, const float* RESTRICT from, int64_t n) {
  for (int64_t i = 0; i < n; i++) from_number(from[i], to[i]);
}

NOINLINE void gelu_block(float* RESTRICT y, const float* RESTRICT x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = gelu(x[i]);
}

NOINLINE void gelu_back_block(float* RESTRICT dx, const float* RESTRICT dy, const float* RESTRICT x, int64_t n) {
  for (int64_t i = 0; i < n; i++) dx[i] = dy[i] * gelu_slope(x[i]);
}

NOINLINE void swiglu_block(float* RESTRICT y, const float* RESTRICT gate, const float* RESTRICT up, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

NOINLINE void swiglu_back_block(float* RESTRICT dgate, float* RESTRICT dup, const float* RESTRICT dy,
                                const float* RESTRICT gate, const float* RESTRICT up, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float s = sigmoid(gate[i]), silu = gate[i] * s;
    dgate[i] = dy[i] * up[i] * (s + silu * (1.0f - s));
    dup[i] = dy[i] * silu;
  }
}

// The functions *_part compute one part of a call. Their `first` and `n` count elements in
// gelu_part, and rows in all others.
template <class N>
void gelu_part(const Fused& c, int64_t first, int64_t n) {
  const N *x = static_cast<const N*>(c.x) + first, *dy = c.dy ? static_cast<const N*>(c.dy) + first : nullptr;
  N* out = static_cast<N*>(c.out) + first;
  alignas(64) float a[WIDTH], b[WIDTH], y[WIDTH];
  for (int64_t i = 0; i < n; i += WIDTH) {
    const int64_t size = std::min<int64_t>(WIDTH, n - i);
    widen_block(a, x + i, size);
    if (dy) {
      widen_block(b, dy + i, size);
      gelu_back_block(y, b, a, size);
    } else {
      gelu_block(y, a, size);
    }
    narrow_block(out + i, y, size);
  }
}

template <class N>
void swiglu_part(const Fused& c, int64_t first, int64_t n) {
  const int64_t f = c.width;
  alignas(64) float a[WIDTH], b[WIDTH], d[WIDTH], y[WIDTH], z[WIDTH];
  for (int64_t row = first; row < first + n; row++) {
    const N *gate = static_cast<const N*>(c.x) + row * 2 * f, *up = gate + f;
    const N* dy = c.dy ? static_cast<const N*>(c.dy) + row * f : nullptr;
    N* out = static_cast<N*>(c.out) + row * (dy ? 2 * f : f);
    for (int64_t i = 0; i < f; i += WIDTH) {
      const int64_t size = std::min<int64_t>(WIDTH, f - i);
      widen_block(a, gate + i, size);
      widen_block(b, up + i, size);
      if (dy) {
        widen_block(d, dy + i, size);
        swiglu_back_block(y, z, d, a, b, size);
        narrow_block(out + i, y, size);
        narrow_block(out + f + i, z, size);
      } else {
        swiglu_block(y, a, b, size);
        narrow_block(out + i, y, size);
      }
    }
  }
}

// Cross entropy needs each row's maximum, and its sum of e^(x - maximum). Both are accumulated in
// lanes, which are then combined in a fixed order.
template <class N>
NOINLINE float largest_of(const N* RESTRICT x, int64_t n) {
  float lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = -INFINITY;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++) lane[l] = to_number(x[i + l]) > lane[l] ? to_number(x[i + l]) : lane[l];
  for (; i < n; i++) lane[0] = to_number(x[i]) > lane[0] ? to_number(x[i]) : lane[0];
  for (int half = LANES / 2; half; half /= 2)
    for (int l = 0; l < half; l++) lane[l] = lane[l + half] > lane[l] ? lane[l + half] : lane[l];
  return lane[0];
}

template <class N>
NOINLINE float sum_of_powers(const N* RESTRICT x, int64_t n, float largest) {
  float lane[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++) lane[l] += exponential(to_number(x[i + l]) - largest);
  for (; i < n; i++) lane[0] += exponential(to_number(x[i]) - largest);
  for (int half = LANES / 2; half; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

template <class N>
NOINLINE void softmax_times(N* RESTRICT x, int64_t n, float logarithm, float scale) {
  for (int64_t i = 0; i < n; i++) from_number(exponential(to_number(x[i]) - logarithm) * scale, x[i]);
}

template <class N>
void numbers_part(const Fused& c, int64_t first, int64_t n) {
  for (int64_t row = first; row < first + n; row++) {
    const N* x = static_cast<const N*>(c.x) + row * c.width;
    c.top[row] = largest_of(x, c.columns);
    c.total[row] = sum_of_powers(x, c.columns, c.top[row]);
  }
}

template <class N>
void gradient_part(const Fused& c, int64_t first, int64_t n) {
  for (int64_t row = first; row < first + n; row++) {
    N* x = static_cast<N*>(c.out) + row * c.width;
    const int64_t at = c.target[row];
    const float logarithm = c.logarithm[row], loss = c.loss[row];
    // The gradient in the target's column. It is computed before x is overwritten, so that it is
    // rounded only once.
    const float own = at < 0 ? 0.0f : exponential(to_number(x[at]) - logarithm) * loss - loss;
    softmax_times(x, c.columns, logarithm, loss);
    if (at >= 0) from_number(own, x[at]);
    for (int64_t i = c.columns; i < c.width; i++) from_number(0.0f, x[i]);
  }
}

template <class N>
void of_format(const Fused& c, int64_t first, int64_t n) {
  switch (c.what) {
    case GELU: return gelu_part<N>(c, first, n);
    case SWIGLU: return swiglu_part<N>(c, first, n);
    case NUMBERS: return numbers_part<N>(c, first, n);
    default: return gradient_part<N>(c, first, n);
  }
}

void fused(const Fused& c, int64_t first, int64_t n) {
  c.format == BF16 ? of_format<bf16>(c, first, n) : of_format<float>(c, first, n);
}
