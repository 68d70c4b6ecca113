# Sourced by run_tests.sh and by the scripts that start training.
#
#   set_up [extra]      makes .venv beside them and installs muster into it, with an extra of
#                       pyproject.toml; does nothing when nothing has changed since the last time
#   use_muster [extra]  sets $python to a Python that has muster: $PYTHON, or else the first of `python`
#                       and `python3` (an active environment, conda, the system's). Nothing is installed
#                       into these. Only where none has muster, .venv is set up and taken.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: muster needs Python 3.11 or newer; install it, or name one with PYTHON=/path/to/python3" >&2
  return 1
}

set_up() {
  local extra=${1:-} what="$root" stamp python
  [ -n "$extra" ] && what="$root[$extra]"
  stamp=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | tr ' ' '-')
  [ -e "$venv/.installed-$extra-$stamp" ] && return
  [ -e "$venv/.installed-dev-$stamp" ] && return # `dev` has all that scripts need
  [ -z "$extra" ] && compgen -G "$venv/.installed-*-$stamp" >/dev/null && return
  python=$(find_python)
  if [ ! -x "$venv/bin/python" ]; then
    echo "Making $venv …"
    if ! "$python" -m venv "$venv"; then
      rm -rf "$venv"
      echo "error: $python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
      return 1
    fi
  fi
  if [ -d /sys/class/kfd ] && [ ! -e /dev/nvidiactl ] && [ -z "${PIP_EXTRA_INDEX_URL:-}" ]; then
    echo "AMD's compute driver is here, and torch will be installed without ROCm. For AMD GPUs, stop and name" \
      "the index of its ROCm builds: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/rocmX.Y (pytorch.org/get-started)"
  fi
  echo "Installing muster and what it needs (once; a few minutes) …"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c "$root/constraints.txt" -e "$what"
  touch "$venv/.installed-$extra-$stamp"
}

use_muster() {
  local candidate
  for candidate in ${PYTHON:-python python3}; do
    candidate=$(command -v "$candidate") || continue
    [ "$(dirname "$candidate")" -ef "$venv/bin" ] && break # .venv is active: set_up knows its state
    if has_muster "$candidate"; then
      python=$candidate
      echo "Using $candidate, which has muster." >&2
      return
    fi
  done
  set_up "${1:-}" >&2
  python="$venv/bin/python"
}

# The modules are looked up, not imported: importing torch takes seconds. There is another project
# called muster, so a module is named that only this one has.
has_muster() {
  PYTHONSAFEPATH=1 "$1" -c '
import sys
from importlib.util import find_spec
sys.exit(sys.version_info < (3, 11) or not (find_spec("muster.entrypoints.script") and find_spec("torch")))
' >/dev/null 2>&1
}
