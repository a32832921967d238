"""Threads: how many, from where, and that callers, forks and Ctrl-C get along with them."""

import concurrent.futures
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from comparing import assert_same_bits
from drawing import WIDTHS, seeded_calls

import fastmha
from fastmha import _threads

# --- how many -------------------------------------------------------------------------------------


def test_set_and_get():
    for n in (1, 2, 7, np.int64(3), np.uint8(5), True + 1):
        fastmha.set_num_threads(n)
        assert fastmha.get_num_threads() == n
        assert type(fastmha.get_num_threads()) is int


def test_a_very_large_number_is_bounded():
    fastmha.set_num_threads(10**30)
    assert 1 <= fastmha.get_num_threads() <= 10**4


@pytest.mark.parametrize("n", [0, -1, -(10**30)])
def test_less_than_one_is_refused(n):
    before = fastmha.get_num_threads()
    for call in (fastmha.set_num_threads, lambda n: fastmha.num_threads(n).__enter__()):
        with pytest.raises(ValueError, match=rf"^n: expected an integer of at least 1, got {n}"):
            call(n)
    assert fastmha.get_num_threads() == before


@pytest.mark.parametrize("n", [1.0, "2", None, True, np.True_, [1], np.ones(2, int)], ids=repr)
def test_only_integers_count(n):
    before = fastmha.get_num_threads()
    with pytest.raises(TypeError, match=r"^n: expected an integer of at least 1, got"):
        fastmha.set_num_threads(n)
    assert fastmha.get_num_threads() == before


def test_the_context_manager_restores():
    fastmha.set_num_threads(2)
    with fastmha.num_threads(5):
        assert fastmha.get_num_threads() == 5
        with fastmha.num_threads(1):
            assert fastmha.get_num_threads() == 1
        assert fastmha.get_num_threads() == 5
    assert fastmha.get_num_threads() == 2
    with pytest.raises(KeyError), fastmha.num_threads(3):
        raise KeyError
    assert fastmha.get_num_threads() == 2


# --- from where -----------------------------------------------------------------------------------

START = "import fastmha; print(fastmha.get_num_threads())"
UNSET = {"FASTMHA_NUM_THREADS": None, "OMP_NUM_THREADS": None}


def at_start(run_python, code=START, **environment):
    done = run_python(code, **UNSET | environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_environment_variables(run_python):
    assert at_start(run_python, FASTMHA_NUM_THREADS="3") == 3
    assert at_start(run_python, OMP_NUM_THREADS="5") == 5
    assert at_start(run_python, OMP_NUM_THREADS="4,2,1") == 4
    assert at_start(run_python, FASTMHA_NUM_THREADS="3", OMP_NUM_THREADS="5") == 3
    assert at_start(run_python, FASTMHA_NUM_THREADS=" 6 ", OMP_NUM_THREADS="5") == 6


def test_environment_variables_that_say_nothing(run_python):
    usual = at_start(run_python)
    assert usual >= 1
    for nonsense in ("", "0", "-2", "many", "1.5"):
        environment = {"FASTMHA_NUM_THREADS": nonsense, "OMP_NUM_THREADS": "3"}
        assert at_start(run_python, **environment) == 3
    assert at_start(run_python, FASTMHA_NUM_THREADS="0", OMP_NUM_THREADS="none") == usual


def test_the_environment_is_read_once(run_python):
    code = "import os, fastmha; os.environ['FASTMHA_NUM_THREADS'] = '9'; " + START
    assert at_start(run_python, code, FASTMHA_NUM_THREADS="2") == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_affinity(run_python):
    first = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{first}]); " + START
    assert at_start(run_python, code) == 1
    assert at_start(run_python, code, OMP_NUM_THREADS="4") == 4  # what the user says counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="shows no threads' affinity")
def test_threads_that_were_woken_may_run_anywhere(run_python, patience):
    """A sleeper is kept off its caller's processor, but only until it is up."""
    code = f"""
import os, time
import numpy as np, fastmha

allowed = os.sched_getaffinity(0)
fastmha.set_num_threads(3)
q = np.ones((1, 8, 256, 32), np.float32)
for _ in range(20):
    fastmha.attention(q, q, q)
    time.sleep(0.005)  # they fall asleep
threads = [int(t) for t in os.listdir("/proc/self/task")]
assert len(threads) >= 3
end = time.monotonic() + {5 * patience}
while not all(os.sched_getaffinity(t) == allowed for t in threads):
    assert time.monotonic() < end
    time.sleep(0.01)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_default_is_what_affinity_and_quota_allow(monkeypatch):
    for variable in UNSET:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(_threads, "_usable_cpus", lambda: 8)
    for quota, expected in ((None, 8), (1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr(_threads, "_quota_cpus", lambda quota=quota: quota)
        assert _threads.default_num_threads() == expected


def test_usable_cpus(monkeypatch):
    assert 1 <= _threads._usable_cpus() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5, 9}, raising=False)
    assert _threads._usable_cpus() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert _threads._usable_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert _threads._usable_cpus() == 1


@pytest.fixture
def quota(tmp_path):
    """quota(groups, files): what `_quota_cpus` finds in a tree of control groups made for it."""

    def find(groups, **files):
        root = tmp_path / "cgroup"
        for path, text in files.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        listing = tmp_path / "listing"
        listing.write_text(groups)
        return _threads._quota_cpus(str(root), str(listing))

    return find


V1 = "12:pids:/a\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/b\n"


def v1(group, quota):
    """The files of a group of version 1."""
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        # version 2
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "100000 50000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "cpu.max": "200000 100000\n"}, 1),
        # a container sees its own group at the mount's root, whatever path it is told
        ("0::/docker/abc\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/../other\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2),
        # version 1
        (V1, v1("cpu/docker/abc", 250000), 3),
        (V1, v1("cpu,cpuacct/docker/abc", 250000), 3),
        (V1, v1("cpu/docker/abc", 250000) | v1("cpu/docker", 100000), 1),
        (V1, v1("cpu", 100000), 1),
        (V1, v1("cpu/docker/abc", -1), None),
        (V1, v1("pids/a", 100000), None),
        # both, as on systems halfway between
        (V1 + "0::/x\n", {"x/cpu.max": "max 100000\n"} | v1("cpu", 200000), 2),
        # not what they should be
        ("0::/\n", {"cpu.max": ""}, None),
        ("0::/\n", {"cpu.max": "100000"}, None),
        ("0::/\n", {"cpu.max": "100000 0\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense 100000\n"}, None),
        ("0::/\n", {"cpu.max": "0 100000\n"}, 1),
        ("", {"cpu.max": "100000 100000\n"}, None),
        ("nonsense\n", {"cpu.max": "100000 100000\n"}, None),
        ("\n", {"cpu.max": "100000 100000\n"}, None),
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.platform == "win32", reason="file names there have no colons")
def test_quota(quota, groups, files, expected):
    assert quota(groups, **files) == expected


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert _threads._quota_cpus(str(tmp_path), str(tmp_path / "none")) is None


# --- callers --------------------------------------------------------------------------------------


def test_eight_workers_at_once_get_the_bits_of_a_serial_run():
    calls = list(seeded_calls(120, seed=3, widths=WIDTHS[:12]))
    expected = [fastmha.attention(*call[:3], **call.options) for call in calls]
    order = np.random.default_rng(0).integers(0, len(calls), 2000)

    def work(i):
        return i, fastmha.attention(*calls[i][:3], **calls[i].options)

    fastmha.set_num_threads(3)
    with concurrent.futures.ThreadPoolExecutor(8) as workers:
        for i, out in workers.map(work, order.tolist()):
            assert_same_bits(out, expected[i])


def test_many_callers_of_large_calls():
    call = next(seeded_calls(1, options=("causal",), dtypes=["float32"], lengths=[193], widths=[64]))
    expected = fastmha.attention(*call[:3], **call.options)
    fastmha.set_num_threads(4)
    with concurrent.futures.ThreadPoolExecutor(8) as workers:
        for out in workers.map(lambda _: fastmha.attention(*call[:3], **call.options), range(200)):
            assert_same_bits(out, expected)


def test_the_number_may_change_while_calls_run():
    call = next(seeded_calls(1, options=(), dtypes=["float32"], lengths=[193], widths=[64]))
    expected = fastmha.attention(*call[:3])
    stop = threading.Event()

    def change():
        n = 0
        while not stop.is_set():
            n = n % 6 + 1
            fastmha.set_num_threads(n)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(200):
            assert_same_bits(fastmha.attention(*call[:3]), expected)
    finally:
        stop.set()
        changer.join()


def test_calls_from_another_thread_than_the_main_one():
    x = np.ones((1, 4, 200, 32), np.float32)
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        out = worker.submit(fastmha.attention, x, x, x).result(60)
    assert_same_bits(out, fastmha.attention(x, x, x))


def test_a_call_from_within_a_call():
    """`trace` is called between the steps, and may call the library itself."""
    x, seen = np.ones((3, 4), np.float32), []
    W = np.eye(4, dtype=np.float32)
    fastmha.multi_head_attention(x, W, W, W, W, 2, trace=lambda *_: seen.append(fastmha.sdpa(x, x, x)))
    assert len(seen) == 6


@pytest.mark.parametrize("n", [1, 2])
def test_other_python_threads_run_meanwhile(n):
    q = np.ones((1, 8, 4096, 64), np.float32)
    fastmha.set_num_threads(n)
    ticks, stop, started = [], threading.Event(), threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            started.set()
            time.sleep(0.002)

    ticker = threading.Thread(target=tick)
    ticker.start()
    started.wait(10)
    begin = time.perf_counter()
    fastmha.attention(q, q, q)
    end = time.perf_counter()
    stop.set()
    ticker.join()
    assert end - begin > 0.1
    # A call that holds on to the interpreter would let it go a few times a second.
    assert sum(begin < t < end for t in ticks) > 40 * (end - begin)


# --- processes ------------------------------------------------------------------------------------

POOL = """
import concurrent.futures, multiprocessing, sys, warnings
import numpy as np, fastmha

warnings.simplefilter("ignore")  # of forking with threads: that it works is the point
x = np.random.default_rng(0).standard_normal((2, 4, 300, 32)).astype(np.float32)

def work(i):
    fastmha.set_num_threads(i % 3 + 1)
    return fastmha.attention(x, x, x, causal=True).tobytes()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    fastmha.set_num_threads(3)
    expected = fastmha.attention(x, x, x, causal=True).tobytes()  # the team has started
    patience = float(sys.argv[2])
    with context.Pool(2) as pool:
        results = pool.map_async(work, range(8)).get(30 * patience)
    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        results += pool.map(work, range(8), timeout=30 * patience)
    assert results == [expected] * 16
    assert fastmha.attention(x, x, x, causal=True).tobytes() == expected
    print("well")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes(run_python, patience, tmp_path, method):
    if sys.platform == "win32" and method != "spawn":
        pytest.skip("Windows can only spawn")
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    # As a script of its own: new workers import it by its path.
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
    done = run_python(code, script, method, patience)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "well"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("n", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_fork_while_other_threads_compute(run_python, n):
    code = """
import os, sys, threading, warnings
import numpy as np, fastmha
warnings.simplefilter("ignore")
x = np.ones((2, 4, 300, 32), np.float32)
fastmha.set_num_threads(3)
expected = fastmha.attention(x, x, x).tobytes()
stop = threading.Event()
def work():
    while not stop.is_set():
        fastmha.attention(x, x, x)
workers = [threading.Thread(target=work) for _ in range(3)]
[worker.start() for worker in workers]
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if not child:
        os._exit(0 if fastmha.attention(x, x, x).tobytes() == expected else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
[worker.join() for worker in workers]
print("well")
"""
    done = run_python(code, n, timeout=120)
    assert done.stdout.strip() == "well", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
def test_a_forked_child_has_a_team_of_its_own(run_python):
    code = """
import os, warnings
import numpy as np, fastmha
warnings.simplefilter("ignore")
def threads():
    return len(os.listdir("/proc/self/task"))
x = np.ones((2, 4, 300, 32), np.float32)
before = threads()
fastmha.set_num_threads(3)
fastmha.attention(x, x, x)
assert threads() == before + 2
child = os.fork()
if not child:
    before = threads()
    fastmha.attention(x, x, x)
    os._exit(threads() - before)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_python(code)
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_forked_within_a_call_has_its_result_or_an_error(run_python):
    """By a signal handler: what helpers work on at that moment stays with the parent."""
    code = """
import os, signal, time, warnings
import numpy as np, fastmha
warnings.simplefilter("ignore")
fastmha.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((1, 8, 6000, 64)).astype(np.float32)
expected = fastmha.attention(x, x, x)
forked = []
signal.signal(signal.SIGALRM, lambda *_: forked.append(os.fork()))
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    found = fastmha.attention(x, x, x)
except RuntimeError as error:
    assert "forked" in str(error)
    found = None
while not forked:  # where the call was faster than the timer
    time.sleep(0.01)
right = np.array_equal(found, expected)
if not forked[0]:
    row = fastmha.attention(x[:, :, -1:], x, x)  # with a team of the child's own
    right |= found is None
    os._exit(0 if right and np.array_equal(row, expected[:, :, -1:]) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 0
assert right
print("well")
"""
    done = run_python(code)
    assert done.stdout.strip() == "well", done.stderr


INTERRUPTED = """
import signal, sys
import numpy as np, fastmha
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what shells run behind them
n, kind = int(sys.argv[1]), sys.argv[2]
fastmha.set_num_threads(n)
small = np.ones((1, 2, 70, 8), np.float32)
expected = fastmha.attention(small, small, small)
row = np.ones((1, 1, 1, 64), np.float32)
if kind == "attention":
    q = k = np.broadcast_to(row, (1, 64, 20_000, 64))
else:
    q, k = np.broadcast_to(row, (1, 1, 64, 64)), np.broadcast_to(row, (1, 1, 1 << 28, 64))
print("started", flush=True)
try:
    fastmha.attention(q, k, k)
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert np.array_equal(fastmha.attention(small, small, small), expected)
print("usable", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("kind", ["attention", "one block"])
@pytest.mark.parametrize("n", [1, 3])
def test_ctrl_c_ends_a_long_call(start_python, patience, n, kind):
    process = start_python(INTERRUPTED, n, kind)
    try:
        assert process.stdout.readline() == "started\n", process.stderr.read()
        time.sleep(0.3)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=5 * patience)
        assert out.split() == ["interrupted", "usable"], err
        assert time.monotonic() - sent < 5 * patience
    finally:
        process.kill()
        process.communicate()


def test_two_functions_are_exported_for_threadpoolctl():
    import ctypes

    from fastmha import _team

    library = ctypes.CDLL(_team.__file__)
    fastmha.set_num_threads(3)
    assert library.fastmha_get_num_threads() == 3
    library.fastmha_set_num_threads(2)
    assert fastmha.get_num_threads() == 2
