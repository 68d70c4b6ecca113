"""Which files a recipe's `data.train`, `data.validation` and `data.test` mean.

A corpus is a parquet file, a folder of them (searched through), a glob, or `embedded:NAME`, which
ships inside the package. Splits are found the way Hugging Face lays them out: a file or a folder
named after the split (`train-00000-of-00005.parquet`, `default/test/0000.parquet`). The name of the
corpus itself says nothing: naming a folder `test-data` does not make all of it test data.
"""

from __future__ import annotations

import difflib
import glob
import re
from importlib import resources
from pathlib import Path
from typing import Literal

from muster.errors import DataError

Split = Literal["train", "validation", "test"]
EMBEDDED = "embedded:"
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


def split_of(path: Path) -> str | None:
    """The split a file's name, else its nearest folder's, says it belongs to.

    `path` starts at the corpus, so that only folders inside it count.
    """
    for part in (path.stem, *reversed(path.parent.parts)):
        first = re.split(r"[-_.]", part.lower())[0]
        if first in _SPLIT_WORDS:
            return _SPLIT_WORDS[first]
    return None


def embedded_folder(name: str) -> Path:
    root = Path(str(resources.files("muster"))) / "corpora"
    known = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("_"))
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; nearest is {EMBEDDED}{nearest[0]}" if nearest else ""
        raise DataError(f"no embedded corpus {name!r}{hint}; there are: {', '.join(known)}")
    return root / name


def files(spec: str, key: str, split: Split, max_files: int | None = None) -> list[Path]:
    """The parquet files of `spec`. `key` is the recipe key it came from, for the error."""
    found, folder = _all_files(spec, key)
    if folder:
        splits = {f: split_of(f.relative_to(folder)) for f in found}
        of_split = [f for f in found if splits[f] == split]
        unmarked = [f for f in found if splits[f] is None]
        if not of_split and not unmarked:
            others = sorted(map(str, set(splits.values())))
            raise DataError(
                f"{key}: {spec} has no {split} files, only {', '.join(others)}; name a file or a glob"
            )
        found = of_split or unmarked
    return found[:max_files]


def sibling_split(spec: str, split: Split) -> list[Path]:
    """Files of another split in the same corpus, or nothing."""
    found, folder = _all_files(spec, "data.train")
    return [f for f in found if folder and split_of(f.relative_to(folder)) == split]


def _all_files(spec: str, key: str) -> tuple[list[Path], Path | None]:
    """Every parquet file of `spec`, sorted, and the folder to pick splits from where it is one."""
    if spec.startswith(EMBEDDED):
        folder = embedded_folder(spec.removeprefix(EMBEDDED))
        return sorted(folder.glob("*.parquet")), folder
    path = Path(spec).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*.parquet") if not _hidden(p, path))
        if not found:
            raise DataError(
                f"{key}: no .parquet file in the folder {spec}; `muster data make AUDIO_FOLDER {spec}` "
                "writes some from audio files"
            )
        return found, path
    if path.is_file():
        return [path], None
    found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if p.endswith(".parquet"))
    if not found:
        what = "matches no .parquet file" if glob.has_magic(spec) else "does not exist"
        raise DataError(f"{key}: {spec} {what}")
    return found, None


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
