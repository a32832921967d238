"""Element types of arrays, from `_storage.h`."""
from fastmha._simd cimport real

cdef extern from "_storage.h" nogil:
    enum:
        BOOL
        FLOAT64
        FLOAT32
        FLOAT16
        BFLOAT16
        STORAGES
        REAL                                     # the storage that needs no conversion
    Py_ssize_t storage_bytes(int storage)
    real load_one(const char *p, int storage)    # a bool becomes 0, or -inf where false
    void store_one(char *p, real x, int storage)
