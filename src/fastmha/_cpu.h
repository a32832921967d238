/* How many of the wider instruction sets this processor and its operating system can run: 0 for the
 * platform's baseline alone, 1 with AVX2 and FMA, 2 with AVX-512. Asked of CPUID and XGETBV
 * themselves: the compilers' __builtin_cpu_supports needs a run-time library that clang-cl does not
 * link, and says nothing of registers that the system does not save. */
#ifndef FASTMHA_CPU_H
#define FASTMHA_CPU_H

#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
static void cpuid(int leaf, int sub, int *r) { __cpuidex(r, leaf, sub); }
static unsigned long long saved_registers(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void cpuid(int leaf, int sub, int *r) { __cpuid_count(leaf, sub, r[0], r[1], r[2], r[3]); }
static unsigned long long saved_registers(void) {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low | (unsigned long long)high << 32;
}
#endif

static int has(int word, unsigned mask) { return ((unsigned)word & mask) == mask; }

static int cpu_level(void) {
  enum { EAX, EBX, ECX, EDX };
  const unsigned fma_osxsave_f16c = 1u << 12 | 1u << 27 | 1u << 29;
  const unsigned bmi_avx2_bmi2 = 1u << 3 | 1u << 5 | 1u << 8;
  const unsigned f_dq_cd_bw_vl = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
  int most[4], features[4], extended[4];
  cpuid(0, 0, most);
  if (most[EAX] < 7) return 0;
  cpuid(1, 0, features);
  cpuid(7, 0, extended);
  /* XGETBV may be asked only where OSXSAVE is set. 0x6: the AVX registers; 0xe6: those of AVX-512. */
  if (!has(features[ECX], fma_osxsave_f16c) || !has(extended[EBX], bmi_avx2_bmi2)) return 0;
  if ((saved_registers() & 0x6) != 0x6) return 0;
  return has(extended[EBX], f_dq_cd_bw_vl) && (saved_registers() & 0xe6) == 0xe6 ? 2 : 1;
}
#else
static int cpu_level(void) { return 0; }
#endif
#endif
