#!/usr/bin/env bash
# Trains on every AMD GPU of this machine (ROCm's torch); without one, on two CPU ranks.
#   bash run_amd_all.sh [hf|fsdp] [--recipe NAME] [key=value …]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/launch.sh"
export HSA_NO_SCRATCH_RECLAIM="${HSA_NO_SCRATCH_RECLAIM-1}"
export HSA_ENABLE_SDMA="${HSA_ENABLE_SDMA-1}"
export HSA_FORCE_FINE_GRAIN_PCIE="${HSA_FORCE_FINE_GRAIN_PCIE-1}"
set_up_for "${1:-}"
counts=$(count_gpus)
read -r nvidia amd <<<"$counts"
start_on_all AMD run_nvidia_all.sh "$amd" "$nvidia" "$@"
