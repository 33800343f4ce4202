// The weight gradient of a linear layer with AMX tiles: a^T b of bf16, added to fp32 in one pass.

#include <algorithm>
#include <cerrno>
#include <memory>

#include "number.h"
#include "parallel.h"
#include "tiles.h"

#ifdef HAS_TILES
namespace {

// A part of the output has ROWS x COLUMNS elements, which stay in the L2 cache. The factor a is
// packed for DEPTH values of k at a time.
constexpr int64_t ROWS = 256, COLUMNS = 1024, DEPTH = 512;

struct Product {
  const uint16_t *a, *b;  // [k m], [k n]
  int64_t k, m, n;
  float* out;  // [m n]
  bool fresh;
  uint16_t* packed;  // b in blocks of 32 columns, each in steps of 32 values of k
  int64_t rows, across;  // rows per part; number of parts side by side
};

INLINE int64_t steps_of(int64_t k) { return (k + SIDE - 1) / SIDE; }

TARGET_BEGIN(TILES)

// Packs the columns [32 first, 32 (first + count)) of b.
void pack(const Product& c, int64_t first, int64_t count) {
  const int64_t steps = steps_of(c.k);
  for (int64_t j = first; j < first + count; j++)
    for (int64_t s = 0; s < steps; s++)
      pack_b(c.packed + (j * steps + s) * 2 * TILE_NUMBERS, c.b + j * SIDE, c.n, s * SIDE, c.k);
}

struct Packed {
  alignas(64) uint16_t a[ROWS * DEPTH];
};

void add_part(const Product& c, int64_t row, int64_t column, uint16_t* a) {
  const int64_t rows = std::min(c.rows, c.m - row), end = std::min(column + COLUMNS, c.n), steps = steps_of(c.k);
  for (int64_t first = 0; first < steps; first += DEPTH / SIDE) {
    const int64_t some = std::min(DEPTH / SIDE, steps - first);
    for (int64_t i = 0; i < rows; i += SIDE)
      for (int64_t s = 0; s < some; s++)
        pack_a_transposed(a + (i * some + s * SIDE) * SIDE, c.a + row + i, c.m, (first + s) * SIDE, c.k);
    for (int64_t j = column; j < end; j += SIDE)
      for (int64_t i = 0; i < rows; i += SIDE)
        block_product(c.out + (row + i) * c.n + j, 4 * c.n, a + i * some * SIDE,
                      c.packed + (j * steps + first * SIDE) * SIDE, some, first || !c.fresh);
  }
}

void add_parts(const Product& c, int64_t first, int64_t count) {
  const std::unique_ptr<Packed> packed(new Packed);  // too large for small stacks (OMP_STACKSIZE)
  begin_tiles();
  for (int64_t part = first; part < first + count; part++)
    add_part(c, part / c.across * c.rows, part % c.across * COLUMNS, packed->a);
  end_tiles();
}

TARGET_END

}  // namespace
#endif

extern "C" {

// Returns 1 if this processor has AMX tiles, which the functions below require, else 0.
int threed_tiles() {
#ifdef HAS_TILES
  return tiles_here();
#else
  return 0;
#endif
}

// Computes out = a^T b if `fresh`, else out += a^T b. out: fp32 [m n]. a: bf16 [k m]. b: bf16 [k
// n]. m and n are multiples of 32. packed: working memory for n k bf16 numbers, with k rounded up
// to a multiple of 32; it is 64-byte aligned. The result does not depend on the number of threads.
int threed_add_product(const void* a, const void* b, int64_t k, int64_t m, int64_t n, float* out, int fresh,
                       void* packed, int threads) {
#ifdef HAS_TILES
  if (!tiles_here()) return ENOTSUP;
  if (m % SIDE || n % SIDE || k < 1 || m < 0 || n < 0) return EINVAL;
  Product c{};
  c.a = static_cast<const uint16_t*>(a), c.b = static_cast<const uint16_t*>(b), c.k = k, c.m = m, c.n = n;
  c.out = out, c.fresh = fresh, c.packed = static_cast<uint16_t*>(packed);
  c.across = (n + COLUMNS - 1) / COLUMNS;
  c.rows = std::min(ROWS, std::max<int64_t>(SIDE, m * c.across / std::max(1, 2 * threads) / SIDE * SIDE));
  const int64_t parts = (m + c.rows - 1) / c.rows * c.across, panels = n / SIDE;
  const int64_t useful = useful_threads(parts, threads);
  in_parts(panels, std::max<int64_t>(1, panels / useful / 4), useful,
           [&](int64_t first, int64_t count) { pack(c, first, count); });
  in_parts(parts, 1, useful, [&](int64_t first, int64_t count) { add_parts(c, first, count); });
  return 0;
#else
  (void)a, (void)b, (void)k, (void)m, (void)n, (void)out, (void)fresh, (void)packed, (void)threads;
  return ENOTSUP;
#endif
}

}  // extern "C"
