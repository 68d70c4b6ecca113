#!/usr/bin/env bash
# Sets itself up and runs every check and test. --full adds long storms and complete tables;
# anything else goes to pytest: ./run_tests.sh tests/train -k parity
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"
cd "$root"
set_up dev
bin="$venv/bin"
"$bin/ruff" check --quiet .
"$bin/ruff" format --check --quiet .
"$bin/mypy"
"$bin/lint-imports" --no-logo
exec "$bin/python" -m pytest "$@"
