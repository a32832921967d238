/* What arrays hold, and how elements become reals and back: one at a time, or LANES that lie side by side, with
 * the same bits (NaN payloads aside). */
#ifndef FASTMHA_STORAGE_H
#define FASTMHA_STORAGE_H
#include "_simd.h"

enum Storage { BOOL, FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT8, STORAGES };
#define REAL (REAL_BYTES == 8 ? FLOAT64 : FLOAT32)

static inline ptrdiff_t storage_bytes(int storage) {
  static const ptrdiff_t bytes[STORAGES] = {1, 8, 4, 2, 2, 1};
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
    case INT8: return *(const int8_t *)p;
    default: memcpy(&h, p, sizeof h); return from_bfloat16(h);
  }
}

static inline void store_one(char *p, real x, int storage) {
  float f = (float)x; uint16_t h;
  switch (storage) {
    case FLOAT16: h = to_half(f); memcpy(p, &h, sizeof h); return;
    case BFLOAT16: h = to_bfloat16(f); memcpy(p, &h, sizeof h); return;
    case FLOAT32: memcpy(p, &f, sizeof f); return;
    default: memcpy(p, &x, sizeof x);
  }
}

/* Whether LANES elements that lie `step` bytes apart can be loaded at a time; and stored. */
static inline int loads_vectors(int storage, ptrdiff_t step) {
  return step == storage_bytes(storage) && storage != BOOL &&
         (storage == REAL || (VECTOR_BYTES && storage != FLOAT64));
}
static inline int stores_vectors(int storage, ptrdiff_t step) {
  return storage != INT8 && loads_vectors(storage, step);
}

#if VECTOR_BYTES
typedef int8_t char_vec __attribute__((vector_size(LANE_COUNT)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANE_COUNT)));
typedef int32_t int_vec __attribute__((vector_size(4 * LANE_COUNT)));
typedef uint32_t word_vec __attribute__((vector_size(4 * LANE_COUNT)));
typedef float single_vec __attribute__((vector_size(4 * LANE_COUNT)));

static inline word_vec choose(int_vec mask, word_vec a, word_vec b) {
  return ((word_vec)mask & a) | (~(word_vec)mask & b);
}

/* Processors convert halves in one instruction, and bytes in two, which gcc does not find by itself for 8 bytes or
 * fewer. The rest is the code for one element, in lanes. */
static inline single_vec load_halves(const char *p) {
#if LANE_COUNT == 16
  return (single_vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LANE_COUNT == 8 && defined(__F16C__)
  return (single_vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif LANE_COUNT == 4 && defined(__F16C__)
  return (single_vec)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p));
#elif LANE_COUNT == 4 && defined(__aarch64__)
  return (single_vec)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)p)));
#else
  half_vec h; memcpy(&h, p, sizeof h);
  word_vec word = __builtin_convertvector(h, word_vec), magnitude = (word & 0x7fff) << 13;
  word_vec x = (word_vec)((single_vec)magnitude * float_of(0x77800000u));
  x = choose((int_vec)magnitude >= 0x0f800000, magnitude | 0x7f800000u, x);
  return (single_vec)(x | (word & 0x8000) << 16);
#endif
}

static inline void store_halves(char *p, single_vec x) {
#if LANE_COUNT == 16
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif LANE_COUNT == 8 && defined(__F16C__)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif LANE_COUNT == 4 && defined(__F16C__)
  _mm_storel_epi64((__m128i *)p, _mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT));
#elif LANE_COUNT == 4 && defined(__aarch64__)
  vst1_u8((uint8_t *)p, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)x)));
#else
  const single_vec zero = {0};
  word_vec word = (word_vec)x, magnitude = word & 0x7fffffff;
  word_vec normal = (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13;
  word_vec small = (word_vec)((single_vec)magnitude + 0.5f) - (word_vec)(zero + 0.5f);
  normal = choose((int_vec)magnitude < 0x38800000, small, normal);
  normal = choose((int_vec)magnitude >= 0x477ff000, (word_vec)zero + 0x7c00, normal);
  normal = choose((int_vec)magnitude > 0x7f800000, (word_vec)zero + 0x7e00, normal);
  half_vec h = __builtin_convertvector(normal | (word >> 16 & 0x8000), half_vec);
  memcpy(p, &h, sizeof h);
#endif
}

static inline single_vec load_chars(const char *p) {
#if LANE_COUNT == 8 && defined(__AVX2__)
  return (single_vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif LANE_COUNT == 4 && defined(__AVX2__)
  int32_t word; memcpy(&word, p, sizeof word);
  return (single_vec)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(word)));
#else
  char_vec c; memcpy(&c, p, sizeof c);
  return __builtin_convertvector(__builtin_convertvector(c, int_vec), single_vec);
#endif
}

static inline void store_bfloat16s(char *p, single_vec x) {
  word_vec word = (word_vec)x, rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  rounded = choose((int_vec)(word & 0x7fffffff) > 0x7f800000, word >> 16 | 0x40, rounded);
  half_vec h = __builtin_convertvector(rounded, half_vec);
  memcpy(p, &h, sizeof h);
}

static inline vec vload_from(const char *p, int storage) {
  single_vec x; half_vec h; vec real_x;
  switch (storage) {
    case FLOAT16: x = load_halves(p); break;
    case BFLOAT16:
      memcpy(&h, p, sizeof h);
      x = (single_vec)(__builtin_convertvector(h, word_vec) << 16);
      break;
    case INT8: x = load_chars(p); break;
    case REAL: memcpy(&real_x, p, sizeof real_x); return real_x;
    default: memcpy(&x, p, sizeof x);
  }
  return __builtin_convertvector(x, vec);
}

static inline void vstore_to(char *p, vec x, int storage) {
  single_vec single;
  if (storage == REAL) { memcpy(p, &x, sizeof x); return; }
  single = __builtin_convertvector(x, single_vec);
  switch (storage) {
    case FLOAT16: store_halves(p, single); break;
    case BFLOAT16: store_bfloat16s(p, single); break;
    default: memcpy(p, &single, sizeof single);
  }
}
#else
static inline vec vload_from(const char *p, int storage) { return load_one(p, storage); }
static inline void vstore_to(char *p, vec x, int storage) { store_one(p, x, storage); }
#endif
#endif
