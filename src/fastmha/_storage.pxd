"""Element types of arrays, from `_storage.h`."""
from fastmha._simd cimport real, vec

cdef extern from "_storage.h" nogil:
    enum:
        BOOL
        FLOAT64
        FLOAT32
        FLOAT16
        BFLOAT16
        INT8                                     # times a scale that lies elsewhere
        STORAGES
        REAL                                     # the storage that needs no conversion
    Py_ssize_t storage_bytes(int storage)
    real from_double(double x)                   # saturates: only an infinity is one
    real load_one(const char *p, int storage)    # a bool becomes 0, or -inf where false
    void store_one(char *p, real x, int storage)
    bint loads_vectors(int storage, Py_ssize_t step)       # whether there is, for elements `step` bytes apart
    vec vload_from(const char *p, int storage)
    bint stores_vectors(int storage, Py_ssize_t step)
    void vstore_to(char *p, vec x, int storage)
