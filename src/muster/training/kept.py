"""The checkpoints of a run as they are on disk: listed, verified, and the old ones found. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from muster.errors import CheckpointError
from muster.observe.results import MANIFEST, best_step, step_folders, step_of
from muster.training.manifest import bytes_in, read_manifest
from muster.training.read_back import SET_ASIDE, damaged


@dataclass(frozen=True)
class Kept:
    folder: Path
    bytes: int
    problem: str | None = None  # why it cannot be loaded
    saved: float | None = None  # seconds since 1970
    world: int | None = None  # ranks that saved it
    best: bool = False

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).is_file()


def kept_in(root: Path, *, verify: bool = False) -> list[Kept]:
    """Every `step-<n>` folder, newest first. Sizes are always held against the manifest; `verify` reads each
    file from the disk and holds it against its checksum."""
    best = best_step(root)
    return [_kept(folder, best, verify) for folder in step_folders(root)]


def _kept(folder: Path, best: int | None, verify: bool) -> Kept:
    size = bytes_in(folder)
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:  # OSError: the run removes it just now
        return Kept(folder, size, str(error).removeprefix(f"{folder}: "))
    problems = damaged(folder, manifest["files"]) if verify else []
    return Kept(
        folder,
        size,
        "; ".join(problems) or None,
        manifest.get("time"),
        manifest.get("world"),
        step_of(folder) == best,
    )


def set_aside_in(root: Path) -> list[Path]:
    """What was not on the disk as it was written, and was renamed."""
    return sorted(root.glob(f"step-*{SET_ASIDE}"))


def old_ones(root: Path, keep: int) -> tuple[list[Path], list[Kept]]:
    """What may go: all but the newest `keep` whose files match their checksums, and the best; interrupted saves
    and what was set aside too. Nothing where no checkpoint is whole. Beside it those that are damaged: they stay,
    and do not count."""
    best, whole = best_step(root), 0
    gone, bad = set_aside_in(root), list[Kept]()
    for folder in step_folders(root):
        if not (folder / MANIFEST).is_file():
            gone.append(folder)
        elif whole < keep:
            found = _kept(folder, best, verify=True)
            whole += found.problem is None
            bad += [found] if found.problem else []
        elif step_of(folder) != best:
            gone.append(folder)
    return (gone if whole else []), bad
