"""Real runs on two ranks in which rank 1 sleeps, skips a collective, is stopped or is killed."""

from __future__ import annotations

import time
from pathlib import Path

from muster import run_directory
from muster.hardware import rehearsal
from muster.run_directory import Run
from processes import muster, python_path, until
from tiny import LONG

HOW = ("sleep", "skip", "SIGSTOP", "SIGKILL")
RECIPE = [
    LONG,
    "checkpoint.every_steps=null",
    "distributed.max_restarts=0",
    "distributed.timeout_s=60",
]
# Python runs this file first. It spoils the 5th call of a collective on rank 1.
PLANT = """
import os
if os.environ.get("RANK") == "1":
    import signal, time
    import torch
    import torch.distributed as dist
    original, calls, how = dist.COLLECTIVE, [0], os.environ["PLANT"]
    def COLLECTIVE(*args, **kwargs):
        calls[0] += COUNTS
        if calls[0] != 5:
            return original(*args, **kwargs)
        calls[0] += 1
        open(os.environ["PLANTED"], "w").close()
        if how == "sleep":
            time.sleep(600)
        if how in ("SIGSTOP", "SIGKILL"):
            time.sleep(2)
            os.kill(os.getpid(), getattr(signal, how))
    dist.COLLECTIVE = COLLECTIVE
"""


def spoil(
    root: Path, recipe: str, collective: str, counts: str, *words: str
) -> dict[str, tuple[Run, float]]:
    """All runs, which wait at once: each run, and how long it lived after its rank went astray. Calls of
    the `collective` are counted where `counts` holds."""
    plant = PLANT.replace("COLLECTIVE", collective).replace("COUNTS", counts)
    (root / "sitecustomize.py").write_text(plant)
    for how in HOW:
        (root / how).mkdir()
        env = {**python_path(root), "PLANT": how, "PLANTED": str(root / how / "planted")}
        arguments = [recipe, *RECIPE, *words, "--gpus", "2", "--detach"]
        muster("train", *arguments, folder=root / how, env=env)
        if (
            not rehearsal.active()
        ):  # on cores that they would share, no run keeps another from its steps
            until((root / how / "planted").exists)
    found = {how: run_directory.find("latest", root / how / "runs") for how in HOW}
    lived: dict[str, float] = {}
    end = time.monotonic() + 240
    while len(lived) < len(HOW):
        assert time.monotonic() < end, {how: run.info() for how, run in found.items()}
        for how, run in found.items():
            if how not in lived and run.state() not in run_directory.ALIVE:
                planted = root / how / "planted"
                lived[how] = run.info()["ended"] - planted.stat().st_mtime
        time.sleep(0.2)
    return {how: (found[how], lived[how]) for how in HOW}
