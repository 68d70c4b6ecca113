# Sourced by start_training.sh and run_tests.sh: `set_up [extra]` makes .venv beside them and
# installs muster into it. When nothing has changed since the last time, it does nothing.

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
  python=$(find_python)
  if [ ! -x "$venv/bin/python" ]; then
    echo "Making $venv …"
    if ! "$python" -m venv "$venv"; then
      rm -rf "$venv"
      echo "error: $python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
      return 1
    fi
  fi
  echo "Installing muster and what it needs (once; a few minutes) …"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c "$root/constraints.txt" -e "$what"
  touch "$venv/.installed-$extra-$stamp"
}
