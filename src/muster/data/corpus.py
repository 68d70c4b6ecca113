"""Which files a recipe's `data.train`, `data.validation` and `data.test` mean.

A corpus is a file, a folder of files (searched through), a glob, or `embedded:NAME`, which is at
hand wherever muster is. Splits are found the way Hugging Face lays them out, by the names of files and
folders (`train-00000-of-00005.parquet`, `default/test/0000.parquet`): see `splits`. The name of the
corpus itself says nothing: naming a folder `test-data` does not make all of it test data.

A corpus may also be a folder, a file or a glob of a bucket, a dataset of the Hugging Face Hub, or a file of a
web server: its files are found by their addresses, and copied to this machine when they are to be read.

Which files count depends on what the task reads: parquet always, the metadata file of a folder of
clips for speech, plain text and JSON lines for language, MNIST's IDX files for images.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from muster.data import remote
from muster.data.splits import Assigned, assign, assign_names, refuse_unclaimed
from muster.data.splits import Split as Split
from muster.errors import DataError
from muster.reading.files import expanded
from muster.urls import is_remote
from muster.workloads import Content, workload

EMBEDDED = "embedded:"
PYTHON_SOURCE = "embedded:python-source"
DIGITS = "embedded:digits"  # made by a library in memory: it has no files
METADATA = ("metadata.csv", "metadata.jsonl")  # which clips a folder has, and their texts
# What rows of a table may name.
MEDIA = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aiff", ".au", ".sph"} | {
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
}
ENDINGS: dict[Content, tuple[str, ...]] = {
    "speech": (".parquet", *(f"/{name}" for name in METADATA)),
    "text": (".parquet", ".jsonl", ".txt"),
    "images": (".parquet", "-ubyte", "-ubyte.gz"),
}
ONE_IN = 20  # Python sources is for validation
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def embedded_folder(name: str, content: Content = "speech") -> Path:
    root = Path(str(resources.files("muster"))) / "corpora"
    shipped = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("_"))
    if content == "speech" and name in shipped:
        return root / name
    made = {"speech": None, "text": PYTHON_SOURCE, "images": DIGITS}[content]
    known = shipped if made is None else [made.removeprefix(EMBEDDED)]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; nearest is {EMBEDDED}{nearest[0]}" if nearest else ""
    raise DataError(f"no embedded corpus {name!r}{hint}; there are: {', '.join(known)}")


def files(
    spec: str,
    key: str,
    split: Split,
    max_files: int | None = None,
    content: Content = "speech",
    *,
    fetch: bool = True,
) -> list[Path]:
    """The files of `spec`. `key` is the recipe key it came from, for the error. Without `fetch`, remote ones
    are not copied: they are at these paths only later."""
    found, assigned = find(spec, key, content)
    if assigned.of:
        of_split = assigned.of_split(split) or assigned.unmarked
        if not of_split:
            others = sorted(map(str, set(assigned.of.values())))
            raise DataError(
                f"{key}: {spec} has no {split} files, only {', '.join(others)}; name a file or a glob"
            )
        if split == "train":
            refuse_unclaimed(assigned, spec, key, remote.size_of)
        found = of_split
    found = found[:max_files]
    if fetch:
        remote.fetch(found)
    return found


def sibling_split(
    spec: str | Sequence[str], split: Split, content: Content = "speech"
) -> list[Path]:
    """Files of another split in the same corpus, or corpora, or nothing."""
    found = []
    for one in _each(spec):
        _, assigned = find(one, "data.train", content)
        found += [path for path, name in assigned.of.items() if name == split]
    remote.fetch(found)
    return found


def train_files(
    train: Sequence[str], max_files: int | None = None, content: Content = "speech"
) -> list[list[Path]]:
    """The training files of each of several corpora, at most `max_files` of each."""
    return [files(spec, "data.train", "train", max_files, content) for spec in train]


def split_files(
    train: str | Sequence[str],
    validation: str | None,
    test: str | None,
    split: Split,
    max_files: int | None = None,
    content: Content = "speech",
) -> list[Path]:
    """The files of a split, from what the recipe names; nothing where there is no such split.
    `max_files` limits the training files of each corpus."""
    if split == "train":
        return [path for part in train_files(_each(train), max_files, content) for path in part]
    named = {"validation": validation, "test": test}[split]
    if named is None:
        return sibling_split(train, split, content)
    return files(named, f"data.{split}", split, None, content)


def check(task: str, train: str | Sequence[str], validation: str | None, test: str | None) -> None:
    """Every corpus a recipe names exists, in a form that its task reads; remote files are not copied. A task
    of the user's own reads its data by itself."""
    content = workload(task).content
    if content is None:
        return
    for spec in _each(train):
        files(spec, "data.train", "train", None, content, fetch=False)
    if validation:
        files(validation, "data.validation", "validation", None, content, fetch=False)
    if test:
        files(test, "data.test", "test", None, content, fetch=False)


def _each(spec: str | Sequence[str]) -> Sequence[str]:
    return [spec] if isinstance(spec, str) else spec


def standard_library() -> tuple[list[Path], Assigned]:
    """The running Python's own sources without its tests, dealt into splits by their names."""
    root = Path(sysconfig.get_path("stdlib"))
    splits: dict[Path, Split | None] = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - _NOT_SOURCE)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
            validation = int.from_bytes(digest, "big") % ONE_IN == 0
            splits[path] = "validation" if validation else "train"
    return list(splits), Assigned(splits)


def find(spec: str, key: str, content: Content) -> tuple[list[Path], Assigned]:
    """Every file of `spec`, sorted, and their splits where `spec` is a place to pick them from."""
    endings, what = ENDINGS[content], " or ".join(e.lstrip("/") for e in ENDINGS[content])
    if spec == PYTHON_SOURCE and content == "text":
        return standard_library()
    if spec == DIGITS and content == "images":
        return [], Assigned()
    if is_remote(spec):
        found, names = remote.find(spec, key, tuple(e for e in endings if "/" not in e))
        return found, assign_names({path: Path(name) for path, name in names.items()})
    path = expanded(spec)
    if spec.startswith(EMBEDDED):
        path = embedded_folder(spec.removeprefix(EMBEDDED), content)
    if path.is_dir():
        found = sorted(p for p in _visible(path) if str(p).endswith(endings) and p.is_file())
        if content == "speech":
            found = _without_metadata(found)
        if not found:
            cure = "name another folder"
            if content == "speech":
                cure = f"`muster data make AUDIO_FOLDER {spec}` writes parquet from audio files"
            raise DataError(f"{key}: no {what} file in the folder {spec}; {cure}")
        return found, assign(found, path)
    if path.is_file():
        return [path], Assigned()
    matches = map(Path, glob.glob(str(path), recursive=True))
    found = sorted(p for p in matches if f"/{p}".endswith(endings))
    if not found:
        problem = f"matches no {what} file" if glob.has_magic(spec) else "does not exist"
        raise DataError(f"{key}: {spec} {problem}")
    return found, Assigned()


def passed_over(spec: str, content: Content, found: set[Path]) -> list[tuple[Path, str]]:
    """Files that lie in the folder, or match the glob, and are not among those `find` found; and why."""
    path = expanded(spec)
    if is_remote(spec) or spec.startswith(EMBEDDED) or not (path.is_dir() or glob.has_magic(spec)):
        return []
    there = _visible(path) if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    endings = ENDINGS[content]
    passed = []
    for file in there:
        read = f"/{file}".endswith(endings)
        clip = not read and content != "text" and file.suffix.lower() in MEDIA
        if clip or file in found or not file.is_file():  # asked last: there may be millions
            continue
        if read:
            passed.append((file, "other files of their folder hold the same clips"))
        else:
            what = ", ".join(ending.lstrip("/") for ending in endings)
            passed.append((file, f"of a kind that is not read ({what} are)"))
    return sorted(passed)


def _without_metadata(found: list[Path]) -> list[Path]:
    """Parquet goes before the clips it may have been made of; one metadata file per folder."""
    tables = [p for p in found if p.name not in METADATA]
    if tables:
        return tables
    folders = {p.parent: p for p in reversed(found)}  # metadata.csv sorts before metadata.jsonl
    return sorted(folders.values())


def _visible(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))
