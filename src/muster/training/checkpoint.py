"""Checkpoints that are complete or ignored, and load under any layout.

A checkpoint is a new folder `step-<n>`. Ranks write their shards into it with
torch.distributed.checkpoint, in the background; each then hashes what it wrote; then rank 0 writes
`manifest.json` with the size and checksum of every file. A folder without a manifest, or with a file
that does not match it, is skipped. Nothing is ever written into a folder twice. Last of all each rank
reads its files back from the disk, and only then older checkpoints are removed.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from muster.errors import CheckpointError
from muster.observe.heartbeat import beat
from muster.observe.results import MANIFEST, best_of, step_folders, step_of
from muster.parallel.engine import Engine
from muster.parallel.mesh import Mesh
from muster.reading.text import in_one_line
from muster.torch_internals import tree_leaves
from muster.training.checkpoint_reader import METADATA, CheckpointReader
from muster.training.manifest import (
    Saved,
    bytes_in,
    file_entry,
    read_manifest,
    remove,
    sealed,
    verify,
)
from muster.training.read_back import damaged, set_aside
from muster.writing import make_folder, write

if TYPE_CHECKING:
    from muster.training.mirror import Mirror

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often a waiting rank checks the progress of a save …
FILES_PER_LOOK = 64  # … of so many ranks; of more, each of which has its files, less often


def load_model(saved: Saved, model: torch.nn.Module) -> None:
    """Only the weights, in one process, whatever layout wrote them."""
    try:
        _load({"model": model.state_dict()}, saved, no_dist=True)
    except CheckpointException as error:  # which is no Exception, and several lines long
        cause = next((cause for cause, _ in error.failures.values()), error)
        raise CheckpointError(
            f"{saved.path} cannot be loaded ({in_one_line(repr(cause), 300)}); it is damaged, or of another model "
            "than its recipe.json describes"
        ) from None


def _load(state: dict[str, Any], saved: Saved, **options: Any) -> None:
    reader = CheckpointReader(saved.path, saved.manifest["files"])
    dcp.load(state, storage_reader=reader, **options)


class Checkpoints:
    """One run's checkpoints."""

    def __init__(
        self,
        root: Path,
        mesh: Mesh,
        recipe: dict[str, Any],
        assets: dict[str, Any],
        *,
        keep: int,
        asynchronous: bool,
        verify: bool = True,
        mirror: Mirror | None = None,
    ) -> None:
        self.root, self.mesh, self.recipe, self.assets = root, mesh, recipe, assets
        self.keep, self.asynchronous, self.reads_back = keep, asynchronous, verify
        self.tell: Callable[..., None] = lambda what, **details: None  # an event of the run
        self.mirror = mirror
        if self.mirror:
            self.mirror.released = self._prune_again
        self._pruned: tuple[int, int | None] | None = None
        self._pruning = threading.Lock()
        self.last_saved: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._bytes_read = 0  # of files that are read back
        self._passed_over = set[Path]()  # damaged

    def newest(self) -> tuple[Saved | None, list[str]]:
        """The newest complete checkpoint and, why newer ones were skipped. The same on all ranks."""
        skipped: list[str] = []
        for folder in step_folders(self.root):
            saved = self._checked(folder)
            if isinstance(saved, Saved):
                return saved, skipped
            skipped.append(saved)
            self._passed_over.add(folder)
        return None, skipped

    def _checked(self, folder: Path) -> Saved | str:
        """The checkpoint, or why it is not whole; ranks share the reading. The same on all ranks."""
        problem, manifest = None, dict[str, Any]()
        try:
            manifest = read_manifest(folder)
            verify(folder, manifest, self.mesh.rank, self.mesh.world)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        problems = [p for p in self.mesh.gather(problem) if p]
        return problems[0] if problems else Saved(folder, manifest)

    def complete(self) -> set[int]:
        """Steps whose files are all there, at their sizes. The same on all ranks."""
        found = set()
        for folder in step_folders(self.root):
            with suppress(CheckpointError):
                read_manifest(folder)
                found.add(step_of(folder))
        return set.intersection(*self.mesh.gather(found))

    def at(self, step: int) -> Saved | str:
        """The checkpoint of a step, or why it is not whole. The same on all ranks."""
        return self._checked(self.root / f"step-{step}")

    def load(self, saved: Saved, engine: Engine) -> dict[str, Any]:
        """Weights and optimizer into `engine`; returns the trainer's own small state."""
        state = engine.state()
        _load(state, saved)
        engine.load_state(state)
        if saved.path.parent == self.root:  # not another run's
            self.last_saved = saved.step
        return dict(saved.manifest["trainer"])

    def save(
        self, step: int, engine: Engine, trainer: dict[str, Any], *, required: bool = False
    ) -> float:
        """Start saving after `step` steps; returns the seconds that training was blocked. A `required` one is an
        error where the disk does not keep it; another is left to the next."""
        begin = time.perf_counter()
        beat("saving")
        self.wait()
        folder = self.root / f"step-{step}"
        state = engine.state()
        self._check_space(state)
        if self.mesh.first:
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted save
            make_folder(folder)
        self.mesh.barrier()
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=self.mesh.device.type == "cuda",
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=self.mesh.device.type == "cuda",
            )
        )
        self._thread = threading.Thread(
            target=self._write,
            args=(stager.stage(state), folder, {"step": step, **trainer}, required),
            name="checkpoint",
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait()
        return time.perf_counter() - begin

    def check(self) -> None:
        """Raise the error of a save in the background."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until the save in the background is complete."""
        if self._thread is not None:
            self._join(self._thread)
            self._thread = None
        self.check()

    def _join(self, thread: threading.Thread) -> None:
        """A slow save is not a stall while its files grow, or are read."""
        beat("saving")
        before = (0, 0)
        while thread.is_alive():
            thread.join(POLL_S * max(1, self.mesh.world // FILES_PER_LOOK))
            now = (sum(map(bytes_in, step_folders(self.root)[:1])), self._bytes_read)
            if now != before:
                beat("saving")
            before = now

    def _check_space(self, state: dict[str, Any]) -> None:
        needed = sum(
            t.numel() * t.element_size() for t in tree_leaves(state) if isinstance(t, torch.Tensor)
        )
        make_folder(self.root)
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise CheckpointError(
                f"no space for a checkpoint in {self.root}: it takes about {needed / 2**20:.1f} MiB and "
                f"{free / 2**20:.1f} MiB are free; {self.newest_complete()}; free some space or set logging.dir elsewhere"
            )

    def newest_complete(self) -> str:
        return (
            f"the newest complete one is step {self.last_saved}"
            if self.last_saved
            else "none is complete yet"
        )

    def _write(self, staged: Any, folder: Path, trainer: dict[str, Any], required: bool) -> None:
        """In the background: shards, then hashes, then, on rank 0, the manifest and the pruning.

        dcp.async_save has no part in it: its thread would begin on GPU 0 and create a CUDA context
        there, since the current device is that of a thread and dcp.save synchronizes its stream.
        """
        try:
            if self.mesh.device.type == "cuda":
                torch.cuda.set_device(self.mesh.device)
            for last in (False, True):
                if self._written(staged, folder, trainer, last=last):
                    self.last_saved = trainer["step"]
                    return
            if required:
                raise CheckpointError(
                    f"the disk did not keep the checkpoint {folder.name} as it was written, twice, and there is "
                    f"none after it; {self.newest_complete()}; check the disk, or the server, of {self.root}"
                )
        except (OSError, CheckpointException) as error:
            self._error = self._explain(error, folder)
        except BaseException as error:  # not a disk error: keep its message and traceback
            self._error = error

    def _written(self, staged: Any, folder: Path, trainer: dict[str, Any], *, last: bool) -> bool:
        """Whether it is on the disk as it was written; if not, it is tried again unless this is the `last` try.
        The same on all ranks."""
        if self.mesh.first:
            make_folder(folder)  # where the first try was set aside
        dcp.save(staged, checkpoint_id=folder, process_group=self.mesh.background)
        own = {p.name: file_entry(p) for p in folder.glob(f"__{self.mesh.rank}_*")}
        files = {name: entry for found in self._gather(own) for name, entry in found.items()}
        if self.mesh.first:
            own |= self._write_manifest(folder, files, trainer)
        if self.reads_back and not self._same_on_disk(folder, own, last):
            return False
        if self.mesh.first:
            read_manifest(folder)  # every rank's files are in this folder, at their sizes
            self._prune(trainer["step"], best_of(trainer))
            if self.mirror is not None:
                self.mirror.update(trainer["step"])
        return True

    def _same_on_disk(self, folder: Path, own: dict[str, Any], last: bool) -> bool:
        """Each rank reads what it wrote, on its own machine. What differs is set aside by rank 0."""
        problems = [p for found in self._gather(damaged(folder, own, self._moved)) for p in found]
        if problems and self.mesh.first:
            became = set_aside(folder)
            then = (
                f"training goes on, and {self.newest_complete()}" if last else "it is written again"
            )
            words = (
                f"the disk did not keep the checkpoint {folder.name} as it was written: {'; '.join(problems)}; "
                f"{became}, and {then}; check the disk, or the server, of {self.root}"
            )
            log.warning("%s", words)
            self.tell("warning", words=words)
        if problems:
            self._gather(None)  # no rank begins again in the folder that is being renamed
        return not problems

    def _moved(self, size: int) -> None:
        self._bytes_read += size

    def _gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the thread that saves."""
        gathered: list[Any] = [value] * self.mesh.world
        if self.mesh.world > 1:
            dist.all_gather_object(gathered, value, group=self.mesh.background)
        return gathered

    def _write_manifest(
        self, folder: Path, shards: dict[str, Any], trainer: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the entries of the files that are not a rank's, itself included."""
        for name, document in (("recipe.json", self.recipe), ("assets.json", self.assets)):
            write(folder / name, json.dumps(document), sync=True)
        names = ("recipe.json", "assets.json", METADATA)
        common = {name: file_entry(folder / name) for name in names}
        manifest = {
            "trainer": trainer,
            "world": self.mesh.world,
            "time": time.time(),
            "files": {**shards, **common},
        }
        write(folder / MANIFEST, json.dumps(sealed(manifest), indent=1), sync=True)
        return {**common, MANIFEST: file_entry(folder / MANIFEST)}

    def _prune(self, step: int, best: int | None) -> None:
        """Keep the newest complete checkpoint up to `step`, the newest `keep` of those that were due, and the
        `best`; a later one than `step` must be damaged, or this run would have resumed from it.
        Incomplete ones, which killed runs leave, and damaged ones, which it passed over, are removed."""
        with self._pruning:
            self._pruned = (step, best)
            self._remove_old(step, best)

    def _prune_again(self) -> None:
        """What the mirror was still copying at the last save."""
        with self._pruning:
            if self._pruned is not None:
                self._remove_old(*self._pruned)

    def _remove_old(self, step: int, best: int | None) -> None:
        folders = [folder for folder in step_folders(self.root) if step_of(folder) <= step]
        complete = [folder for folder in folders if (folder / MANIFEST).is_file()]
        whole = [folder for folder in complete if folder not in self._passed_over]
        due = [folder for folder in whole if not _only_best(folder)]
        kept = [*complete[:1], *due[: self.keep], self.root / f"step-{best}"]
        if self.mirror and self.mirror.busy:
            kept.append(self.mirror.busy)
        for folder in folders:
            if folder in kept:
                continue
            try:
                remove(folder)
            except OSError as error:
                log.warning("could not remove the old checkpoint %s (%s)", folder, error)
                continue
            if folder in self._passed_over:
                words = (
                    f"{folder.name} is removed: it was damaged, and a newer checkpoint is complete"
                )
                self.tell("warning", words=words)

    def _explain(self, error: BaseException, folder: Path) -> CheckpointError:
        free = shutil.disk_usage(self.root).free / 2**20 if self.root.exists() else 0.0
        if self.mesh.first and not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
        words = str(error)
        failures = getattr(error, "failures", None)  # torch's CheckpointException, by rank
        if failures:
            rank, (cause, _) = next(iter(failures.items()))
            words = f"rank {rank}: {cause}"
        return CheckpointError(
            f"the checkpoint {folder.name} could not be written to {self.root}, where {free:.1f} MiB "
            f"were free ({words}); {self.newest_complete()}; nothing of it was kept"
        )


def _only_best(folder: Path) -> bool:
    """Whether it was saved only because it was the best then, at a step where no checkpoint was due."""
    try:
        return bool(read_manifest(folder)["trainer"].get("only_best"))
    except (OSError, CheckpointError):  # a damaged one is no reason to end a run
        return False
