"""Complete checkpoints, copied to a bucket in the background: `checkpoint.mirror`.

Rank 0 copies, since all ranks write into one run directory. The manifest is copied last, and removed
first, so that a checkpoint in the bucket is complete or ignored, as on disk. A mirror that fails never
stops the training: it is said, and the next checkpoint is copied as if nothing had been.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from muster.data.remote import AT_A_TIME, download
from muster.data.remote.bucket import Bucket
from muster.data.remote.retry import retried
from muster.data.remote.store import RemoteFile
from muster.errors import CheckpointError, MusterError
from muster.observe.heartbeat import beat
from muster.observe.results import MANIFEST, best_of, complete_steps, step_folders, step_of
from muster.training.manifest import read_manifest, verify
from muster.urls import scheme

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often a waiting rank checks the progress of a copy
PROBE_S = 12.0  # of tries to reach it, before a run starts
PATIENCE_S = 240.0  # without a byte, until it waits no longer: less than what counts as a stall


def open_bucket(address: str, *, quick: bool = False) -> tuple[Bucket, str]:
    """The bucket, and the folder in it."""
    kind = scheme(address)
    assert kind is not None
    name, _, folder = address.partition("://")[2].partition("/")
    return Bucket(kind, name, quick=quick), folder.strip("/")


def check(address: str) -> None:
    """It can be written to; the error names the key, after some `PROBE_S` where nothing answers."""
    try:
        bucket, folder = open_bucket(address, quick=True)
        probe = f"{folder}/.muster-{os.urandom(4).hex()}".lstrip("/")
        retried(address, lambda: deque(bucket.write(Path(os.devnull), probe), maxlen=0), PROBE_S)
        retried(address, lambda: bucket.delete(probe), PROBE_S)
    except MusterError as error:
        raise CheckpointError(f"checkpoint.mirror: {error}") from None


class Mirror:
    """The copies of one run's checkpoints, in `<address>/<run>/step-<n>`: after each copy those that the run
    keeps on disk, and at least the newest `keep`."""

    def __init__(self, address: str, run: str, root: Path, keep: int) -> None:
        self.bucket, folder = open_bucket(address)
        self.address, self.folder = f"{address.rstrip('/')}/{run}", f"{folder}/{run}".strip("/")
        self.root, self.keep = root, keep
        self.copied: list[int] = []
        self.failed: dict[int, str] = {}
        self.tell: Callable[..., None] = lambda what, **details: None  # an event of the run
        self.busy: Path | None = None  # being copied: not to be removed …
        self.released: Callable[[], None] = lambda: None  # … until then
        self._newest = -1
        self._wanted = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._moved = 0

    def update(self, newest: int) -> None:
        """Start copying what is complete on disk, up to the step `newest`: a later one is not read back yet. While a
        copy is under way, it is looked at again after it."""
        with self._lock:
            self._wanted, self._newest = True, newest
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Until everything is copied, or has failed, or does not move. A slow copy is not a stall while it moves."""
        beat("copying to the mirror")
        moved, since = self._moved, time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(POLL_S)
            if self._moved != moved:
                beat("copying to the mirror")
                moved, since = self._moved, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                step = step_of(self.busy) if self.busy else None
                self._say(step, TimeoutError(f"not a byte was copied in {PATIENCE_S:.0f} s"))
                return

    def summary(self) -> dict[str, Any]:
        """For the results."""
        return {"address": self.address, "copied": self.copied, "failed": self.failed}

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            try:
                self._copy_missing()
                self.released()
                self._prune()
            except Exception as error:  # whatever it is, training goes on
                self._say(step_of(self.busy) if self.busy else None, error)
            self.busy = None

    def _copy_missing(self) -> None:
        """The newest first; one that is damaged, or that training removes meanwhile, is not wanted."""
        for folder in step_folders(self.root):
            if step_of(folder) > self._newest:
                continue
            self.busy = folder
            try:
                manifest, names = _text(folder / MANIFEST), sorted(read_manifest(folder)["files"])
            except CheckpointError:
                continue
            if manifest == self._there(folder.name):
                continue
            self._copy(folder, names)
            self.copied.append(step_of(folder))
            self.failed.pop(step_of(folder), None)
        self.busy = None

    def _say(self, step: int | None, error: Exception) -> None:
        if step is not None:
            self.failed[step] = str(error)
        what = "the mirror" if step is None else f"step-{step}"
        log.warning("%s: %s was not brought up to date: %s", self.address, what, error)
        self.tell("mirror failed", step=step, address=self.address, why=str(error))

    def _there(self, name: str) -> str | None:
        """The manifest of that checkpoint in the bucket."""
        files = self._objects(f"{self.folder}/{name}")
        found = next((file for file in files if file.relative == MANIFEST), None)
        if found is None:
            return None
        return retried(found.url, lambda: b"".join(self.bucket.read(found, 0))).decode()

    def _copy(self, folder: Path, names: list[str]) -> None:
        target = f"{self.folder}/{folder.name}"
        self._remove(target)  # of an earlier start, which came this far too
        for name in [*names, MANIFEST]:  # the parts of one are sent at the same time
            self._upload(folder, target, name)

    def _upload(self, folder: Path, target: str, name: str) -> None:
        def write() -> None:
            for moved in self.bucket.write(folder / name, f"{target}/{name}"):
                self._moved += moved

        retried(f"{self.address}/{folder.name}/{name}", write)

    def forget(self, names: Sequence[str]) -> None:
        """Removes these checkpoints, which are gone on disk too."""
        try:
            for name in names:
                self._remove(f"{self.folder}/{name}")
        except MusterError as error:
            self._say(None, error)

    def _prune(self) -> None:
        """What is not on disk, other than the newest `keep`; also what an earlier start left half-copied."""
        here = {folder.name for folder in step_folders(self.root)}
        kept = complete(self.bucket, self.folder)[: self.keep]
        for name in _steps(self._objects(self.folder)):
            if name not in here and name not in kept:
                self._remove(f"{self.folder}/{name}")

    def _remove(self, folder: str) -> None:
        keys = [f"{folder}/{file.relative}" for file in self._objects(folder)]
        for key in sorted(keys, key=_manifest_first):
            retried(self.address, partial(self.bucket.delete, key))

    def _objects(self, folder: str) -> list[RemoteFile]:
        return retried(self.address, partial(self.bucket.objects, folder))


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _manifest_first(key: str) -> bool:
    return not key.endswith(f"/{MANIFEST}")


def complete(bucket: Bucket, folder: str) -> list[str]:
    """Names of the `step-<n>` folders with a manifest, newest first."""
    found = retried(folder, lambda: bucket.objects(folder))
    return _steps([file for file in found if file.relative.count("/") == 1 and _is_manifest(file)])


def _steps(files: Iterable[RemoteFile]) -> list[str]:
    """The `step-<n>` folders that these files are in, newest first."""
    folders = {Path(file.relative).parts[0] for file in files}
    steps = [Path(name) for name in folders if step_of(Path(name)) >= 0]
    return [step.name for step in sorted(steps, key=step_of, reverse=True)]


def _is_manifest(file: RemoteFile) -> bool:
    return Path(file.relative).name == MANIFEST


def restore(address: str, root: Path) -> Path | None:
    """The newest whole checkpoint of the run (or the very checkpoint) at `address`, copied to `root`, and the
    run's best one; None where there is none. Files are held against the manifest, and a checkpoint has its name
    only then."""
    bucket, folder = open_bucket(address)
    wanted = complete(bucket, folder)
    if step_of(Path(folder)) >= 0:
        folder, _, name = folder.rpartition("/")
        wanted = [name]
    for name in wanted:
        newest = _fetched(bucket, f"{folder}/{name}", root / name)
        if newest is None:
            continue
        best = best_of(json.loads((newest / MANIFEST).read_text())["trainer"])
        if (other := f"step-{best}") in wanted and other != name:
            _fetched(bucket, f"{folder}/{other}", root / other)
        return newest
    return None


def _fetched(bucket: Bucket, folder: str, target: Path) -> Path | None:
    files = retried(folder, lambda: bucket.objects(folder))
    try:
        return _fetch(bucket, files, target)
    except CheckpointError as error:
        log.warning("%s of bucket %s is passed over: %s", folder, bucket.name, error)
        return None


def _fetch(bucket: Bucket, files: list[RemoteFile], target: Path) -> Path:
    whole = target.with_name(f".{target.name}.partial")
    whole.mkdir(parents=True, exist_ok=True)
    # Of an earlier try, files are there whole.
    missing = [file for file in files if not (whole / file.relative).is_file()]
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="mirror") as pool:
        deque(
            pool.map(lambda file: download(bucket, file, whole / file.relative), missing), maxlen=0
        )
    try:
        verify(whole, read_manifest(whole))
    except CheckpointError:
        shutil.rmtree(whole)
        raise
    if target.exists():  # without a manifest: its save was cut off
        shutil.rmtree(target)
    return whole.rename(target)


def restore_if_none(run: Path, name: str, mirror: str | None, resume: str) -> Path | None:
    """Into a run directory without a complete checkpoint: from where `checkpoint.resume` says, if that is a bucket,
    else from what this run's mirror has."""
    root = run / "checkpoints"
    asked = scheme(resume) is not None
    address = resume if asked else f"{mirror.rstrip('/')}/{name}" if mirror else None
    if address is None or complete_steps(run):
        return None
    try:
        found = restore(address, root)
    except MusterError as error:
        key = "checkpoint.resume" if asked else "checkpoint.mirror"
        raise CheckpointError(f"{key}: {error}") from None
    if found is None and asked:
        raise CheckpointError(f"checkpoint.resume: no complete checkpoint in {address}")
    return found
