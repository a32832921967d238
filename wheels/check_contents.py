"""Checks that wheels hold what they should and nothing else: `check_contents.py PATH...`.

Every instruction set's kernels for the wheel's platform in both precisions, every Python file and
stub of the source tree, `py.typed`, the licence; no path of the machine that built it; the stable
ABI's tag, unless the wheel is for free-threaded CPython or Pyodide; less than 3 MB. A PATH is a
wheel or a folder of wheels.
"""

import re
import sys
import zipfile
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "fastmha"
LARGEST = 3_000_000
PYTHON = (".py", ".pyi")

# The last part of a platform tag: the instruction sets of its kernels.
ISAS = {
    "x86_64": ["baseline", "avx2", "avx512"],
    "amd64": ["baseline", "avx2", "avx512"],
    "aarch64": ["neon"],
    "arm64": ["neon"],
}
NAME = re.compile(r"fastmha-(?P<version>[\d.]+)-(?P<python>cp\d+)-(?P<abi>[\w.]+)-(?P<platform>[\w.]+)\.whl")


def isas(platform):
    return next((ISAS[end] for end in ISAS if platform.endswith(end)), ["baseline"])


def expected(name):
    """The names that a wheel of this file name must hold."""
    version, python, abi, platform = NAME.fullmatch(name).groups()
    modules = ["_cpu", "_team"]
    modules += [f"_kernels_{isa}_{real}" for isa in isas(platform) for real in ("f32", "f64")]
    suffix = extension_suffix(python, abi, platform)
    files = [path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py*") if path.suffix in PYTHON]
    files += ["py.typed", "_build_config.py", *(module + suffix for module in modules)]
    info = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"]
    return {f"fastmha/{file}" for file in files} | {f"fastmha-{version}.dist-info/{file}" for file in info}


def extension_suffix(python, abi, platform):
    if platform.startswith("win"):
        return ".pyd" if abi == "abi3" else f".{abi}-{platform}.pyd"
    return ".abi3.so" if abi == "abi3" else ".so"


def plain(name):
    """A file name without what a CPython of one version puts into it."""
    return re.sub(r"\.(cpython-\w+|cp\d+t?)(-[\w-]+)?\.(so|pyd)$", r".\3", name)


def mistakes(path):
    """What is wrong with a wheel, a sentence each."""
    match = NAME.fullmatch(path.name)
    if not match:
        return [f"{path.name} is no name for a wheel of fastmha"]
    found = []
    abi, platform = match["abi"], match["platform"]
    special = abi.endswith("t") or platform.startswith(("pyodide", "emscripten"))
    if not special and (match["python"], abi) != ("cp311", "abi3"):
        found.append(f"tagged {match['python']}-{abi}, expected cp311-abi3")
    if platform.startswith("linux"):
        found.append(f"tagged {platform}: it was not repaired")
    if path.stat().st_size >= LARGEST:
        found.append(f"holds {path.stat().st_size} bytes, expected fewer than {LARGEST}")
    with zipfile.ZipFile(path) as wheel:
        held = {plain(name) for name in wheel.namelist() if not name.endswith("/")}
        needed = {plain(name) for name in expected(path.name)}
        found += [f"lacks {name}" for name in sorted(needed - held)]
        # auditwheel leaves a list of what it bundled: nothing.
        extra = {name for name in held - needed if ".dist-info/sboms/" not in name}
        found += [f"holds {name}" for name in sorted(extra)]
        home = str(Path.home()).encode()
        for name in wheel.namelist():
            if home in wheel.read(name):
                found.append(f"{name} names a folder of the machine that built it")
    return found


def main(paths):
    wheels = []
    for path in map(Path, paths):
        wheels += sorted(path.glob("*.whl")) if path.is_dir() else [path]
    if not wheels:
        sys.exit("check_contents.py: no wheels")
    failed = False
    for path in wheels:
        found = mistakes(path)
        failed |= bool(found)
        print(f"{path.name}: {path.stat().st_size:,} bytes, {'wrong' if found else 'as it should be'}")
        for mistake in found:
            print(f"  {mistake}")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
