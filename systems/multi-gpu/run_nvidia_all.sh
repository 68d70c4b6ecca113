#!/usr/bin/env bash
# Trains on every NVIDIA GPU of this machine; without one, on two CPU ranks.
#   bash run_nvidia_all.sh [hf|fsdp] [--recipe NAME] [key=value …]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/launch.sh"
set_up_for "${1:-}"
counts=$(count_gpus)
read -r nvidia amd <<<"$counts"
start_on_all NVIDIA run_amd_all.sh "$nvidia" "$amd" "$@"
