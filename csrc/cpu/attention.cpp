// Backward of causal attention over short sequences in bf16, one head at a time, with AMX tiles.
//
//   P = e^(scale Q K^T - L)     dV = P^T dY     dS = P (dP - rows' sums of P dP) scale, dP = dY V^T
//   dQ = dS K                   dK = dS^T Q
//
// P and dS are rounded to bf16 before they are multiplied; all other values are in fp32. Blocks
// above the diagonal are skipped.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "number.h"
#include "parallel.h"
#include "tiles.h"

#ifdef HAS_TILES
namespace {

constexpr int64_t LONGEST = 256, WIDEST_HEAD = 128;

struct Attention {
  const uint16_t *qkv, *dy;  // [s b 3 a d], [s b a d]
  const float* logarithms;   // [b a s]
  uint16_t* out;             // [s b 3 a d]
  int64_t s, b, heads, d;
  float scale;
};

// Working memory of one thread for one head; rows are padded to a multiple of 32.
struct Head {
  alignas(64) uint16_t q[LONGEST * WIDEST_HEAD], k[LONGEST * WIDEST_HEAD], v[LONGEST * WIDEST_HEAD];
  alignas(64) uint16_t dy[LONGEST * WIDEST_HEAD], p[LONGEST * LONGEST], ds[LONGEST * LONGEST];
  alignas(64) uint16_t a[2 * SIDE * LONGEST], b[LONGEST * WIDEST_HEAD], c[LONGEST * WIDEST_HEAD];  // packed
  alignas(64) float scores[SIDE * LONGEST], dp[SIDE * LONGEST], block[SIDE * SIDE];
};

TARGET_BEGIN(TILES)

// e^x for x <= 88: 2^n e^r with |r| <= ln 2 / 2, and e^r by its Taylor series.
INLINE __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 e = _mm512_set1_ps(8.3333333e-3f);
  for (const float term : {4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f})
    e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(term));
  return _mm512_scalef_ps(e, n);
}

INLINE void narrow(uint16_t* to, __m512 x, __mmask16 which) {
  _mm256_mask_storeu_epi16(to, which, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// Copies the rows of a head, which are `step` apart, and pads them with zero rows.
void read_rows(uint16_t* to, const uint16_t* from, int64_t step, int64_t rows, int64_t all, int64_t d) {
  for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * d, from + i * step, size_t(2 * d));
  std::memset(to + rows * d, 0, size_t(2 * (all - rows) * d));
}

void pack_all_b(uint16_t* to, const uint16_t* x, int64_t rows, int64_t d, bool transposed) {
  const int64_t steps = (transposed ? d : rows) / SIDE, blocks = (transposed ? rows : d) / SIDE;
  for (int64_t j = 0; j < blocks; j++)
    for (int64_t s = 0; s < steps; s++, to += 2 * TILE_NUMBERS)
      transposed ? pack_b_transposed(to, x + (j * d + s) * SIDE, d) : pack_b(to, x + j * SIDE, d, s * SIDE, rows);
}

// Computes 32 rows of P and dS from the scores and from dP. Row i attends to columns 0 ... i; its
// other columns are zero.
void softmax_rows(Head& h, const float* logarithms, int64_t first, int64_t rows, int64_t all, float scale) {
  const int64_t n = first + SIDE;
  for (int64_t i = 0; i < SIDE; i++) {
    float *score = h.scores + i * LONGEST, *dp = h.dp + i * LONGEST;
    uint16_t *p = h.p + (first + i) * all, *ds = h.ds + (first + i) * all;
    const __m512 logarithm = _mm512_set1_ps(i < rows ? logarithms[first + i] : 0.0f), by = _mm512_set1_ps(scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 16) {
      const int64_t counted = std::max<int64_t>(0, std::min<int64_t>(16, first + i + 1 - j));
      const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(score + j), by, logarithm);
      const __m512 power = _mm512_maskz_mov_ps(__mmask16((1u << counted) - 1), exponential(x));
      sum = _mm512_fmadd_ps(power, _mm512_load_ps(dp + j), sum);
      _mm512_store_ps(score + j, power);
      narrow(p + j, power, 0xffff);
    }
    const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
    for (int64_t j = 0; j < n; j += 16) {
      const __m512 change = _mm512_sub_ps(_mm512_load_ps(dp + j), total);
      narrow(ds + j, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(score + j), change), by), 0xffff);
    }
  }
}

// Writes 32 rows of a product [.. d] to the output. a and b: packed factors, multiplied over
// `steps` steps of k. Each block of 32 columns of b has b_steps steps.
void product_rows(Head& h, const Attention& c, uint16_t* to, const uint16_t* a, const uint16_t* b, int64_t steps,
                  int64_t b_steps, int64_t rows) {
  for (int64_t j = 0; j < c.d; j += SIDE, b += b_steps * 2 * TILE_NUMBERS) {
    block_product(h.block, 4 * SIDE, a, b, steps, false);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t l = 0; l < SIDE; l += 16)
        narrow(to + i * 3 * c.b * c.heads * c.d + j + l, _mm512_load_ps(h.block + i * SIDE + l), 0xffff);
  }
}

void fill_p_and_ds(Head& h, const Attention& c, const float* logarithms, int64_t all) {
  const int64_t steps = c.d / SIDE;
  pack_all_b(h.b, h.k, all, c.d, true);
  pack_all_b(h.c, h.v, all, c.d, true);
  for (int64_t i = 0; i < all; i += SIDE) {
    for (int64_t s = 0; s < steps; s++) {
      pack_a(h.a + s * 2 * TILE_NUMBERS, h.q + i * c.d + s * SIDE, c.d);
      pack_a(h.a + (steps + s) * 2 * TILE_NUMBERS, h.dy + i * c.d + s * SIDE, c.d);
    }
    for (int64_t j = 0; j <= i; j += SIDE) {
      block_product(h.scores + j, 4 * LONGEST, h.a, h.b + j * c.d, steps, false);
      block_product(h.dp + j, 4 * LONGEST, h.a + steps * 2 * TILE_NUMBERS, h.c + j * c.d, steps, false);
    }
    softmax_rows(h, logarithms, i, c.s - i, all, c.scale);
  }
}

void back_of_head(Head& h, const Attention& c, int64_t batch, int64_t head) {
  const int64_t width = c.heads * c.d, all = (c.s + SIDE - 1) / SIDE * SIDE, steps = all / SIDE;
  const int64_t in = batch * 3 * width + head * c.d, step = 3 * c.b * width;
  read_rows(h.q, c.qkv + in, step, c.s, all, c.d);
  read_rows(h.k, c.qkv + in + width, step, c.s, all, c.d);
  read_rows(h.v, c.qkv + in + 2 * width, step, c.s, all, c.d);
  read_rows(h.dy, c.dy + batch * width + head * c.d, c.b * width, c.s, all, c.d);
  fill_p_and_ds(h, c, c.logarithms + (batch * c.heads + head) * c.s, all);
  pack_all_b(h.b, h.k, all, c.d, false);
  for (int64_t i = 0; i < steps; i++) {  // dQ: row i sums over keys up to i
    for (int64_t s = 0; s <= i; s++) pack_a(h.a + s * 2 * TILE_NUMBERS, h.ds + (i * all + s) * SIDE, all);
    product_rows(h, c, c.out + in + i * SIDE * step, h.a, h.b, i + 1, steps, std::min<int64_t>(SIDE, c.s - i * SIDE));
  }
  const uint16_t *left[] = {h.ds, h.p}, *right[] = {h.q, h.dy};  // dK and dV: key i sums over rows from i on
  for (int which = 0; which < 2; which++) {
    pack_all_b(h.b, right[which], all, c.d, false);
    for (int64_t i = 0; i < steps; i++) {
      for (int64_t s = i; s < steps; s++)
        pack_a_transposed(h.a + (s - i) * 2 * TILE_NUMBERS, left[which] + i * SIDE, all, s * SIDE, all);
      product_rows(h, c, c.out + in + (which + 1) * width + i * SIDE * step, h.a, h.b + i * 2 * TILE_NUMBERS, steps - i,
                   steps, std::min<int64_t>(SIDE, c.s - i * SIDE));
    }
  }
}

void back_of_heads(const Attention& c, int64_t first, int64_t count) {
  const std::unique_ptr<Head> head(new Head);  // too large for small stacks (OMP_STACKSIZE)
  begin_tiles();
  for (int64_t i = first; i < first + count; i++) back_of_head(*head, c, i / c.heads, i % c.heads);
  end_tiles();
}

TARGET_END

}  // namespace
#endif

extern "C" {

// out [s b 3 a d] = the gradient of qkv [s b 3 a d] for causal attention y [s b a d] with gradient
// dy. bf16. logarithms: log-sum-exp of each query's scores, scale q k, fp32 [b a s]. Returns 0,
// EINVAL unless s <= 256 and d is 32, 64, 96 or 128, or ENOTSUP without AMX tiles.
int threed_attention_backward(const void* qkv, const void* dy, const float* logarithms, void* out, int64_t s,
                              int64_t b, int64_t heads, int64_t d, double scale, int threads) {
#ifdef HAS_TILES
  if (!tiles_here()) return ENOTSUP;
  if (s < 1 || s > LONGEST || d < 1 || d > WIDEST_HEAD || d % SIDE) return EINVAL;
  const Attention c{static_cast<const uint16_t*>(qkv), static_cast<const uint16_t*>(dy), logarithms,
                    static_cast<uint16_t*>(out), s, b, heads, d, float(scale)};
  const int64_t useful = useful_threads(b * heads, threads);
  in_parts(b * heads, std::max<int64_t>(1, b * heads / useful / 4), useful,
           [&](int64_t first, int64_t count) { back_of_heads(c, first, count); });
  return 0;
#else
  (void)qkv, (void)dy, (void)logarithms, (void)out, (void)s, (void)b, (void)heads, (void)d, (void)scale, (void)threads;
  return ENOTSUP;
#endif
}

}  // extern "C"
