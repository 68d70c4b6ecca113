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

recipe=speech distributed=0 gpus="" clean=0 yes=() changes=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit ;;
    --distributed) distributed=1 ;;
    --gpus=*) gpus=${1#*=} distributed=1 ;;
    --gpus) gpus=${2:?--gpus needs a number} distributed=1; shift ;;
    --config=*) recipe=${1#*=} ;;
    --config) recipe=${2:?--config needs a file}; shift ;;
    --all) changes+=("data.max_parquet_files=null") ;;
    --clean) clean=1 ;;
    --yes) yes=(--yes) ;;
    --[0-9]*) changes+=("data.max_parquet_files=${1#--}") ;;
    *=*) changes+=("$1") ;;
    *) echo "error: unknown flag $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

set_up
[ $clean = 1 ] && exec "$venv/bin/muster" clean "${yes[@]}"
if [ $distributed = 0 ]; then
  gpus=1
elif [ -z "$gpus" ]; then
  gpus=all
fi
exec "$venv/bin/muster" train "$recipe" --gpus "$gpus" "${changes[@]}"
