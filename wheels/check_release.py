"""Checks that a folder holds every file of a release: `check_release.py FOLDER`.

The list is written out, so that a platform that drops out of a build matrix does not go missing
unnoticed. Pyodide's wheel is not uploaded, and may be there.
"""

import re
import sys
from pathlib import Path

STABLE = [
    *(f"manylinux.*_{arch}" for arch in ("x86_64", "aarch64", "i686", "armv7l")),
    *(f"musllinux.*_{arch}" for arch in ("x86_64", "aarch64", "i686", "armv7l")),
    *(f"macosx_.*_{arch}" for arch in ("x86_64", "arm64")),
    *("win_amd64", "win_arm64", "win32"),
]
# NumPy has no 32-bit wheels for Linux, and CPython no stable ABI without its global lock.
FREE_THREADED = [platform for platform in STABLE if not re.search("i686|armv7l", platform)]

EXPECTED = [
    r"fastmha-[\d.]+\.tar\.gz",
    *(rf"fastmha-[\d.]+-cp311-abi3-{platform}\.whl" for platform in STABLE),
    *(rf"fastmha-[\d.]+-cp314-cp314t-{platform}\.whl" for platform in FREE_THREADED),
]
OPTIONAL = r"fastmha-.*(pyodide|emscripten).*\.whl"


def main(folder):
    files = {path.name for path in Path(folder).iterdir()}
    missing = [p for p in EXPECTED if not any(re.fullmatch(p, name) for name in files)]
    known = "|".join([*EXPECTED, OPTIONAL])
    extra = sorted(name for name in files if not re.fullmatch(known, name))
    versions = {re.match(r"fastmha-([\d.]+\d)", name)[1] for name in files - set(extra)}
    for pattern in missing:
        print(f"missing: {pattern}")
    for name in extra:
        print(f"unexpected: {name}")
    if len(versions) != 1:
        print(f"expected one version, got {sorted(versions)}")
    print(f"{len(files)} files, {len(EXPECTED)} expected")
    sys.exit(bool(missing or extra or len(versions) != 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
