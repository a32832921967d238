/* What arrays hold, and how one element becomes a `real` and back. */
#ifndef FASTMHA_STORAGE_H
#define FASTMHA_STORAGE_H
#include "_simd.h"

enum Storage { BOOL, FLOAT64, FLOAT32, FLOAT16, BFLOAT16, STORAGES };
enum { REAL = REAL_BYTES == 8 ? FLOAT64 : FLOAT32 };

static inline ptrdiff_t storage_bytes(int storage) {
  static const ptrdiff_t bytes[STORAGES] = {1, 8, 4, 2, 2};
  return bytes[storage];
}

static inline float float_of(uint32_t word) { float x; memcpy(&x, &word, sizeof x); return x; }
static inline uint32_t word_of(float x) { uint32_t word; memcpy(&word, &x, sizeof word); return word; }

/* The exponent moves from a bias of 15 to one of 127 by a multiplication, which also makes denormals
 * right; infinities and NaNs keep all their exponent bits. */
static inline float from_half(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
  float x = float_of(magnitude) * float_of(0x77800000u);
  if (magnitude >= 0x0f800000u) x = float_of(magnitude | 0x7f800000u);
  return float_of(word_of(x) | (uint32_t)(h & 0x8000) << 16);
}
/* Rounds to nearest, ties to even, as all conversions do. */
static inline uint16_t to_half(float x) {
  uint32_t word = word_of(x), sign = word >> 16 & 0x8000, magnitude = word & 0x7fffffff;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  /* from 65520 on: infinity */
  if (magnitude < 0x38800000u)  /* below 2**-14: a denormal, rounded by adding 0.5 */
    return (uint16_t)(sign | (word_of(float_of(magnitude) + 0.5f) - word_of(0.5f)));
  return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
static inline float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }
static inline uint16_t to_bfloat16(float x) {
  uint32_t word = word_of(x);
  if ((word & 0x7fffffff) > 0x7f800000u) return (uint16_t)(word >> 16 | 0x40);
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

/* A double beyond float's range saturates there, for only an infinity is one. */
static inline real from_double(double x) {
#ifndef FASTMHA_DOUBLE
  if (x > FLT_MAX && x < INFINITY) return FLT_MAX;
  if (x < -FLT_MAX && x > -INFINITY) return -FLT_MAX;
#endif
  return (real)x;
}

static inline real load_one(const char *p, int storage) {
  double d; float f; uint16_t h;
  switch (storage) {
    case BOOL: return *p ? 0 : -INFINITY;
    case FLOAT64: memcpy(&d, p, sizeof d); return from_double(d);
    case FLOAT32: memcpy(&f, p, sizeof f); return f;
    case FLOAT16: memcpy(&h, p, sizeof h); return from_half(h);
    default: memcpy(&h, p, sizeof h); return from_bfloat16(h);
  }
}

static inline void store_one(char *p, real x, int storage) {
  float f = (float)x; uint16_t h;
  switch (storage) {
    case FLOAT16: h = to_half(f); memcpy(p, &h, sizeof h); return;
    case BFLOAT16: h = to_bfloat16(f); memcpy(p, &h, sizeof h); return;
    default: memcpy(p, &x, sizeof x);
  }
}
#endif
