"""What a cross build needs beside the sources: a Meson cross file, headers, an import library.

`build.sh` calls it; it prints the arguments for `meson setup`, a line each.

The kernels use the stable ABI alone, so little of Python is needed: its headers are the same on all
platforms but for `pyconfig.h`, of which the stable ABI reads sizes of C types and how symbols are
imported. On 64-bit Linux and macOS those are the same as here; the others get a `pyconfig.h` with
their own sizes. `check_sizes` lets the target's compiler compare every size with what it knows.
Windows links with an import library of `python3.dll`, made from the list of the stable ABI's names.
"""

import argparse
import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

SIZES = {
    # SIZEOF_...: the C type
    "SHORT": "short",
    "INT": "int",
    "LONG": "long",
    "LONG_LONG": "long long",
    "VOID_P": "void *",
    "SIZE_T": "size_t",
    "WCHAR_T": "wchar_t",
    "FLOAT": "float",
    "DOUBLE": "double",
}
ILP32 = {"LONG": 4, "VOID_P": 4, "SIZE_T": 4}
WINDOWS = """\
#define MS_WIN32
#define MS_WINDOWS
#define NT_THREADS
#define WITH_THREAD
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL
#define COMPILER "[zig cc]"
#define PYTHONPATH L""
#define HAVE_STDARG_PROTOTYPES
#define HAVE_PROTOTYPES
#define HAVE_LONG_LONG 1
#define HAVE_SYS_STAT_H 1
#define HAVE_STDDEF_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_UINTPTR_T 1
#include <stdint.h>
#include <io.h>
"""
NAMES = {
    # what Meson calls `cpu` beside the family
    "x86": "i686",
    "arm": "armv7",
}


def pyconfig(family, system):
    """The text of the target's `pyconfig.h`, None where this machine's serves."""
    short = family in ("x86", "arm")
    if system == "windows":
        sizes = {"SHORT": 2, "INT": 4, "LONG": 4, "LONG_LONG": 8, "WCHAR_T": 2, "FLOAT": 4}
        sizes |= {"DOUBLE": 8, "VOID_P": 4 if short else 8, "SIZE_T": 4 if short else 8}
        defined = "".join(f"#define SIZEOF_{name} {size}\n" for name, size in sizes.items())
        bits = "" if short else "#define MS_WIN64\n"
        return WINDOWS + bits + defined
    if not short:
        return None
    text = Path(sysconfig.get_config_h_filename()).read_text()
    for name, size in ILP32.items():
        text = re.sub(rf"(#define SIZEOF_{name}) \d+", rf"\1 {size}", text)
    return text


def check_sizes(compiler, headers, folder):
    """Every size that `pyconfig.h` states is the compiler's own."""
    checks = "".join(
        f'_Static_assert(SIZEOF_{name} == sizeof({kind}), "{name}");\n' for name, kind in SIZES.items()
    )
    source = folder / "sizes.c"
    source.write_text(f"#define Py_LIMITED_API 0x030b0000\n#include <Python.h>\n{checks}")
    command = [*compiler, "-I", headers, "-c", source, "-o", folder / "sizes.o"]
    subprocess.run(command, check=True)


def import_library(zig, family, folder):
    """An import library of `python3.dll` with all of the stable ABI as of 3.11."""
    import abi3info

    def known(symbols):
        return sorted(
            symbol.name
            for symbol, about in symbols.items()
            if (about.added.major, about.added.minor) <= (3, 11)
        )

    definition = folder / "python3.def"
    lines = ["LIBRARY python3.dll", "EXPORTS", *known(abi3info.FUNCTIONS)]
    lines += [f"{name} DATA" for name in known(abi3info.DATAS)]
    definition.write_text("\n".join(lines) + "\n")
    library = folder / "python3.lib"
    machine = {"x86_64": "i386:x86-64", "x86": "i386", "aarch64": "arm64"}[family]
    command = [*zig, "dlltool", "-m", machine, "-d", definition, "-l", library]
    subprocess.run(command + (["-k"] if family == "x86" else []), check=True)
    return library


def build_details(args, headers, library):
    """A description of the target's Python in the format of PEP 739, which Meson reads."""
    return {
        "schema_version": "1.0",
        "base_prefix": "/",
        # Meson checks a Windows platform, and takes ARM64's compiler for one of the machine it runs on.
        "platform": "win-amd64" if args.platform == "win-arm64" else args.platform,
        "language": {"version": "3.11"},
        "implementation": {
            "name": "cpython",
            "cache_tag": "cpython-311",
            "version": {"major": 3, "minor": 11, "micro": 0, "releaselevel": "final", "serial": 0},
            "hexversion": 0x030B00F0,
        },
        "abi": {
            "flags": [],
            "extension_suffix": ".pyd" if args.system == "windows" else ".so",
            "stable_abi_suffix": ".pyd" if args.system == "windows" else ".abi3.so",
        },
        "libpython": {
            "dynamic": str(library or "/none"),
            "dynamic_stableabi": str(library or "/none"),
            "dynamic-stableabi": str(library or "/none"),
            "link_extensions": args.system == "windows",
        },
        "c_api": {"headers": str(headers)},
    }


def quoted(words):
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def cross_file(args, compiler, zig):
    # Zig has no `strip` of its own for all formats; the linker drops the symbols instead.
    return f"""\
[binaries]
c = {quoted(compiler)}
ar = {quoted([*zig, "ar"])}
cython = 'cython'

[built-in options]
c_link_args = ['-s']

[host_machine]
system = '{args.system}'
cpu_family = '{args.family}'
cpu = '{NAMES.get(args.family, args.family)}'
endian = 'little'
"""


def prepare(args):
    folder = Path(args.folder)
    zig = [args.zig, "-m", "ziglang"]
    compiler = [*zig, "cc", "-target", args.triple]
    headers = Path(sysconfig.get_path("include"))
    config = pyconfig(args.family, args.system)
    if config is not None:
        shutil.copytree(headers, folder / "include")
        headers = folder / "include"
        (headers / "pyconfig.h").write_text(config)
        # With the compiler's name, since not all of Meson's checks know of `build_details`.
        compiler += ["-I", str(headers)]
    check_sizes(compiler, headers, folder)
    (folder / "cross.ini").write_text(cross_file(args, compiler, zig))
    print(f"--cross-file={folder / 'cross.ini'}")
    if config is not None:
        library = import_library(zig, args.family, folder) if args.system == "windows" else None
        details = build_details(args, headers, library)
        (folder / "build-details.json").write_text(json.dumps(details, indent=2))
        print(f"-Dpython.build_config={folder / 'build-details.json'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder")
    for option in ("triple", "family", "system", "platform", "zig"):
        parser.add_argument(f"--{option}", required=True)
    prepare(parser.parse_args())


if __name__ == "__main__":
    main()
