#!/usr/bin/env bash
# Sets itself up, then checks and tests. ./run_tests.sh --help says what there is to run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"

usage() {
  cat <<'TEXT'
./run_tests.sh              linters, then tests of every law, every verb and every system's main path
./run_tests.sh --full       the same with long series of kills, complete tables, broken lessons, and mypy
./run_tests.sh --gpu        on NVIDIA GPUs, one or more: strategies, checkpoints, failures over NCCL (docs/rehearsal.md)
./run_tests.sh --guides     the commands of the guides behind systems/, as printed, by torchrun, deepspeed, srun, mpirun;
                            the Python page and its notebook; hosts; the live page in a browser; muster bench; the wheel;
                            what compiles, or starts servers and many interpreters
./run_tests.sh --mutations  plants each fault of tests/mutations.yaml and sees its test fail
./run_tests.sh tests/train -k parity    anything else goes to pytest, in one process
TEXT
}

sets=() others=() mutations=0
for word in "$@"; do
  case $word in
    --help | -h) usage; exit ;;
    --mutations) mutations=1 ;;
    --full | --gpu | --guides) sets+=("$word") ;;
    *) others+=("$word") ;;
  esac
done

cd "$root"
set_up dev
unset PYTHONDONTWRITEBYTECODE # the tests import the same modules hundreds of times
bin="$venv/bin"
[ $mutations = 1 ] && exec "$bin/python" tools/mutations.py "${others[@]}"
if [ ${#others[@]} -gt 0 ]; then
  exec "$bin/python" -m pytest "${sets[@]}" "${others[@]}"
fi
workers=(-n 3 --no-loadscope-reorder)

# Beside others on few cores any process may stand still for seconds. A fault fails alone too, and ends this at once.
retry_alone() {
  echo "What failed is tried once more, alone:"
  "$bin/python" -m pytest --last-failed --exitfirst "${sets[@]}"
  echo "warning: the tests above that failed passed alone" >&2
}
case " ${sets[*]} " in
  *" --gpu "*)
    [ ${#sets[@]} = 1 ] || { echo "error: --gpu is a set of its own; leave out the others" >&2; exit 2; }
    mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.(gpu|both)' tests)
    [ ${#files[@]} -gt 0 ] || { echo "error: no tests for GPUs in tests/" >&2; exit 2; }
    # Most of the time goes into starting and compiling on the CPU: up to four files at a time, one for every
    # 4 cores and 20 GiB of the smallest GPU. A file's tests share their ranks and runs.
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | grep -E '^[0-9]+$' | sort -n | head -1) || true
    processes=$(printf '%s\n' 4 $(($(nproc) / 4)) $((${mib:-0} / 20480)) | sort -n | head -1)
    [ "$processes" -ge 1 ] || processes=1
    failed=0
    "$bin/python" -m pytest --gpu -n "$processes" --dist loadfile -m "not serial" "${files[@]}" || failed=$?
    [ $failed -le 1 ] || exit $failed
    "$bin/python" -m pytest --gpu -m serial "${files[@]}" || failed=$?
    exit $failed
    ;;
  *" --guides "*)
    [ ${#sets[@]} = 1 ] || { echo "error: --guides is a set of its own; leave out the others" >&2; exit 2; }
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.guides' tests)
    failed=0
    rm -rf .pytest_cache # retry_alone asks it what failed
    "$bin/python" -m pytest "${workers[@]}" --dist load "${sets[@]}" "${files[@]}" || failed=$?
    [ $failed = 1 ] || exit $failed
    retry_alone
    exit
    ;;
esac

"$bin/ruff" check --quiet .
"$bin/ruff" format --check --quiet .
"$bin/lint-imports" --no-logo
case " ${sets[*]} " in
  *" --full "*) "$bin/mypy" ;;
esac
failed=0
rm -rf .pytest_cache # retry_alone asks it what failed
"$bin/python" -m pytest "${workers[@]}" --dist loadfile -m "not serial" "${sets[@]}" || failed=$?
[ $failed -le 1 ] || exit $failed # not where pytest was interrupted
mapfile -t alone < <(grep -rl --include='test_*.py' 'mark\.serial' tests)
"$bin/python" -m pytest -m serial "${sets[@]}" "${alone[@]}" || failed=$?
[ $failed = 1 ] || exit $failed
retry_alone
