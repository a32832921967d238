"""Which build of the kernels runs here: the one place that knows there are several."""

import json
import os

import numpy as np

from . import _build_config, _cpu
from ._dtypes import DOUBLE
from ._threads import get_num_threads

# How many steps beyond the baseline a processor must have gone for a build to run.
_LEVEL = {"baseline": 0, "neon": 0, "avx2": 1, "avx512": 2}

isas = [isa for isa in _build_config.ISAS if _LEVEL[isa] <= _cpu.level()]


def _choose():
    forced = os.environ.get("FASTMHA_ISA")
    if forced and forced not in isas:
        raise ImportError(
            f"FASTMHA_ISA: expected one of {', '.join(isas)}, which this build has and this machine "
            f"runs, got {forced!r}"
        )
    if not isas:
        raise ImportError(
            f"fastmha was built for {', '.join(_build_config.ISAS)}, none of which this machine runs"
        )
    return forced or isas[-1]


isa = _choose()
# Written out, since what packs programs into one file (PyInstaller) looks for import statements.
if isa == "baseline":
    from . import _kernels_baseline_f32 as single
    from . import _kernels_baseline_f64 as double
elif isa == "avx2":
    from . import _kernels_avx2_f32 as single
    from . import _kernels_avx2_f64 as double
elif isa == "avx512":
    from . import _kernels_avx512_f32 as single
    from . import _kernels_avx512_f64 as double
else:
    from . import _kernels_neon_f32 as single
    from . import _kernels_neon_f64 as double


def kernels(dtype):
    """The kernels for arrays of a dtype: double precision for float64, single for all others."""
    return double if dtype == DOUBLE else single


def show_config(mode="stdout"):
    """Show how this fastmha was built and what it runs on.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        Whether to print the record or to return it.

    Returns
    -------
    dict or None
        With ``mode="dicts"``: ``version``; ``isa``, the instruction set in use; ``isas``, those
        built and runnable here, plainest first; ``num_threads``; ``vector_bytes``; ``fused``,
        whether products and sums are rounded once, as in all builds that agree bit for bit;
        ``numpy``, ``compiler``, ``cython``, ``host`` and ``c_args``.

    Raises
    ------
    ValueError
        For any other mode.

    Examples
    --------
    >>> import fastmha
    >>> config = fastmha.show_config(mode="dicts")
    >>> config["isa"] in config["isas"]
    True
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"mode: expected 'stdout' or 'dicts', got {mode!r}")
    record = {
        "version": _build_config.VERSION,
        "isa": isa,
        "isas": list(isas),
        "num_threads": get_num_threads(),
        "vector_bytes": single.vector_bytes,
        "fused": single.fused,
        "numpy": np.__version__,
        "compiler": _build_config.COMPILER,
        "cython": _build_config.CYTHON,
        "host": _build_config.HOST,
        "c_args": _build_config.C_ARGS,
    }
    if mode == "dicts":
        return record
    print(json.dumps(record, indent=2))
    return None
