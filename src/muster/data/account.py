"""What a run reads: for each split its files, samples, tokens or hours; and what was left out and why, file
by file. Printed before the first step, and kept in the run directory as data.json.

A source takes part with a method `account`, which says what each of its files holds, and an attribute
`left_out`, samples by reason. One without them is only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.data import corpus
from muster.data.overlap import Overlap, find_overlap, unseen
from muster.data.splits import SPLITS, Split, listed
from muster.workloads import Content

if TYPE_CHECKING:
    from muster.data.loader import Source

# What a recipe names for each split: training data may be several corpora.
Specs = Mapping[Split, str | Sequence[str] | None]

DATA_FILE = "data.json"
NAMED_FILES = 10  # in print
MOST_FILES = 10_000  # that data.json names as not read


@dataclass(frozen=True)
class FileAccount:
    """What one file gave to a split."""

    file: str
    count: int  # of `unit` that are used; a text's documents are not the samples of a batch
    unit: str  # clips, images, documents, rows
    amounts: dict[str, float] = field(default_factory=dict)  # documents, tokens, hours
    left_out: dict[str, int] = field(default_factory=dict)  # rows, by reason


@dataclass(frozen=True)
class SplitAccount:
    split: Split
    samples: int  # that a batch is made of: clips, images, packed sequences
    files: list[FileAccount]
    left_out: dict[str, int]

    @property
    def amounts(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for file in self.files:
            total.update(file.amounts)
        return dict(total)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": len(self.files),
            "samples": self.samples,
            **self.amounts,
            "left_out": self.left_out,
            "by_file": [vars(file) for file in self.files],
        }

    def lines(self) -> Iterator[str]:
        amounts = "".join(f", {_amount(name, value)}" for name, value in self.amounts.items())
        where = f" in {len(self.files)} file(s)" if self.files else ""
        yield f"{self.split}: {self.samples:,} samples{amounts}{where}"
        for why, count in self.left_out.items():
            files = [Path(f.file).name for f in self.files if why in f.left_out]
            named = f" ({', '.join(files[:5])}{' …' if len(files) > 5 else ''})" if files else ""
            yield f"{self.split}: left out {count:,}: {why}{named}"


@dataclass(frozen=True)
class NotRead:
    """A file that lies in a folder of the recipe and that no split uses."""

    file: Path
    why: str


@dataclass(frozen=True)
class Account:
    splits: list[SplitAccount]
    not_read: list[NotRead]
    notes: list[str]
    overlaps: dict[Split, list[Overlap]] = field(default_factory=dict)  # with the training data

    def to_json(self) -> dict[str, Any]:
        return {
            "splits": {part.split: part.to_json() for part in self.splits},
            "files_not_read": len(self.not_read),
            "not_read": [
                {"file": str(found.file), "why": found.why} for found in self.not_read[:MOST_FILES]
            ],
            "notes": self.notes,
            "overlap": {
                split: [{**vars(part), "words": part.words(split)} for part in parts]
                for split, parts in self.overlaps.items()
            },
            "unseen": {split: unseen(parts) for split, parts in self.overlaps.items()},
        }

    def lines(self) -> list[str]:
        """In words: what is there, then what is not used."""
        words = [line for part in self.splits for line in part.lines()]
        for split in SPLITS[1:]:
            if split not in [part.split for part in self.splits]:
                words.append(f"{split}: none")
        found = [o.words(split) for split, parts in self.overlaps.items() for o in parts]
        return words + self.notes + found + self.warnings()

    def warnings(self) -> list[str]:
        reasons: dict[str, list[Path]] = {}
        for found in self.not_read:
            reasons.setdefault(found.why, []).append(found.file)
        return [
            f"warning: {len(files)} file(s) are not used, {why}: {listed(files, NAMED_FILES)}"
            for why, files in reasons.items()
        ]


def make_account(
    sources: Callable[[Split], Source | None],
    specs: Specs,
    content: Content | None,
    max_files: int | None = None,
    *,
    check_overlap: bool = True,
) -> Account:
    """Of a run whose recipe names the corpora `specs`; `sources` gives the samples of each split."""
    parts, not_read = [], []
    for split in SPLITS:
        if (source := sources(split)) is not None:
            parts.append(split_account(split, source))
            unnamed: Callable[[], list[Path]] = getattr(source, "unnamed", list)
            not_read += [
                NotRead(path, "which no row of their metadata names") for path in unnamed()
            ]
    overlaps = _overlaps(sources) if check_overlap else {}
    if content is None:  # a task of the user's own reads its data by itself
        return Account(parts, [], [], overlaps)
    found, notes = not_used(specs, content, max_files)
    return Account(parts, not_read + found, notes, overlaps)


def _overlaps(sources: Callable[[Split], Source | None]) -> dict[Split, list[Overlap]]:
    train, found = sources("train"), {}
    for split in SPLITS[1:]:
        source = sources(split)
        if train is not None and source is not None:
            found[split] = find_overlap(source, train)
    return found


def split_account(split: Split, source: Source) -> SplitAccount:
    """A source without a method `account` is only counted."""
    files: Callable[[], list[FileAccount]] = getattr(source, "account", list)
    left_out: Counter[str] = Counter()
    for file in (found := files()):
        left_out.update(file.left_out)
    of_source = getattr(source, "left_out", {})
    return SplitAccount(split, len(source), found, {**left_out, **of_source})


def not_used(
    specs: Specs, content: Content, max_files: int | None
) -> tuple[list[NotRead], list[str]]:
    """Files of the named folders that no split uses, and remarks on names."""
    used: set[Path] = set()
    train, held_out = specs["train"], {split: _one(specs[split]) for split in SPLITS[1:]}
    trains = [train] if isinstance(train, str) else list(train or [])
    for split in SPLITS:
        named = (held_out["validation"], held_out["test"])
        used.update(corpus.split_files(trains, *named, split, max_files, content))
    named_by: dict[str, Split] = {}
    for split, spec in [*(("train", spec) for spec in trains), *held_out.items()]:
        if spec is not None:
            named_by.setdefault(spec, split)
    not_read, notes = [], []
    for spec, split in named_by.items():
        found, assigned = corpus.find(spec, f"data.{split}", content)
        if assigned.not_counted:
            notes.append(_not_counted(assigned.not_counted))
        not_read += [NotRead(*passed) for passed in corpus.passed_over(spec, content, set(found))]
        unclaimed = set(assigned.unclaimed)
        for path in found:
            if path in unclaimed:
                why = "claimed by no split: no split in their names, beside files named as train"
            else:
                why = _why_unused(assigned.of.get(path), specs, max_files)
            not_read.append(NotRead(path, why))
    unique = {found.file: found for found in reversed(not_read) if found.file not in used}
    return sorted(unique.values(), key=lambda found: (found.why, found.file)), notes


def _not_counted(names: Mapping[Path, Split]) -> str:
    """Of one split, or they would count. A warning where data to score are trained on."""
    split = next(iter(names.values()))
    told = (
        f"{listed(names)}: no split by the name alone, since the files beside it name none; "
        "taken like them"
    )
    if split == "train":
        return told
    return f"warning: {told}; {split} data belong into a folder {split}/"


def _one(spec: str | Sequence[str] | None) -> str | None:
    assert spec is None or isinstance(spec, str)
    return spec


def _why_unused(split: Split | None, specs: Specs, max_files: int | None) -> str:
    if split in (None, "train"):
        return f"beyond data.max_parquet_files={max_files}"
    return f"named as {split} data, for which data.{split} names {specs[split]}"


def _amount(name: str, value: float) -> str:
    return f"{value:.2f} {name}" if name == "hours" else f"{value:,.0f} {name}"
