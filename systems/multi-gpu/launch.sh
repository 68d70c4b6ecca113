# Sourced by run_nvidia_all.sh and run_amd_all.sh.

# set_up_for [hf|fsdp]: sets $python to one with muster; only where there is none, ../../.venv is set up,
# for the Trainer with accelerate.
set_up_for() {
  local extra=""
  [[ "${1:-}" == hf ]] && extra=trainer
  python=python
  if [[ -e "$here/../../tools/setup.sh" ]]; then  # not where this folder was copied elsewhere
    source "$here/../../tools/setup.sh"
    use_muster "$extra"
  fi
}

# start_on_all VENDOR OTHER_SCRIPT GPUS OTHER_GPUS [hf|fsdp] [arguments of the script]
start_on_all() {
  local vendor=$1 other_script=$2 gpus=$3 other_gpus=$4 script=fsdp ranks
  shift 4
  case "${1:-}" in hf | fsdp) script=$1 && shift ;; esac

  export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"    # output as it happens
  export PYTHONHASHSEED="${PYTHONHASHSEED-42}"       # the same order of sets in every rank
  if [[ -z "${PYTORCH_ALLOC_CONF-}" ]]; then         # the same setting under its newer name
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}"
  fi

  ranks="${NUM_GPUS:-$gpus}"
  if [[ "$ranks" == 0 && "$other_gpus" -gt 0 ]]; then
    echo "torch sees no $vendor GPU here, but $other_gpus of the other make: bash $other_script" >&2
    return 2
  fi
  if [[ "$ranks" == 0 ]]; then
    local cores
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # nproc heeds both
    ranks=$((cores < 2 ? cores : 2))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS-$((cores / ranks))}"
    echo "torch sees no $vendor GPU here: training on $ranks CPU rank(s) instead" >&2
  else
    echo "training on $ranks $vendor GPU(s)" >&2
  fi
  local torchrun=("$(dirname "$(command -v "$python")")/torchrun")
  [[ -x "${torchrun[0]}" ]] || torchrun=("$python" -m torch.distributed.run)
  exec "${torchrun[@]}" --standalone --nproc_per_node="$ranks" "$here/run_${script}_standalone.py" "$@"
}

# "NVIDIA AMD": how many GPUs of each make torch may use, after masks such as CUDA_VISIBLE_DEVICES,
# which the vendors' own tools (nvidia-smi, rocm-smi) do not heed.
count_gpus() {
  "$python" -c '
import torch
n = torch.cuda.device_count()
print(0 if torch.version.hip else n, n if torch.version.hip else 0)'
}
