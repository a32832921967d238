"""The vectors of `_simd.h`, for Cython. `vec` holds LANES of `real`; + - * / act lane by lane."""
from libc.stdint cimport uint8_t, uint32_t

cdef extern from "_simd.h" nogil:
    ctypedef float real
    ctypedef float vec
    ctypedef unsigned int bits
    ctypedef unsigned int bit_vec                # LANES of words, in lanes as wide as a real
    ctypedef void inlined "INLINED"              # returned by what must be
    enum:
        LANES
        PANEL_VECTORS
        TILE_ROWS
        TILE_STEPS
        FUSED
        REAL_BYTES
        MANTISSA
        EXPONENT_BIAS
        LINE                                     # bytes of a cache line
    const real REAL_MAX
    const real TINY                              # the least normal number
    const real INFINITY

    vec vset(real x)
    vec vload(const real *aligned)
    vec vloadu(const real *p)
    void vstore(real *aligned, vec a)
    void vstoreu(real *p, vec a)
    vec vfma(vec a, vec b, vec c)                # a * b + c
    vec vfma_in_place(vec a, vec b, vec c)       # the same, its result where c was
    vec vless(vec a, vec b, vec x, vec y)        # x where a < b, else y; y for a NaN
    vec vmax(vec a, vec b)                       # b for a NaN
    vec vabs(vec a)
    vec vscale(vec shifted)                      # 2**n
    vec vexponent(vec a)
    vec vmantissa(vec a)
    vec vload_bool(const uint8_t *p)             # 0 where true, -inf where false
    void vtranspose(vec *rows)                   # LANES rows in place
    void prefetch_lines(const char *p, Py_ssize_t bytes)   # from any address
    void prefetch_early(const char *p, Py_ssize_t bytes)   # into the second-level cache

    bit_vec vword(uint32_t word)
    bit_vec vload_words(const bits *p)
    void vword_product(bit_vec a, uint32_t b, bit_vec *high, bit_vec *low)
    vec vkeep(bit_vec word, uint32_t least, vec x)   # x where word >= least, else 0
