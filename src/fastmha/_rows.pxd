"""An atom's keys or values, wherever they lie: in an array, a ring or pages, as reals or not."""
from fastmha._block cimport Block
from fastmha._call cimport ATOM, Call
from fastmha._operand cimport Operand, load_row
from fastmha._simd cimport LANES, prefetch_lines, real, vec, vfma, vloadu, vset, vstoreu
from fastmha._storage cimport FLOAT32, INT8, REAL, load_one, loads_vectors


cdef struct Rows:
    const real *data                    # reals, side by side; NULL where only `at` tells where they are
    Py_ssize_t row                      # from one row to the next, in reals
    # For few queries, the rows one by one.
    const char *at[ATOM]
    int storage                         # of what lies there
    real factor[ATOM]                   # of INT8


cdef inline void fetch(
    Rows *rows, const Call *c, const Block *b, const Operand *o, const char *data, const Operand *scales,
    const char *factors, Py_ssize_t atom, Py_ssize_t n, Py_ssize_t width, real *copy,
) noexcept nogil:
    """An atom's n rows as reals: read in place if they can be, else copied. A ring has them side by side, and
    so has a page, for a while."""
    cdef Py_ssize_t first = atom % c.ring if c.ring else atom, j
    cdef bint scattered = c.page and first % c.page + n > c.page
    cdef bint in_place = b.few and streamed(o, width)
    if not scattered and factors == NULL and (o.storage == REAL or not in_place):
        if c.page:
            data += b.table[first // c.page] * o.page
            first %= c.page
        ready(rows, o, data, first, n, width, copy)
    else:
        find_places(rows, c, b, o, data, scales, factors, atom, n)
        if in_place:
            rows.data = NULL
            rows.storage = o.storage
            return
        copy_rows(rows, o, n, width, copy)
    if b.few:
        rows.storage = REAL
        for j in range(n):
            rows.at[j] = <const char *>(rows.data + j * rows.row)


cdef inline bint streamed(const Operand *o, Py_ssize_t width) noexcept nogil:
    """Whether `_few` reads rows as they are: few queries are done in less time than copying takes."""
    if o.storage == REAL:
        return readable(o, width)
    return (REAL == FLOAT32 or o.storage == INT8) and loads_vectors(o.storage, o.col)


cdef inline bint readable(const Operand *o, Py_ssize_t width) noexcept nogil:
    """Whether rows can be read in place."""
    return (
        o.storage == REAL and (o.col == sizeof(real) or width == 1) and o.row % <Py_ssize_t>sizeof(real) == 0
    )


cdef inline void ready(
    Rows *rows, const Operand *o, const char *data, Py_ssize_t first, Py_ssize_t n, Py_ssize_t width,
    real *copy,
) noexcept nogil:
    """n rows from `first` on: read in place where they are reals side by side, else copied."""
    cdef Py_ssize_t j
    data += first * o.row
    if readable(o, width):
        rows.data = <const real *>data
        rows.row = o.row // <Py_ssize_t>sizeof(real)
        return
    for j in range(n):
        load_row(data + j * o.row, o.storage, o.col, width, copy + j * width)
    rows.data = copy
    rows.row = width


cdef inline void find_places(
    Rows *rows, const Call *c, const Block *b, const Operand *o, const char *data, const Operand *scales,
    const char *factors, Py_ssize_t atom, Py_ssize_t n,
) noexcept nogil:
    """Where an atom's n rows are, and their factors."""
    cdef Py_ssize_t done = 0, first = atom, run = n, page = 0, j
    if c.ring:
        first = atom % c.ring
    while done < n:
        if c.page:
            page = b.table[(atom + done) // c.page]
            first = (atom + done) % c.page
            run = min(n - done, c.page - first)
        for j in range(run):
            rows.at[done + j] = data + page * o.page + (first + j) * o.row
            rows.factor[done + j] = 1
        if factors != NULL:
            for j in range(run):
                rows.factor[done + j] = load_one(
                    factors + page * scales.page + (first + j) * scales.row, scales.storage
                )
        done += run


cdef inline void copy_rows(
    Rows *rows, const Operand *o, Py_ssize_t n, Py_ssize_t width, real *copy
) noexcept nogil:
    """Brings the n rows that lie here and there together, as reals."""
    cdef Py_ssize_t j
    for j in range(n):
        load_row(rows.at[j], o.storage, o.col, width, copy + j * width, rows.factor[j])
    rows.data = copy
    rows.row = width


cdef inline void prefetch_rows(
    const Rows *rows, Py_ssize_t first, Py_ssize_t stop, Py_ssize_t width
) noexcept nogil:
    """Asks for rows of reals ahead of time; worth a tenth where keys and values do not fit the second-level
    cache."""
    cdef Py_ssize_t j
    for j in range(first, stop):
        prefetch_lines(<const char *>(rows.data + j * rows.row), width * sizeof(real))


cdef inline bint all_finite(const Rows *rows, Py_ssize_t n, Py_ssize_t width) noexcept nogil:
    cdef vec sum = vset(0)
    cdef real lane[LANES]
    cdef real rest = 0
    cdef Py_ssize_t j, e
    cdef int r
    for j in range(n):
        e = 0
        while e + LANES <= width:
            sum = vfma(vloadu(rows.data + j * rows.row + e), vset(0), sum)
            e += LANES
        while e < width:
            rest += rows.data[j * rows.row + e] * 0
            e += 1
    vstoreu(lane, sum)
    for r in range(LANES):
        rest += lane[r]
    return rest == 0
