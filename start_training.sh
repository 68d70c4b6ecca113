#!/usr/bin/env bash
# Trains a speech recogniser on a machine that has nothing but Python, and shows how it went.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"

usage() {
  cat <<'TEXT'
./start_training.sh [flags] [key=value …]

  (no flags)      one process: one GPU, or all CPU cores
  --distributed   one process per GPU, on all of them; without a GPU, one per CPU core
  --gpus=N        that many processes (implies --distributed)
  --N, --all      at most N parquet files of the training data (--10), or all of them
  --config FILE   a recipe of yours instead of the default one
  --clean         list runs that have ended and ask before removing them (--yes: do not ask)
  key=value       any key of the recipe: training.steps=2000 data.train=/data/speech
TEXT
}

for word in "$@"; do
  case $word in --help | -h) usage; exit ;; esac
done
use_muster
exec "$python" -P -m muster.entrypoints.start_training "$@"
