#!/usr/bin/env bash
# Runs a command in another architecture's CPython under qemu-user, with one of this project's wheels installed:
#
#   wheels/emulate.sh arm64|armhf|i386|amd64 WHEEL COMMAND...     e.g.  ... python3 wheels/smoke.py
#
# CPython 3.11 and the libraries that it needs come from Debian 12 (which this machine must run), unpacked, not
# installed; NumPy, ml_dtypes and what the tests need from PyPI as wheels for that architecture, or NumPy alone from
# Debian where PyPI has none. They are kept in $FASTMHA_SYSROOTS (default ~/.cache/fastmha-sysroots) for the next call.
# QEMU_CPU chooses the processor.
set -euo pipefail

architecture=$1 wheel=$(realpath "$2")
shift 2
case $architecture in
  arm64) machine=aarch64 numpy=manylinux_2_28_aarch64 ;;
  amd64) machine=x86_64 numpy=manylinux_2_28_x86_64 ;;
  armhf) machine=arm numpy= ;;
  i386) machine=i386 numpy= ;;
  *) echo "emulate.sh: no architecture $architecture" >&2; exit 2 ;;
esac
root=${FASTMHA_SYSROOTS:-$HOME/.cache/fastmha-sysroots}/$architecture
packages="libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libuuid1
  libpython3.11-minimal libpython3.11-stdlib python3.11-minimal"
[[ -n $numpy ]] || packages+=" python3-numpy libblas3 liblapack3 libgfortran5"
[[ $architecture != i386 ]] || packages+=" libquadmath0"

if [[ ! -e $root/complete ]]; then
  mkdir -p "$root/debs" "$root/site"
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  if [[ $(dpkg --print-architecture) != "$architecture" ]] &&
    ! dpkg --print-foreign-architectures | grep -qx "$architecture"; then
    dpkg --add-architecture "$architecture"
    apt-get update -qq || true # one stale index is no reason to stop: the downloads below tell
  fi
  for package in $packages; do
    (cd "$root/debs" && apt-get download -qq -o APT::Sandbox::User=root "$package:$architecture")
  done
  for deb in "$root"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  rm -r "$root/debs"
  if [[ -n $numpy ]]; then
    python3 -m pip install --quiet --target "$root/site" --only-binary=:all: --no-deps \
      --implementation cp --python-version 3.11 --platform "$numpy" --platform "${numpy/_2_28/_2_27}" \
      --platform "${numpy/_2_28/_2_17}" numpy ml_dtypes hypothesis
  fi
  python3 -m pip install --quiet --target "$root/site" pytest sortedcontainers
  touch "$root/complete"
fi

installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
python3 -m zipfile -e "$wheel" "$installed"

paths=$installed:$root/site
[[ -n $numpy ]] || paths+=:$root/usr/lib/python3/dist-packages
libraries=$(find "$root/usr/lib" "$root/lib" -maxdepth 1 -type d -name '*-linux-gnu*' | paste -sd:)
libraries+=:$(find "$root/usr/lib" -type d \( -name blas -o -name lapack \) | paste -sd:)

# A script is what the kernel can start, and so what Python starts further Pythons with.
cat >"$installed/python3" <<END
#!/bin/sh
export PYTHONHOME="$root/usr" PYTHONPATH="$paths\${PYTHONPATH:+:\$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1
unset LD_LIBRARY_PATH
exec qemu-$machine -L "$root" -E LD_LIBRARY_PATH="$libraries" "$root/usr/bin/python3.11" "\$@"
END
chmod +x "$installed/python3"
echo "import sys; sys.executable = '$installed/python3'" >"$installed/sitecustomize.py"
export FASTMHA_TEST_EXAMPLES=${FASTMHA_TEST_EXAMPLES:-3} FASTMHA_TEST_PATIENCE=${FASTMHA_TEST_PATIENCE:-10}
PATH="$installed:$PATH" "$@"
