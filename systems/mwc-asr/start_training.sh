#!/usr/bin/env bash
# Trains in the background, on one GPU or all of them: ./start_training.sh --help
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python
if [ -e "$here/../../tools/setup.sh" ]; then # not where this folder was copied elsewhere
  source "$here/../../tools/setup.sh"
  use_muster
fi
exec "$python" "$here/scripts/start_training.py" "$@"
