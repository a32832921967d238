"""Prints the build record of an installed fastmha and checks one result. Needs NumPy alone."""

import platform
import sys

import numpy as np

import fastmha


def main():
    print(sys.version, platform.machine(), "NumPy", np.__version__)
    fastmha.show_config()
    # Two keys with equal scores, then the second one alone: their mean, and its value.
    q, k = np.zeros((1, 1, 2, 3), np.float32), np.zeros((1, 1, 2, 3), np.float32)
    v = np.array([1, 3], np.float32).reshape(1, 1, 2, 1)
    mask = np.array([[True, True], [False, True]])
    for dtype in (np.float64, np.float32, np.float16):
        out = fastmha.scaled_dot_product_attention(*(x.astype(dtype) for x in (q, k, v)), mask)
        if out.dtype != dtype or out.ravel().tolist() != [2, 3]:
            sys.exit(f"smoke.py: expected [2, 3] of {np.dtype(dtype)}, got {out.ravel()} of {out.dtype}")
    print(f"fastmha {fastmha.__version__} works: {', '.join(fastmha.show_config('dicts')['isas'])}")


if __name__ == "__main__":
    main()
