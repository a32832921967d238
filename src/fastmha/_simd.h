/* Vectors as wide as the target's registers: the one file that knows how wide they are.
 *
 * `real` is the arithmetic type of a build (float, or double with FASTMHA_DOUBLE) and `vec` a register of LANES of
 * them. Where the compiler has no vector types, `vec` is `real` and LANES is 1: the kernels run all the same.
 *
 * Lane by lane, every operation does the same on every target, so that builds with a fused multiply-add agree bit for
 * bit. That is why nothing here is left to the compiler's contraction, and why `vmax` states its order: x86's maximum
 * drops a NaN and NEON's keeps it.
 */
#ifndef FASTMHA_SIMD_H
#define FASTMHA_SIMD_H
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF /* clang-cl passes over -ffp-contract=off */
#endif

#ifdef FASTMHA_DOUBLE
typedef double real;
typedef uint64_t bits;
#define REAL_BYTES 8
#define REAL_MAX DBL_MAX
#define TINY DBL_MIN /* of the normal numbers */
enum { MANTISSA = 52, EXPONENT_BIAS = 1023 };
#else
typedef float real;
typedef uint32_t bits;
#define REAL_BYTES 4
#define REAL_MAX FLT_MAX
#define TINY FLT_MIN
enum { MANTISSA = 23, EXPONENT_BIAS = 127 };
#endif

/* gcc's extensions: clang has them under each of its names, clang-cl as well, where __GNUC__ is not defined. */
#if defined(__GNUC__) || defined(__clang__)
#define GNU_EXTENSIONS 1
#else
#define GNU_EXTENSIONS 0
#endif

/* What a function returns that has to be inlined, that is, compiled anew for the constants it is called with. Left
 * to itself, gcc makes one function with loops for the rarer of them, and the accumulators lie in memory. */
#if GNU_EXTENSIONS
#define INLINED __attribute__((always_inline)) void
#else
#define INLINED void
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
enum { PANEL_VECTORS = 4, TILE_ROWS = 6 };  /* 24 accumulators of 32 registers */
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VECTOR_BYTES 32
enum { PANEL_VECTORS = 2, TILE_ROWS = 6 };  /* 12 accumulators of 16 registers */
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define VECTOR_BYTES 16
enum { PANEL_VECTORS = 4, TILE_ROWS = 6 };  /* 24 of 32 */
#elif defined(__SSE2__)
#include <emmintrin.h>
#define VECTOR_BYTES 16
enum { PANEL_VECTORS = 2, TILE_ROWS = 6 };  /* 12 of 16 */
#elif GNU_EXTENSIONS && (defined(__wasm_simd128__) || defined(__VSX__) || defined(__riscv_vector))
#define VECTOR_BYTES 16
enum { PANEL_VECTORS = 2, TILE_ROWS = 6 };
#else
#define VECTOR_BYTES 0
enum { PANEL_VECTORS = 2, TILE_ROWS = 4 };
#endif

/* Steps of the tile's loop that are written out. With 12 multiply-adds a step, the loop's own instructions are a
 * seventh of all, which tells where a core is shared; with 24, gcc keeps them in registers only one step at a time. */
enum { TILE_STEPS = VECTOR_BYTES == 32 ? 4 : 1 };

/* Whether vfma rounds once. Builds that do agree with one another in every bit. */
#if defined(__FMA__) || (defined(__aarch64__) && VECTOR_BYTES)
enum { FUSED = 1 };
#else
enum { FUSED = 0 };
#endif

#define LANE_COUNT (VECTOR_BYTES ? VECTOR_BYTES / REAL_BYTES : 1)
enum { LANES = LANE_COUNT };

#if VECTOR_BYTES
typedef real vec __attribute__((vector_size(VECTOR_BYTES)));
typedef bits bit_vec __attribute__((vector_size(VECTOR_BYTES)));
typedef real loose_vec __attribute__((vector_size(VECTOR_BYTES), aligned(REAL_BYTES), may_alias));
typedef uint8_t byte_vec __attribute__((vector_size(LANE_COUNT)));

static inline vec vset(real x) { return x - (vec){0}; }
static inline vec vload(const real *p) { return *(const vec *)p; }
static inline vec vloadu(const real *p) { return *(const loose_vec *)p; }
static inline void vstore(real *p, vec a) { *(vec *)p = a; }
static inline void vstoreu(real *p, vec a) { *(loose_vec *)p = a; }
static inline bit_vec vbits(vec a) { return (bit_vec)a; }
static inline vec vreal(bit_vec a) { return (vec)a; }
#else
typedef real vec;
typedef bits bit_vec;

static inline vec vset(real x) { return x; }
static inline vec vload(const real *p) { return *p; }
static inline vec vloadu(const real *p) { return *p; }
static inline void vstore(real *p, vec a) { *p = a; }
static inline void vstoreu(real *p, vec a) { *p = a; }
static inline bit_vec vbits(vec a) { bit_vec b; memcpy(&b, &a, sizeof b); return b; }
static inline vec vreal(bit_vec a) { vec b; memcpy(&b, &a, sizeof b); return b; }
#endif

/* Intrinsics by width and type: _mm512_fmadd_ps and its kin. */
#if VECTOR_BYTES == 64
#define X86(op) X86_JOIN(_mm512_, op)
#define X86_VEC(a) X86_CAST(__m512, a)
#elif VECTOR_BYTES == 32
#define X86(op) X86_JOIN(_mm256_, op)
#define X86_VEC(a) X86_CAST(__m256, a)
#endif
#ifdef FASTMHA_DOUBLE
#define X86_JOIN(prefix, op) prefix##op##_pd
#define X86_CAST(type, a) ((type##d)(a))
#define NEON(op) op##_f64
#else
#define X86_JOIN(prefix, op) prefix##op##_ps
#define X86_CAST(type, a) ((type)(a))
#define NEON(op) op##_f32
#endif

/* a * b + c, rounded once where FUSED. */
static inline vec vfma(vec a, vec b, vec c) {
#if VECTOR_BYTES >= 32
  return (vec)X86(fmadd)(X86_VEC(a), X86_VEC(b), X86_VEC(c));
#elif defined(__aarch64__) && VECTOR_BYTES
  return (vec)NEON(vfmaq)(c, a, b);
#else
  return a * b + c;
#endif
}

/* The same, its result in c's register: gcc, when free to put it elsewhere, moves and spills accumulators. */
static inline vec vfma_in_place(vec a, vec b, vec c) {
#if VECTOR_BYTES == 32 && GNU_EXTENSIONS
#ifdef FASTMHA_DOUBLE
  __asm__("vfmadd231pd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
#else
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
#endif
  return c;
#else
  return vfma(a, b, c);
#endif
}

/* Lanes of x where a < b, of y elsewhere and where a or b is NaN. Every choice of the kernels is made with it. */
static inline vec vless(vec a, vec b, vec x, vec y) {
#if VECTOR_BYTES == 64
#ifdef FASTMHA_DOUBLE
  return (vec)_mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
#else
  return (vec)_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
#endif
#elif VECTOR_BYTES == 32
  return (vec)X86(blendv)(X86_VEC(y), X86_VEC(x), (X86_VEC(a < b)));
#elif VECTOR_BYTES
  bit_vec less = (bit_vec)(a < b);
  return vreal((less & vbits(x)) | (~less & vbits(y)));
#else
  return a < b ? x : y;
#endif
}

/* a > b ? a : b, so b where one of them is NaN: what x86's maximum does. */
static inline vec vmax(vec a, vec b) {
#if VECTOR_BYTES >= 32
  return (vec)X86(max)(X86_VEC(a), X86_VEC(b));
#elif defined(__SSE2__) && VECTOR_BYTES
#ifdef FASTMHA_DOUBLE
  return (vec)_mm_max_pd(a, b);
#else
  return (vec)_mm_max_ps(a, b);
#endif
#else
  return vless(b, a, a, b);
#endif
}

/* 2**n, where `shifted` = n + 1.5 * 2**MANTISSA + EXPONENT_BIAS and 2**n is a normal number. Meant
 * as a factor: adding n to the exponent bits instead would turn some NaNs into numbers. */
static inline vec vscale(vec shifted) { return vreal(vbits(shifted) << MANTISSA); }

/* a = mantissa * 2**exponent with 1 <= mantissa < 2, for positive normal numbers. */
static inline vec vexponent(vec a) {
  const real two = (real)((bits)1 << MANTISSA);  /* its low bits count ones */
  return vreal((vbits(a) >> MANTISSA) | vbits(vset(two))) - vset(two + EXPONENT_BIAS);
}
static inline vec vmantissa(vec a) {
  return vreal((vbits(a) & (((bits)1 << MANTISSA) - 1)) | vbits(vset(1)));
}
static inline vec vabs(vec a) { return vreal(vbits(a) & ~vbits(vset(-(real)0))); }

/* Lanes of 32-bit words, whatever the width of `real`: for the random numbers of dropout. */
static inline bit_vec vword(uint32_t word) { return vbits(vset(0)) + (bits)word; }
static inline bit_vec vload_words(const bits *p) { bit_vec a; memcpy(&a, p, sizeof a); return a; }

#if VECTOR_BYTES
typedef uint64_t wide_vec __attribute__((vector_size(VECTOR_BYTES)));
/* Products of the low halves of 64-bit lanes. */
static inline wide_vec vwide_product(wide_vec a, wide_vec b) {
#if VECTOR_BYTES == 64
  return (wide_vec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif VECTOR_BYTES == 32
  return (wide_vec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (wide_vec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (wide_vec)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}
#endif

/* The high and the low words of the products of a's words with another word. */
static inline void vword_product(bit_vec a, uint32_t b, bit_vec *high, bit_vec *low) {
#if VECTOR_BYTES
  const wide_vec lows = (wide_vec){0} + 0xffffffffu, factor = (wide_vec){0} + b;
  wide_vec even = vwide_product((wide_vec)a, factor);
#ifdef FASTMHA_DOUBLE
  *high = even >> 32;
  *low = even & lows;
#else
  wide_vec odd = vwide_product((wide_vec)a >> 32, factor);
  *high = (bit_vec)(even >> 32 | (odd & ~lows));
  *low = (bit_vec)((even & lows) | odd << 32);
#endif
#else
  uint64_t product = (uint64_t)a * b;
  *high = (bit_vec)(product >> 32);
  *low = (bit_vec)(product & 0xffffffff);
#endif
}

/* Lanes of x whose word is at least `least`, else 0. */
static inline vec vkeep(bit_vec word, uint32_t least, vec x) {
#if VECTOR_BYTES
  return vreal((bit_vec)(word >= vword(least)) & vbits(x));
#else
  return word >= least ? x : 0;
#endif
}

/* Asks for what will be read or written before long; any address will do. */
enum { LINE = 64 /* bytes of a cache line */ };
static inline void vprefetch(const char *p) {
#if GNU_EXTENSIONS
  __builtin_prefetch(p);
#endif
}
static inline void prefetch_lines(const char *p, ptrdiff_t bytes) {
  for (ptrdiff_t i = 0; i < bytes; i += LINE) vprefetch(p + i);
}
/* The same for what is wanted later: brought into the second-level cache, for the first has other things to hold. */
static inline void prefetch_early(const char *p, ptrdiff_t bytes) {
#if GNU_EXTENSIONS
  for (ptrdiff_t i = 0; i < bytes; i += LINE) __builtin_prefetch(p + i, 0, 2);
#endif
}

/* LANES bools as reals: 0 where true, minus infinity where false. */
static inline vec vload_bool(const uint8_t *p) {
#if VECTOR_BYTES
  byte_vec b; memcpy(&b, p, sizeof b);
#if VECTOR_BYTES == 32 /* gcc takes the general way a byte at a time */
  uint64_t word = 0; memcpy(&word, &b, sizeof b);
  __m128i x = _mm_cvtsi64_si128((long long)word);
  bit_vec wide = REAL_BYTES == 4 ? (bit_vec)_mm256_cvtepu8_epi32(x) : (bit_vec)_mm256_cvtepu8_epi64(x);
#else
  bit_vec wide = __builtin_convertvector(b, bit_vec);
#endif
  return vreal((bit_vec)(wide == 0) & vbits(vset(-INFINITY)));
#else
  return *p ? 0 : -INFINITY;
#endif
}

/* The LANES x LANES block in r, transposed: log2(LANES) rounds, each of which interleaves pairs of rows. Within 16
 * bytes first, for which x86 and NEON have single instructions; that leaves the middle rows of four exchanged. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (bit_vec){__VA_ARGS__})
#endif
#define MIX_ROUND(step, low, high)                                    \
  for (int i = 0; i < LANES; i++)                                     \
    if (!(i & step)) {                                                \
      vec a = r[i], b = r[i + step];                                  \
      r[i] = SHUFFLE(a, b, low); r[i + step] = SHUFFLE(a, b, high);   \
    }
#define EXCHANGE_MIDDLE                                               \
  for (int i = 1; i < LANES; i += 4) {                                \
    vec a = r[i]; r[i] = r[i + 1]; r[i + 1] = a;                      \
  }
#define LIST(...) __VA_ARGS__
static inline void vtranspose(vec *r) {
#if LANE_COUNT == 1
  (void)r;
#elif LANE_COUNT == 16
  MIX_ROUND(1, LIST(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
            LIST(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31))
  MIX_ROUND(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
            LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  EXCHANGE_MIDDLE
  MIX_ROUND(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
            LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  MIX_ROUND(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
            LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif LANE_COUNT == 8 && REAL_BYTES == 4
  MIX_ROUND(1, LIST(0, 8, 1, 9, 4, 12, 5, 13), LIST(2, 10, 3, 11, 6, 14, 7, 15))
  MIX_ROUND(2, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
  EXCHANGE_MIDDLE
  MIX_ROUND(4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#elif LANE_COUNT == 8
  MIX_ROUND(1, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))
  MIX_ROUND(2, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
  MIX_ROUND(4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#elif LANE_COUNT == 4 && REAL_BYTES == 4
  MIX_ROUND(1, LIST(0, 4, 1, 5), LIST(2, 6, 3, 7))
  MIX_ROUND(2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
  EXCHANGE_MIDDLE
#elif LANE_COUNT == 4
  MIX_ROUND(1, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))
  MIX_ROUND(2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#else
  MIX_ROUND(1, LIST(0, 2), LIST(1, 3))
#endif
}

#endif
