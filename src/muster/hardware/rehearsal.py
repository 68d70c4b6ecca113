"""A rehearsal: more ranks than GPUs, several on each, with the real strategy, collectives and checkpoints.

NCCL refuses two ranks on one GPU only where both report the same host. So every rank reports a host of
its own (NCCL_HOSTID), and NCCL sends through the loopback as it would through a network. Losses,
checkpoints, failures and the memory of each rank are those of as many GPUs; times are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from muster.errors import LaunchError

VARIABLE = "MUSTER_REHEARSE"
FLAG = f"--rehearse N ({VARIABLE}=1 for ranks that another launcher starts)"
WORDS = "ranks share GPUs in a rehearsal, so times say nothing"
CONTEXT_BYTES = int(0.78 * 2**30)  # CUDA context with library kernels, measured on an H200


def active(env: Mapping[str, str] = os.environ) -> bool:
    return env.get(VARIABLE, "0") not in ("", "0")


def begin(gpus: int, ranks: int, env: MutableMapping[str, str] = os.environ) -> None:
    """This process, and those it starts, are part of a rehearsal of `ranks` on so many `gpus`."""
    if not gpus:
        raise LaunchError(
            f"--rehearse {ranks}: this machine has no GPU, and CPU ranks need no rehearsal: any number of them "
            f"may share its cores; say --gpus {ranks} instead"
        )
    env[VARIABLE] = "1"


def refuse(what: str, flag: bool = False) -> None:
    """For what measures times, in a rehearsal by the variable or, if given, by the flag."""
    if flag or active():
        raise LaunchError(
            f"{what} measures times, and {WORDS}; {'leave --rehearse out' if flag else f'unset {VARIABLE}'}. "
            "`muster train`, `muster check`, `muster bench collectives` and `muster bench p2p` can be "
            "rehearsed"
        )


def set_host_id(rank: int, env: MutableMapping[str, str] = os.environ) -> None:
    """Before the first communicator: NCCL reads it once."""
    env["NCCL_HOSTID"] = f"{os.uname().nodename}-rank-{rank}"


def share_of(total: int, ranks: int) -> int:
    """Bytes that torch may allocate for one of `ranks` on a GPU with `total`."""
    share = total // ranks - CONTEXT_BYTES
    if share <= 0:
        raise LaunchError(
            f"--rehearse: {ranks} ranks on one GPU leave {total / ranks / 2**30:.2f} GiB to each, and its "
            f"CUDA context takes {CONTEXT_BYTES / 2**30:.2f} GiB; rehearse fewer ranks"
        )
    return share
