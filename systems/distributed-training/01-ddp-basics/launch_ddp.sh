#!/usr/bin/env bash
# ./launch_ddp.sh [RANKS] [SCRIPT] [arguments of the script]
#
# One rank per GPU, or two CPU ranks where torch sees no GPU; SCRIPT is ddp_training.py unless named.
# Several nodes, the same line on each:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./launch_ddp.sh       (NODE_RANK=1 on the second)
# MASTER_PORT is 29500 unless set. Nothing you have set is changed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

ranks=""
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then ranks=$1 && shift; fi
script="$here/ddp_training.py"
if [[ "${1:-}" == *.py ]]; then
  script=$1 && shift
  [[ -e "$script" ]] || script="$here/$script"
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks="${ranks:-$gpus}"
if [[ "$ranks" == 0 ]]; then
  ranks=2
  echo "torch sees no GPU here: $ranks CPU ranks" >&2
fi

if [[ "${NNODES:-1}" == 1 ]]; then
  meet=(--standalone)  # a free port of this machine
else
  : "${NODE_RANK:?NNODES is $NNODES: set NODE_RANK to 0 … $((NNODES - 1)), another on each node}"
  : "${MASTER_ADDR:?NNODES is $NNODES: set MASTER_ADDR to an address of node 0 that all nodes reach}"
  meet=(--nnodes="$NNODES" --node_rank="$NODE_RANK")
  meet+=(--master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"  # torchrun's own default, without its warning
exec torchrun "${meet[@]}" --nproc_per_node="$ranks" "$script" "$@"
