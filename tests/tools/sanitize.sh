#!/usr/bin/env bash
# Builds fastmha with a check in it and runs tests under that check:
#
#   tests/tools/sanitize.sh address [ARGUMENTS OF PYTEST]   AddressSanitizer and UndefinedBehaviorSanitizer
#   tests/tools/sanitize.sh thread [ARGUMENTS OF PYTEST]    ThreadSanitizer; by default tests/test_threads.py
#   tests/tools/sanitize.sh checks [ARGUMENTS OF PYTEST]    Cython's bounds, wrap-around and initialisation checks
#   tests/tools/sanitize.sh helgrind [ARGUMENTS OF PYTEST]  an ordinary build under valgrind's helgrind
#
# RUN="python tests/tools/fuzz.py --calls 100000" runs that instead of pytest. PYTHON (default python3) is what is
# tested with, CC (default gcc) the compiler. The first finding ends the run with a failure.
set -euo pipefail

cd "$(dirname "$0")/../.."
check=${1:?address, thread, checks or helgrind}
shift
CC=${CC:-gcc}
export CC
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
pip install --quiet --disable-pip-version-check meson-python meson ninja cython pytest hypothesis threadpoolctl ml_dtypes

setup=() preload=() run=()
tests=("$@")
case $check in
  address)
    setup=("-Csetup-args=-Db_sanitize=address,undefined")
    preload=(libasan.so libubsan.so)
    # CPython keeps memory to its end on purpose. A failed allocation must return NULL, as it does without the check.
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1
    export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    ;;
  thread)
    setup=(-Csetup-args=-Db_sanitize=thread)
    preload=(libtsan.so)
    # No function of the interpreter's libraries is left out: their mutexes are what orders accesses.
    export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
    # The sanitizer's shadow memory does not fit the layouts that newer kernels draw.
    run=(setarch --addr-no-randomize)
    # It ends every child of a process with threads that starts threads, as the fork tests' do.
    [[ ${#tests[@]} -gt 0 ]] || tests=(tests/test_threads.py -k "not fork")
    ;;
  checks)
    setup=(-Csetup-args=-Dchecks=true)
    ;;
  helgrind)
    run=(valgrind --tool=helgrind --error-exitcode=1 --quiet "--suppressions=$PWD/tests/tools/helgrind.supp")
    export PYTHONMALLOC=malloc
    [[ ${#tests[@]} -gt 0 ]] || tests=(tests/test_threads.py)
    ;;
  *)
    echo "sanitize.sh: no check $check" >&2
    exit 2
    ;;
esac
if [[ ${#preload[@]} -gt 0 ]]; then
  # An extension module's sanitizer must be in the process before the interpreter starts.
  setup+=(-Csetup-args=-Db_lundef=false -Csetup-args=-Dbuildtype=debugoptimized)
fi
pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps "${setup[@]}" .

libraries=
for name in ${preload[@]+"${preload[@]}"}; do
  libraries+="$("$CC" -print-file-name="$name"):"
done
export OPENBLAS_NUM_THREADS=1 FASTMHA_NUM_THREADS=${FASTMHA_NUM_THREADS:-4}
export FASTMHA_TEST_PATIENCE=${FASTMHA_TEST_PATIENCE:-10}
if [[ -n ${RUN:-} ]]; then
  read -ra command <<<"$RUN"
else
  # What a sanitizer writes as it ends the process must get past pytest.
  command=(python -m pytest -q -p no:cacheprovider --capture=sys ${tests[@]+"${tests[@]}"})
fi
env LD_PRELOAD="$libraries" ${run[@]+"${run[@]}"} "${command[@]}"
