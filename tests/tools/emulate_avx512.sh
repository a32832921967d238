#!/usr/bin/env bash
# Builds the AVX-512 kernels for a machine without AVX-512, its instructions emulated by SIMDe's headers (Debian:
# libsimde-dev) on AVX2, and runs the test-suite on them: their lanes, tiles and bits, not their speed.
#
#   tests/tools/emulate_avx512.sh [pytest arguments]
#
# Needs an installed fastmha (its Python files and other modules are used), cython and gcc.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}

cat >"$work/emulated.h" <<'H'
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <immintrin.h>
#define __AVX512F__ 1
/* What SIMDe lacks: halves. */
typedef union { __m256 half[2]; simde__m512 whole; } emulated;
static inline simde__m512 emulated_cvtph_ps(__m256i a) {
  emulated x;
  x.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
  x.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return x.whole;
}
static inline __m256i emulated_cvtps_ph(simde__m512 a) {
  emulated x = {.whole = a};
  return _mm256_set_m128i(_mm256_cvtps_ph(x.half[1], 0), _mm256_cvtps_ph(x.half[0], 0));
}
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(a, rounding) emulated_cvtps_ph(a)
H
installed=$("$python" -c 'import fastmha, os; print(os.path.dirname(fastmha.__file__))')
cp -r "$installed" "$work/fastmha"
for precision in f32 f64; do
  name=_kernels_avx512_$precision
  flags=(-O2 -mavx2 -mfma -mf16c -ffp-contract=off -fno-math-errno -Wno-psabi)
  [ "$precision" = f64 ] && flags+=(-DFASTMHA_DOUBLE)
  "$python" -m cython -3 -X boundscheck=False,wraparound=False,cdivision=True,initializedcheck=False \
    -X freethreading_compatible=True --module-name="fastmha.$name" \
    "$root/src/fastmha/_kernels.pyx" -o "$work/$name.c"
  gcc -shared -fPIC "${flags[@]}" -include "$work/emulated.h" -I"$root/src/fastmha" \
    -I"$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    -DPy_LIMITED_API=0x030b0000 -DCYTHON_LIMITED_API=1 "$work/$name.c" -o "$work/fastmha/$name.abi3.so" -lm
done
# The processor cannot run them, so says _cpu; but these are made of AVX2.
printf 'def level():\n    return 2\n' >"$work/fastmha/_cpu.py"
rm "$work"/fastmha/_cpu.*.so
cd "$root"
FASTMHA_ISA=avx512 PYTHONPATH=$work "$python" -m pytest -p no:cacheprovider -q -m "not slow" "$@"
