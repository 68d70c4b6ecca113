"""A process that ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import signal

SUPERVISOR = "MUSTER_SUPERVISOR"  # its process id, in the environment of the ranks it starts


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def supervised() -> bool:
    """Whether a supervisor of muster's started this process, and writes run.json."""
    return SUPERVISOR in os.environ


def end_with_launcher() -> None:
    """A rank ends with the supervisor or the torchrun that started it; with a supervisor also when
    that was killed before this call."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        die_with_parent()
    if supervisor and os.getppid() != int(supervisor):
        os._exit(1)
