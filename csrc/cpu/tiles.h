// Intel's tile registers (AMX) for products of bf16 that are accumulated in fp32: packing of
// factors and the product of a block. Only functions between TARGET_BEGIN(TILES) and TARGET_END may
// use them, and only if `tiles_here` is true.
#pragma once

#include "targets.h"

#if defined(X86) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 12)
#define HAS_TILES 1

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILES "amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"

// Returns whether the processor has tiles for bf16 and Linux permits this process to use them. Asks
// for permission once.
inline bool tiles_here() {
  static const bool here = [] {
    unsigned a, b, c, d, narrows;
    if (find_path("avx512") < 0 || !__get_cpuid_count(7, 1, &narrows, &b, &c, &d) || !(narrows & 1u << 5)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned BF16_AND_TILE = 1u << 22 | 1u << 24;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arguments of arch_prctl
    return (d & BF16_AND_TILE) == BF16_AND_TILE && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
  }();
  return here;
}

TARGET_BEGIN(TILES)

// A tile has 16 rows of 64 bytes. In a product C = A B, a tile of C has 16 x 16 fp32 numbers. Tiles
// of A and B hold pairs of bf16 numbers that are neighbors along k: a row of A holds 16 pairs, and
// a row of B holds one pair for each of 16 columns.
constexpr int SIDE = 32, TILE_BYTES = 1024, TILE_NUMBERS = 512;  // SIDE: of a block of 2 x 2 tiles; k per step

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

INLINE void begin_tiles() {
  static constexpr TileShapes SHAPES{};
  _tile_loadconfig(&SHAPES);
}

INLINE void end_tiles() { _tile_release(); }

// Interleaves 32 columns of two rows into two registers of 16 pairs.
struct Pairs {
  __m512i low, high;
};

INLINE Pairs pairs_of(const uint16_t* first, const uint16_t* second) {
  alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i a = first ? _mm512_loadu_si512(first) : _mm512_setzero_si512();
  const __m512i b = second ? _mm512_loadu_si512(second) : _mm512_setzero_si512();
  return {_mm512_permutex2var_epi16(a, low, b), _mm512_permutex2var_epi16(a, high, b)};
}

INLINE const uint16_t* row_or_none(const uint16_t* x, int64_t width, int64_t row, int64_t rows) {
  return row < rows ? x + row * width : nullptr;
}

// Packs a part of x [rows width] as two tiles of B: rows [k0, k0 + 32), and the 32 columns that
// begin at the pointer x. Rows from `rows` on count as zero.
INLINE void pack_b(uint16_t* to, const uint16_t* x, int64_t width, int64_t k0, int64_t rows) {
  for (int p = 0; p < 16; p++) {
    const int64_t k = k0 + 2 * p;
    const Pairs pairs = pairs_of(row_or_none(x, width, k, rows), row_or_none(x, width, k + 1, rows));
    _mm512_store_si512(to + 32 * p, pairs.low);
    _mm512_store_si512(to + TILE_NUMBERS + 32 * p, pairs.high);
  }
}

INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {  // r[4 g + i] holds columns i, 4 + i, 8 + i, 12 + i of rows 4 g ... 4 g + 3
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88), t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88), t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

// Packs the same part of x as pack_b, but transposed and as two tiles of A: 32 rows, 32 values of
// k.
INLINE void pack_a_transposed(uint16_t* to, const uint16_t* x, int64_t width, int64_t k0, int64_t rows) {
  __m512i low[16], high[16];
  for (int p = 0; p < 16; p++) {
    const int64_t k = k0 + 2 * p;
    const Pairs pairs = pairs_of(row_or_none(x, width, k, rows), row_or_none(x, width, k + 1, rows));
    low[p] = pairs.low, high[p] = pairs.high;
  }
  transpose(low);
  transpose(high);
  for (int i = 0; i < 16; i++) {
    _mm512_store_si512(to + 32 * i, low[i]);
    _mm512_store_si512(to + TILE_NUMBERS + 32 * i, high[i]);
  }
}

// Packs 32 rows of x [rows width], 32 values of k, as two tiles of A.
INLINE void pack_a(uint16_t* to, const uint16_t* x, int64_t width) {
  for (int i = 0; i < 32; i++) _mm512_store_si512(to + 32 * i, _mm512_loadu_si512(x + i * width));
}

// Packs 32 rows of x [rows width], 32 values of k, as two tiles of B, transposed.
INLINE void pack_b_transposed(uint16_t* to, const uint16_t* x, int64_t width) {
  for (int tile = 0; tile < 2; tile++, to += TILE_NUMBERS, x += 16 * width) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(x + i * width);
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, rows[i]);
  }
}

// Computes c = a b, or c += a b if `add`, for a block c [32 32] whose rows are `row_bytes` apart.
// The factors a and b are packed, with `steps` steps of 32 values of k.
INLINE void block_product(float* c, int64_t row_bytes, const uint16_t* a, const uint16_t* b, int64_t steps, bool add) {
  float* below = c + 16 * (row_bytes / 4);
  if (add) {
    _tile_loadd(0, c, row_bytes);
    _tile_loadd(1, c + 16, row_bytes);
    _tile_loadd(2, below, row_bytes);
    _tile_loadd(3, below + 16, row_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; s++, a += 2 * TILE_NUMBERS, b += 2 * TILE_NUMBERS) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + TILE_NUMBERS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + TILE_NUMBERS, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + 16, row_bytes);
  _tile_stored(2, below, row_bytes);
  _tile_stored(3, below + 16, row_bytes);
}

TARGET_END
#endif
