"""Which weights dropout keeps: a pure function of (seed, batch member, head, query, key).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), counter (key // 4,
query position, head, member) and key (seed's low word, its high word): the four words of a result
decide over four neighbouring keys. Queries lie across lanes here too.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastmha._simd cimport (
    LANES, bit_vec, bits, inlined, real, vec, vkeep, vload, vset, vstore, vword, vword_product,
)


cdef struct Dropout:
    uint64_t threshold                  # a word of at least this keeps a weight; 0: no dropout
    real factor                         # of the weights that are kept
    uint32_t seed_low, seed_high


cdef inline void philox(bit_vec *x, uint32_t key_low, uint32_t key_high) noexcept nogil:
    """Ten rounds on the four words x of each lane."""
    cdef bit_vec high0, low0, high1, low1
    cdef int _turn
    for _turn in range(10):
        vword_product(x[0], 0xD2511F53, &high0, &low0)
        vword_product(x[2], 0xCD9E8D57, &high1, &low1)
        x[0] = high1 ^ x[1] ^ vword(key_low)
        x[1] = low1
        x[2] = high0 ^ x[3] ^ vword(key_high)
        x[3] = low0
        key_low += <uint32_t>0x9E3779B9
        key_high += <uint32_t>0xBB67AE85


cdef inline inlined drop_weights(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const Dropout *d, Py_ssize_t atom,
    const bit_vec *positions, const bit_vec *heads, Py_ssize_t member,
) noexcept nogil:
    """Multiplies the weights that are kept by the factor, and the others by 0."""
    cdef bit_vec words[4]
    cdef real *place
    cdef Py_ssize_t group, j, first, end
    cdef int v
    for group in range(low // 4, (high + 3) // 4):
        first, end = max(low, group * 4), min(high, group * 4 + 4)
        for v in range(V):
            words[0] = vword(<uint32_t>(atom // 4 + group))
            words[1] = positions[v]
            words[2] = heads[v]
            words[3] = vword(<uint32_t>member)
            philox(words, d.seed_low, d.seed_high)
            for j in range(first, end):
                place = tile + (j * V + v) * LANES
                if d.threshold >> 32:
                    vstore(place, vset(0))
                else:
                    vstore(place, vkeep(words[j % 4], <uint32_t>d.threshold, vload(place) * vset(d.factor)))
