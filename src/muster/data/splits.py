"""Which split a file of a corpus belongs to, by its name and those of its folders.

A plain name (`train`, `test-00000-of-00005`, a folder `dev`) is a claim by itself. One that only holds
such a word among others (`training`, `wiki.test`, `dev-clean`, `test-driven-design`) may be meant otherwise.
It counts where the other names agree that there are splits: beside a file of a plain name or of another
split, or where more files have a split in their names than have none. Otherwise it is a file like the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from muster.errors import DataError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
NAMED_FILES = 5
_PLAIN: dict[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "t10k": "test",
}
_SIMILAR: dict[str, Split] = {**_PLAIN, "training": "train", "testing": "test"}
# What a plain name may have besides: the numbers of shards, a hash, and the words of MNIST's files.
_NUMBERING = re.compile(r"\d+|of|part\d*|shard\d*|[0-9a-f]{16}|images|labels|idx\d|ubyte|data")


@dataclass(frozen=True)
class Claim:
    split: Split
    plain: bool


@dataclass(frozen=True)
class Assigned:
    """The split of every file; None where no name says one."""

    of: dict[Path, Split | None] = field(default_factory=dict)
    not_counted: dict[Path, Split] = field(
        default_factory=dict
    )  # similar names, and of which split

    def of_split(self, split: Split) -> list[Path]:
        """Its files. Those of no split are training data if none is marked as that."""
        found = [path for path, name in self.of.items() if name == split]
        return self.unmarked if split == "train" and not found else found

    @property
    def unmarked(self) -> list[Path]:
        return [path for path, split in self.of.items() if split is None]

    @property
    def unclaimed(self) -> list[Path]:
        """Files that no split takes: those without a mark, beside marked training files."""
        return self.unmarked if "train" in self.of.values() else []


def claim(path: Path) -> Claim | None:
    """What the file's name, else its nearest folder's, says. A plain name goes before a similar one.

    `path` starts at the corpus, so that only folders inside it count.
    """
    found = [_claim(part) for part in (_stem(path), *reversed(path.parent.parts))]
    claims = [claim for claim in found if claim]
    return next((claim for claim in claims if claim.plain), claims[0] if claims else None)


def _claim(name: str) -> Claim | None:
    words = [word for word in re.split(r"[-_.\s]+", name.lower()) if word]
    named = [word for word in words if word in _SIMILAR]
    if len({_SIMILAR[word] for word in named}) != 1:
        return None
    first, *rest = words
    plain = first in _PLAIN and all(_NUMBERING.fullmatch(word) for word in rest)
    return Claim(_SIMILAR[named[0]], plain)


def _stem(path: Path) -> str:
    return path.stem if path.suffix != ".gz" else Path(path.stem).stem


def assign(paths: Iterable[Path], root: Path) -> Assigned:
    """The split of each of the files below `root`."""
    return assign_names({path: path.relative_to(root) for path in paths})


def assign_names(names: Mapping[Path, Path]) -> Assigned:
    """The split of each file, by its path from where the corpus begins."""
    claims = {path: claim(name) for path, name in names.items()}
    marked = [found for found in claims.values() if found]
    plain = any(found.plain for found in marked)
    several = len({found.split for found in marked}) > 1
    counts = plain or several or len(marked) > len(claims) - len(marked)
    return Assigned(
        {path: found.split if found and counts else None for path, found in claims.items()},
        {path: found.split for path, found in claims.items() if found and not counts},
    )


def refuse_unclaimed(assigned: Assigned, spec: str, key: str, size: Callable[[Path], int]) -> None:
    """More text, audio or images in files of no split than in the training files is an error: the names
    were not meant so. Less is told by `account`."""
    unclaimed, train = assigned.unclaimed, assigned.of_split("train")
    if sum(map(size, unclaimed)) <= sum(map(size, train)):
        return
    raise DataError(
        f"{key}: {spec} has {len(train)} file(s) named as training data ({listed(train)}) and "
        f"{len(unclaimed)} that belong to no split and hold more ({listed(unclaimed)}); if they are "
        "training data too, move them into a folder train/; else name the files to train on by a glob"
    )


def listed(paths: Iterable[Path], most: int = NAMED_FILES) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")
