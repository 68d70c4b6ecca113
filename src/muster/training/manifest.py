"""The manifest of a checkpoint: the size and SHA-256 of each of its files. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import CheckpointError, UnreadableError
from muster.observe.results import MANIFEST, step_folders
from muster.reading import json_file
from muster.reading.files import is_file
from muster.reading.inside import inside
from muster.reading.text import in_one_line

FORMAT = 2  # without a checksum of the manifest itself: still read
SEALED = 4  # with one. No single bit turns one number into the other


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["trainer"]["step"])

    @property
    def recipe(self) -> dict[str, Any]:
        """As it was saved: it may be of an older version, and the checkpoint anybody's."""
        return self._document("recipe.json")

    @property
    def assets(self) -> dict[str, Any]:
        return self._document("assets.json")

    def _document(self, name: str) -> dict[str, Any]:
        try:
            return json_file.read(self.path / name, most=json_file.MOST_TOKENIZER)
        except (OSError, UnreadableError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from None


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, with every file present at its size. `verify` checks the checksums."""
    try:
        manifest = json_file.read(folder / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is incomplete: it has no {MANIFEST}, so its save was interrupted"
        ) from None
    except (OSError, UnreadableError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged ({error})") from None
    if manifest.get("format") not in (FORMAT, SEALED):
        raise CheckpointError(
            f"{folder}: {MANIFEST} has format {in_one_line(manifest.get('format'))}, expected {SEALED}"
        )
    if manifest["format"] == SEALED and manifest.pop("sha256", None) != _checksum(manifest):
        raise CheckpointError(f"{folder}: {MANIFEST} does not match its own checksum")
    if missing := _misshapen(manifest):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged: it has no {missing}")
    for name, entry in manifest["files"].items():
        try:
            path = inside(folder, name, folder / MANIFEST)
        except UnreadableError as error:
            raise CheckpointError(str(error)) from None
        size = path.stat().st_size if is_file(path) else None
        if size != entry["bytes"]:
            has = "is missing" if size is None else f"has {size} bytes, expected {entry['bytes']}"
            raise CheckpointError(f"{folder}: {name} {has}")
    return manifest


def _misshapen(manifest: dict[str, Any]) -> str | None:
    """What is not there, or is of another kind: anyone may have written it."""
    files, trainer = manifest.get("files"), manifest.get("trainer")
    if not isinstance(trainer, dict) or not _is_count(trainer.get("step")):
        return "step"
    world, time = manifest.get("world", 1), manifest.get("time", 0)
    if not _is_count(world) or not isinstance(time, int | float):
        return "world and time"
    if not isinstance(files, dict) or not files:
        return "files"
    for name, entry in files.items():
        whole = isinstance(entry, dict) and _is_count(entry.get("bytes"))
        if not whole or not isinstance(entry.get("sha256"), str):
            return f"size and checksum of {in_one_line(name)}"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """With its format and its own checksum: the step and the place in the data are in no other file."""
    whole = {"format": SEALED, **manifest}
    return {**whole, "sha256": _checksum(whole)}


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Check the checksums of every `parts`-th file, so that ranks share the reading."""
    for name in sorted(manifest["files"])[part::parts]:
        if digest(folder / name) != manifest["files"][name]["sha256"]:
            raise CheckpointError(f"{folder}: {name} does not match its checksum")


def open_checkpoint(path: Path, part: int = 0, parts: int = 1) -> Saved:
    """The checkpoint at a path: a `step-<n>` folder, or a run's newest. Checks the checksums of every
    `parts`-th file; of none if `parts` is 0."""
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    folders = step_folders(path) or [path]
    if folders == [path] and (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a model's folder in transformers' form, not a run or a checkpoint of one; name the run, or "
            f"load it in transformers (from_pretrained). To train on from it: model.pretrained={path}"
        )
    if folders == [path] and not any(path.glob("*.distcp")):
        raise CheckpointError(
            f"no complete checkpoint in {path}: none was ever saved there (a run with "
            "checkpoint.final=false may end without one)"
        )
    problems = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            if parts:
                verify(folder, manifest, part, parts)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return Saved(folder, manifest)
    raise CheckpointError(f"no complete checkpoint in {path}: {'; '.join(problems)}")


def bytes_in(folder: Path) -> int:
    """Of all files, ignoring those that vanish."""
    total = 0
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
    return total


def remove(folder: Path) -> None:
    """The manifest goes first: half-deleted is incomplete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}
