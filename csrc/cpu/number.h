// Number formats: converts bf16 and fp16 to and from fp32 in integer arithmetic, which vectorizes
// on any machine. Rounding is to nearest, ties to even. NaN stays NaN. Subnormal numbers are kept,
// as in torch.
#pragma once

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

enum Format { NONE = 0, FP32 = 1, BF16 = 2, FP16 = 3, FP64 = 4 };
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE float to_number(float x) { return x; }
INLINE double to_number(double x) { return x; }
INLINE float to_number(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

// The exponent biases of fp16 and fp32 differ by 112. For infinity and NaN, the exponent increases
// by another 112. A subnormal number first gets the exponent of 2^-14; then 2^-14 is subtracted.
INLINE float to_number(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, size = uint32_t(x.bits & 0x7fff) << 13;
  const uint32_t normal = size + (112u << 23);
  const uint32_t special = size + (224u << 23);
  const uint32_t subnormal = bits_of(float_of(size + (113u << 23)) - float_of(113u << 23));
  const uint32_t exponent = size & 0x0f800000;
  return float_of(sign | (exponent == 0x0f800000 ? special : exponent == 0 ? subnormal : normal));
}

INLINE void from_number(float x, float& to) { to = x; }

INLINE void from_number(float x, bf16& to) {
  const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

// Below 2^-14 the result is subnormal. Adding 0.5 rounds it; the last ten bits of the sum are then
// the bits of the result.
INLINE void from_number(float x, fp16& to) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
  const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  const uint32_t special = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  to.bits = uint16_t(sign | (size >= 0x47800000 ? special : size < 0x38800000 ? subnormal : normal));
}
