"""The lessons of systems/distributed-training, run as a student runs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

import processes
from muster.hardware import rehearsal

COURSE = Path(__file__).parents[1] / "systems" / "distributed-training"


def start(*command: str | Path, **variables: str) -> subprocess.Popen[str]:
    """In the course's folder; errors among the words."""
    return processes.start(command, COURSE, env=variables)


def said(*command: str | Path, fails: bool = False, **variables: str) -> str:
    process = start(*command, **variables)
    words = process.communicate(timeout=250)[0]
    assert (process.returncode != 0) == fails, words
    return words


def devices(ranks: int) -> dict[str, str]:
    """Variables: a GPU for each rank, or none for any, except where they share."""
    return (
        {}
        if torch.cuda.device_count() >= ranks or rehearsal.active()
        else {"CUDA_VISIBLE_DEVICES": ""}
    )


def torchrun(script: str | Path, *words: str | Path, ranks: int = 2, fails: bool = False) -> str:
    """What a lesson says on that many ranks."""
    command = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", script, *words]
    return said(*command, fails=fails, **devices(ranks))


def broken(lesson: str, line: str, instead: str, folder: Path) -> Path:
    """A copy of the lesson with one line changed."""
    text = (COURSE / lesson).read_text()
    assert text.count(line) == 1
    copy = folder / Path(lesson).name
    copy.write_text(text.replace(line, instead))
    return copy
