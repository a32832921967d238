"""How many threads the kernels use: at the start, and as the user sets it."""

import contextlib
import operator
import os

from . import _team


def set_num_threads(n):
    """Set how many threads a call may use, in the whole process.

    Results are the same bits for every number of threads.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    TypeError
        If `n` is not an integer.
    ValueError
        If `n` is less than 1.

    Examples
    --------
    >>> import fastmha
    >>> before = fastmha.get_num_threads()
    >>> fastmha.set_num_threads(1)
    >>> fastmha.get_num_threads()
    1
    >>> fastmha.set_num_threads(before)
    """
    if isinstance(n, bool):
        raise TypeError("n: expected an integer of at least 1, got a bool")
    try:
        count = operator.index(n)
    except TypeError:
        raise TypeError(f"n: expected an integer of at least 1, got {type(n).__name__}") from None
    if count < 1:
        raise ValueError(f"n: expected an integer of at least 1, got {count}")
    _team.set_limit(min(count, 1024))


def get_num_threads():
    """Return how many threads a call may use.

    At the start this is ``FASTMHA_NUM_THREADS``, else ``OMP_NUM_THREADS``, else what the process's
    affinity and its container's quota allow.

    Returns
    -------
    int

    Examples
    --------
    >>> import fastmha
    >>> fastmha.get_num_threads() >= 1
    True
    """
    return _team.get_limit()


@contextlib.contextmanager
def num_threads(n):
    """Set the number of threads for the length of a ``with`` block, in the whole process.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    TypeError, ValueError
        As `set_num_threads`.

    Examples
    --------
    >>> import fastmha
    >>> with fastmha.num_threads(1):
    ...     fastmha.get_num_threads()
    1
    """
    before = get_num_threads()
    set_num_threads(n)
    try:
        yield
    finally:
        set_num_threads(before)


def default_num_threads():
    """The number to start with; see `get_num_threads`."""
    for variable in ("FASTMHA_NUM_THREADS", "OMP_NUM_THREADS"):
        # OMP_NUM_THREADS may list a number for each level of nesting.
        first = os.environ.get(variable, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return min(_usable_cpus(), _quota_cpus() or 1024)


def _usable_cpus():
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS and Windows
        return os.cpu_count() or 1


def _quota_cpus(root="/sys/fs/cgroup", cgroups="/proc/self/cgroup"):
    """The CPU quota of the process's control groups in whole CPUs, rounded up; None without one.

    A group's ancestors bind it too. Inside a container the path that /proc tells may not exist below
    the mount: there, the mount's root is the container's own group.
    """
    quotas = []
    for line in _read(cgroups).splitlines():
        _, colon, rest = line.partition(":")
        controllers, another, path = rest.partition(":")
        if not (colon and another):
            continue
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in [root] if not controllers else [f"{root}/{controllers}", f"{root}/cpu"]:
            parts = path.strip("/").split("/") if path.strip("/") else []
            for depth in range(len(parts), -1, -1):
                quotas.append(_quota("/".join([mount, *parts[:depth]])))
    return min((q for q in quotas if q), default=None)


def _quota(group):
    quota, _, period = _read(f"{group}/cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(f"{group}/cpu.cfs_quota_us").strip()
        period = _read(f"{group}/cpu.cfs_period_us").strip()
    if quota.isdecimal() and period.isdecimal() and int(period):
        return max(1, -(-int(quota) // int(period)))
    return None  # "max", -1, or no such file


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


_team.set_limit(min(default_num_threads(), 1024))
