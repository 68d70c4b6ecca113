#!/usr/bin/env bash
# Trains in the background, on one GPU or all of them: ./start_training.sh --help
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${VIRTUAL_ENV:-/nonexistent}/bin/python
if ! "$python" -c 'import muster' 2>/dev/null; then # no environment with muster in it is active
  source "$here/../../tools/setup.sh"
  set_up
  python=$venv/bin/python
fi
exec "$python" "$here/scripts/start_training.py" "$@"
