"""Rotary positions: the pairs of each row turned by its position's angles."""
from fastmha._operand cimport Operand, load_row, store_row
from fastmha._simd cimport real


cdef struct Rotation:
    Operand x, out                      # (B, H, L, D); `lead` are the strides of B and H
    Operand cos, sin                    # (B, L, pairs): reals, side by side
    Py_ssize_t heads, rows, width, pairs
    Py_ssize_t total, grain             # rows in all, and in a piece of work
    bint interleaved                    # pairs are neighbours, else halves apart
    char *scratch
    size_t slot_bytes


cdef inline void turn(
    Py_ssize_t pairs, Py_ssize_t apart, Py_ssize_t step, const real *x, const real *cos, const real *sin,
    real *y,
) noexcept nogil:
    """Pair i is x[i * step] and what lies `apart` from it. Two roundings, as NumPy has them."""
    cdef Py_ssize_t i
    cdef real a, b
    for i in range(pairs):
        a, b = x[i * step], x[i * step + apart]
        y[i * step] = a * cos[i] - b * sin[i]
        y[i * step + apart] = b * cos[i] + a * sin[i]


cdef inline void rotate_row(const Rotation *o, Py_ssize_t number, real *x) noexcept nogil:
    """A row, counted through all; x is room for it, twice."""
    cdef Py_ssize_t row = number % o.rows, head = number // o.rows % o.heads
    cdef Py_ssize_t member = number // o.rows // o.heads
    cdef Py_ssize_t angle = member * o.cos.lead[0] + row * o.cos.row, i
    cdef const real *cos = <const real *>(o.cos.data + angle)
    cdef const real *sin = <const real *>(o.sin.data + angle)
    cdef real *y = x + o.width
    load_row(o.x.data + member * o.x.lead[0] + head * o.x.lead[1] + row * o.x.row, o.x.storage, o.x.col,
             o.width, x)
    if o.interleaved:
        turn(o.pairs, 1, 2, x, cos, sin, y)
    else:
        turn(o.pairs, o.pairs, 1, x, cos, sin, y)
    for i in range(2 * o.pairs, o.width):
        y[i] = x[i]
    store_row(o.out.data + member * o.out.lead[0] + head * o.out.lead[1] + row * o.out.row, o.out.storage,
              o.out.col, o.width, y)
