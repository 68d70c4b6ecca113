"""`training.on_spike=rewind`: back to a checkpoint before the spike, and on without the batches that led to it.

What is left out stands in left_out.json, written before the ranks end. Each checkpoint knows which
rewinds came before it; one that a later rewind went back behind is removed at the next start, so a run
that is killed in between goes on the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import CheckpointError, DataError, StartAgain, UnreadableError
from muster.observe.results import step_folders, step_of
from muster.reading import json_file
from muster.training.manifest import read_manifest, remove
from muster.writing import write_json

if TYPE_CHECKING:
    from muster.training.checkpoint import Checkpoints
    from muster.training.job import Job

log = logging.getLogger(__name__)

FILE = "left_out.json"
NEAR = 32  # steps: a spike so soon after another is at the same place
MOST = 128  # steps that are left out before a spike


@dataclass(frozen=True)
class Rewind:
    """Steps are counted from 1. `first` to `step` are left out, `to` is the checkpoint's, 0 the beginning;
    `count` is how many steps were to be left out: fewer are where no checkpoint is early enough."""

    step: int
    count: int
    first: int
    to: int

    def leaves_out(self, step: int) -> bool:
        """Whether it leaves out a step that is counted from 0."""
        return self.first <= step + 1 <= self.step

    def words(self) -> str:
        steps = (
            f"step {self.step}" if self.first == self.step else f"steps {self.first} to {self.step}"
        )
        where = f"the checkpoint of step {self.to}" if self.to else "the beginning"
        return f"back to {where}, to go on without the batch of {steps}"


def next_rewind(before: Sequence[Rewind], step: int, kept: Collection[int]) -> Rewind:
    """After a spike at `step`, with complete checkpoints of the steps `kept`. Soon after the last one, twice as
    many steps are left out."""
    again = bool(before) and abs(step - before[-1].step) <= NEAR
    count = before[-1].count * 2 if again else 1
    if count > MOST:
        raise DataError(
            f"the loss or the gradient norm spikes at step {step} again, after the batches of {MOST} steps before it "
            "were left out: it is not these data alone; lower training.lr, warm up longer, or raise "
            f"training.spike_deviations; {FILE} in the run directory has what was left out"
        )
    first = max(1, step - count + 1)
    early = [saved for saved in kept if saved < first]
    late = [saved for saved in kept if first <= saved < step]
    to = max(early) if early else min(late, default=0)
    return Rewind(step, count, max(first, to + 1), to)


def read_rewinds(folder: Path) -> list[Rewind]:
    """Of a run directory."""
    path = folder / FILE
    try:
        return _listed(json_file.read(path)["rewinds"])
    except FileNotFoundError:
        return []
    except (UnreadableError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({error}); it has the steps that are left out after loss spikes: restore it, or remove "
            "it to train on all of them"
        ) from None


def _listed(rewinds: Iterable[Any]) -> list[Rewind]:
    return [Rewind(**{key: int(one[key]) for key in Rewind.__annotations__}) for one in rewinds]


def _of_checkpoint(trainer: Mapping[str, Any]) -> list[Rewind]:
    """Those that came before it; anybody may have written it."""
    with suppress(KeyError, TypeError, ValueError):
        return _listed(trainer["rewinds"])
    return []


def write_rewinds(folder: Path, rewinds: Iterable[Rewind]) -> None:
    write_json(folder / FILE, {"rewinds": [asdict(one) for one in rewinds]})


def known_rewinds(listed: list[Rewind], trainer: Mapping[str, Any]) -> list[Rewind]:
    """Those `listed` in the run directory, or those before the checkpoint, where the directory knows of fewer."""
    return max(listed, _of_checkpoint(trainer), key=len)


def rewind(job: Job, step: int, words: str) -> None:
    """After the spike at `step`, counted from 1. All ranks end, to start again."""
    job.checkpoints.wait()
    found = next_rewind(job.rewinds, step, job.checkpoints.complete())
    if job.mesh.first:
        write_rewinds(job.observer.folder, [*job.rewinds, found])
    job.mesh.barrier()
    job.observer.flush(job.mesh)
    job.observer.event("rewind", step=step, first=found.first, to=found.to, words=found.words())
    raise StartAgain(f"{words}; {found.words()}")


def remove_overtaken(checkpoints: Checkpoints, rewinds: Sequence[Rewind]) -> None:
    """Checkpoints that a rewind went back behind. A collective call."""
    if rewinds and checkpoints.mesh.first:
        gone = [folder for folder in step_folders(checkpoints.root) if _overtaken(folder, rewinds)]
        if (
            gone and checkpoints.mirror
        ):  # first, or one that stays there would be taken for the newest
            checkpoints.mirror.forget([folder.name for folder in gone])
        for folder in gone:
            log.info("%s is removed: the run went back behind it", folder)
            remove(folder)
    checkpoints.mesh.barrier()


def _overtaken(folder: Path, rewinds: Sequence[Rewind]) -> bool:
    with suppress(CheckpointError):  # a damaged one is passed over anyway
        seen = _of_checkpoint(read_manifest(folder)["trainer"])
        return any(step_of(folder) > one.to for one in rewinds[len(seen) :])
    return False
