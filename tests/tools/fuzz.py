"""Fuzzes the functions: random arguments, right and wrong, for a number of calls.

Whatever the arguments, a call must return an array of the right shape and dtype or raise TypeError,
ValueError or MemoryError; any other exception, a crash or a wrong shape is a finding, and the seed
that made it is printed. Inputs lie at the very end of a page whose successor may not be read, so a
read beyond an array ends the process even without a sanitizer.

    python tests/tools/fuzz.py --calls 1000000
    python tests/tools/fuzz.py --seed 20171 --calls 1       # that call again
"""

import argparse
import ctypes
import faulthandler
import mmap
import random
import sys
import time

import numpy as np

import fastmha

ALLOWED = (TypeError, ValueError, MemoryError)
FLOATS = ("float64", "float32", "float16")
OTHERS = ("int64", "bool", "complex128", "uint8", "S3", "O", ">f4", "longdouble")
PAGE = mmap.PAGESIZE


class GuardedPages:
    """Memory that ends where nothing may be read: `place` copies an array to its end."""

    def __init__(self, pages=256):
        self.size = pages * PAGE
        self.map = mmap.mmap(-1, self.size + PAGE)
        self.bytes = np.frombuffer(self.map, np.uint8)
        address = self.bytes.ctypes.data
        if sys.platform.startswith(("linux", "darwin")):
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mprotect(ctypes.c_void_p(address + self.size), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, x, used):
        """A copy of x that ends `used` bytes before the forbidden page; None if it has no room."""
        end = self.size - used
        start = end - x.nbytes
        if start < 0 or x.dtype.hasobject:
            return None
        copy = self.bytes[start:end].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy


class Call:
    """One random call, made from a seed alone."""

    def __init__(self, seed, pools):
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.pools = list(pools)
        self.random.shuffle(self.pools)

    def rarely(self, chance=0.03):
        return self.random.random() < chance

    def size(self):
        if self.rarely(0.02):
            return self.random.choice([130, 257, 400])
        return self.random.choice([0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 48, 65, 97])

    def array(self, shape, dtype):
        if self.rarely(0.01):
            dtype = self.random.choice(OTHERS)
        if self.rarely(0.01):
            shape = shape[1:] if self.rarely(0.5) else (*shape, 2)
        if self.rarely(0.02):
            shape = tuple(n + self.rarely(0.3) for n in shape)
        x = self.numpy.integers(-8, 8, shape).astype(np.float64)
        if self.rarely(0.1) and x.size:
            x.flat[self.random.randrange(x.size)] = self.random.choice([np.nan, np.inf, -np.inf, 1e30])
        with np.errstate(all="ignore"):
            x = x.astype(dtype)
        kind = self.random.randrange(12)
        if kind < 6 and self.pools:
            x = next((c for c in [self.pools.pop().place(x, 0)] if c is not None), x)
        elif kind == 6:
            x = np.asfortranarray(x)
        elif kind == 7 and x.ndim:
            x = x[..., ::-1]
        elif kind == 8 and x.ndim:
            x = np.repeat(x, 2, axis=-1)[..., ::2]
        elif kind == 9:
            x.flags.writeable = False
        elif kind == 10 and x.ndim and x.shape[0] == 1:
            x = np.broadcast_to(x[0], x.shape)
        elif kind == 11 and self.rarely(0.3):
            x = x.tolist()
        return x

    def scalar(self):
        return self.random.choice(
            [
                0,
                1,
                -1,
                0.5,
                2.0,
                1e300,
                -0.0,
                np.float32(0.25),
                np.nan,
                np.inf,
                None,
                "x",
                True,
                2**70,
            ]
        )

    def integers(self, n, top):
        values = self.numpy.integers(-1 if self.rarely(0.1) else 0, max(top, 1) + 1, max(n, 0))
        if self.rarely(0.05):
            values = values * 2**40
        return values.astype(self.random.choice(["int64", "int32", "uint8", "float64"]))

    def options(self, B, H, L, S):
        """Keyword arguments of `attention`, each with a small chance."""
        chosen = {}
        if self.rarely(0.4):
            chosen["causal"] = self.random.choice([True, False, "top-left", "bottom-right", "left", 2, None])
        if self.rarely(0.2):
            sides = [-1, 0, 1, 2, 5, 10**9, 2**63, -2, 1.5]
            chosen["window"] = tuple(self.random.choice(sides[: self.random.choice([6, 9])]) for _ in "lr")
        if self.rarely(0.2):
            chosen["scale"] = self.scalar()
        if self.rarely(0.2):
            chosen["softcap"] = self.scalar()
        if self.rarely(0.3):
            shapes = [(S,), (L, S), (B, 1, 1, S), (1, H, L, S), (B, H, L, S), (L, 1), (), (3, L, S)]
            chosen["mask"] = self.array(
                self.random.choice(shapes), self.random.choice(["bool", "bool", *FLOATS])
            )
        if self.rarely(0.1):
            chosen["alibi_slopes"] = self.array((H,), "float64")
        if self.rarely(0.1):
            chosen["sinks"] = self.array((H,), "float32")
        if self.rarely(0.1):
            chosen["key_lengths"] = self.integers(B + self.rarely(), S + self.rarely())
        if self.rarely(0.1):
            chosen["query_lengths"] = self.integers(B + self.rarely(), L + self.rarely())
        if self.rarely(0.1):
            chosen["dropout_p"] = self.random.choice([0.0, 0.25, 1.0, 1, 1.5, -1, np.nan, "x"])
            chosen["rng"] = self.random.choice([0, 2**64 - 1, 2**64, -1, 1.0, np.random.default_rng(0)])
        return chosen

    def problem(self):
        B, G = self.random.choice([1, 1, 2, 3, 0]), self.random.choice([1, 2, 3, 0])
        H = G * self.random.choice([1, 1, 2, 4]) + self.rarely(0.02)
        L, S, D, E = (self.size() for _ in "LSDE")
        dtype = self.random.choice(FLOATS)
        return (B, H, L, S, E), [
            self.array((B, H, L, D), dtype),
            self.array((B, G, S, D), dtype),
            self.array((B, G, S, E), dtype),
        ]

    def attention(self):
        (B, H, L, S, E), arrays = self.problem()
        options = self.options(B, H, L, S)
        if self.rarely(0.1):
            options["layout"] = self.random.choice(["BHLD", "BLHD", "bhld", 0])
        if self.rarely(0.05):
            options["out"] = self.array((B, H, L, E), "float32")
        options["return_lse"] = self.rarely(0.3)
        out = fastmha.attention(*arrays, **options)
        out = out[0] if options["return_lse"] else out
        if (
            type(out) is not np.ndarray
            or out.dtype != np.asarray(arrays[0]).dtype.newbyteorder("=")
            or out.ndim != 4
        ):
            raise AssertionError(f"returned {type(out)} {out.dtype} {out.shape}")

    def torch(self):
        (B, H, L, S, _), arrays = self.problem()
        mask = self.options(B, H, L, S).get("mask")
        fastmha.scaled_dot_product_attention(
            *arrays,
            attn_mask=mask,
            is_causal=self.rarely(0.3),
            scale=self.scalar() if self.rarely(0.1) else None,
            enable_gqa=self.rarely(0.7),
        )

    def weights(self):
        (B, H, L, S, _), arrays = self.problem()
        choices = [None, 0, -1, 5, [0], [0, 0], slice(None), slice(1, 3), [99], "x", 1.5, []]
        fastmha.attention_weights(
            *arrays[:2],
            heads=self.random.choice(choices),
            rows=self.random.choice(choices),
            **self.options(B, H, L, S),
        )

    def softmax(self):
        x = self.array(tuple(self.size() for _ in range(self.random.randrange(4))), "float32")
        fastmha.softmax(x, axis=self.random.choice([-1, 0, 1, 2, -3, 9, None, 1.0]))

    def merge(self):
        shape = (2, self.size(), 3)
        n = self.random.randrange(4)
        outs = [self.array(shape, "float32") for _ in range(n)]
        lses = [self.array(shape[:-1], "float32") for _ in range(n + self.rarely())]
        fastmha.merge_attention(outs, lses)

    def backward(self):
        (B, H, L, S, _), arrays = self.problem()
        options = self.options(B, H, L, S)
        out, lse = fastmha.attention(*arrays, return_lse=True, **options)
        grad = self.array(out.shape, out.dtype)
        flags = {"grad_mask": self.rarely(0.2), "grad_sinks": self.rarely(0.2)}
        fastmha.attention_backward(grad, *arrays, out, lse, **flags, **options)

    def varlen(self):
        (B, H, L, S, _), _ = self.problem()
        D, dtype = self.size(), self.random.choice(FLOATS)
        options = self.options(B, H, L, S)
        for name in ("mask", "key_lengths", "query_lengths"):
            options.pop(name, None)
        offsets = [np.concatenate([[0], np.sort(self.integers(B, n))]) for n in (L, S)]
        fastmha.attention_varlen(
            self.array((L, H, D), dtype),
            self.array((S, H, D), dtype),
            self.array((S, H, D), dtype),
            *(x.astype(self.random.choice(["int32", "int64", "float32"])) for x in offsets),
            **options,
        )

    def cache(self):
        D = self.size()
        cache = fastmha.KVCache(
            self.random.choice([1, 2, 0, -1]),
            2,
            D,
            capacity=self.random.choice([None, 0, 5, 64, -1]),
            window=self.random.choice([None, None, 0, 3, -2]),
            dtype=self.random.choice(["float32", "float16", "int8", "int32"]),
        )
        for _ in range(3):
            n = self.random.choice([0, 1, 2, 7])
            k, v = (self.array((2, 2, n, D), "float32") for _ in "kv")
            lengths = self.integers(2, n) if self.rarely(0.2) else None
            cache.append(k, v, lengths)
            cache.attend(self.array((2, 4, self.random.choice([n, 1]), D), "float32"))
            if self.rarely(0.2):
                cache.truncate(self.random.choice([0, 1, 3, -1, [0, 1], 99]))


CALLS = {
    # what it needs of the package: the calls, and how many times as often
    "attention": [Call.attention] * 4,
    "scaled_dot_product_attention": [Call.torch] * 2,
    "attention_weights": [Call.weights],
    "softmax": [Call.softmax],
    "merge_attention": [Call.merge],
    "attention_backward": [Call.backward] * 2,
    "attention_varlen": [Call.varlen],
    "KVCache": [Call.cache],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the next has one more")
    parser.add_argument("--timeout", type=int, default=60, help="seconds in which 1000 calls must end")
    parser.add_argument("--keep-going", action="store_true", help="list what is found at the end")
    arguments = parser.parse_args()
    kinds = [c for name, calls in CALLS.items() if hasattr(fastmha, name) for c in calls]
    pools = [GuardedPages() for _ in range(6)]
    faulthandler.enable()
    returned, found, started = 0, {}, time.monotonic()
    for n in range(arguments.calls):
        seed = arguments.seed + n
        if n % 1000 == 0:
            faulthandler.dump_traceback_later(arguments.timeout, exit=True)
            if n % 100_000 == 0 and n:
                rate = n / (time.monotonic() - started)
                print(f"{n} calls, {returned} returned, {rate:.0f} a second", flush=True)
        call = Call(seed, pools)
        kind = call.random.choice(kinds)
        try:
            with np.errstate(all="ignore"):
                kind(call)
            returned += 1
        except ALLOWED:
            pass
        except Exception as error:
            if not arguments.keep_going:
                print(f"seed {seed}: {kind.__name__}", flush=True)
                raise
            found.setdefault(f"{kind.__name__}: {type(error).__name__}: {error}"[:60], seed)
    faulthandler.cancel_dump_traceback_later()
    for text, seed in found.items():
        print(f"seed {seed}: {text}")
    print(f"{arguments.calls} calls, {returned} returned, {len(found)} findings")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
