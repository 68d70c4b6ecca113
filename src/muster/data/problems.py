"""Rows that cannot be used, collapsed: each kind of problem once, with a count and its first rows."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from muster.errors import DataError

NAMED_ROWS = 5  # of each kind
NAMED_KINDS = 5
# What differs between two problems of one kind: quotations, numbers, names of files.
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\S*[\d/\\.]\S*")


@dataclass
class Kind:
    why: str  # of the first row
    count: int = 0
    rows: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.rows[0]}: {self.why}"
        more = " …" if self.count > len(self.rows) else ""
        return f"{self.count} × {self.why}: {', '.join(self._short_rows())}{more}"

    def _short_rows(self) -> list[str]:
        """A file's name once, before the first of its rows."""
        files = [row.rpartition(" row ")[0] for row in self.rows]
        return [
            row.removeprefix(f"{file} ") if file and file == before else row
            for row, file, before in zip(self.rows, files, ["", *files], strict=False)
        ]


@dataclass
class Problems:
    kinds: dict[str, Kind] = field(default_factory=dict)
    files: dict[str, Counter[str]] = field(default_factory=dict)  # reasons of each file's rows

    def add(self, row: str, why: str, file: str | None = None) -> int:
        """Count it; returns how many of its kind there are."""
        key = _VARIABLE.sub("#", why)
        kind = self.kinds.setdefault(key, Kind(why))
        kind.count += 1
        if len(kind.rows) < NAMED_ROWS:
            kind.rows.append(row)
        if file is not None:
            self.files.setdefault(file, Counter())[kind.why] += 1
        return kind.count

    @property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds.values())

    def __str__(self) -> str:
        """`12 × the text is null: a.parquet row 3, row 9 …; b.parquet row 0: not UTF-8`"""
        kinds = sorted(self.kinds.values(), key=lambda kind: -kind.count)
        named = "; ".join(map(str, kinds[:NAMED_KINDS]))
        return named + (f"; {len(kinds) - NAMED_KINDS} more kinds" * (len(kinds) > NAMED_KINDS))

    def check(self, total: int, max_bad_fraction: float, what: str, columns: str) -> str | None:
        """What to warn of, if anything. More than data.max_bad_fraction of `total` are an error, and so
        is nothing but problems; `columns` are then the keys to look at."""
        count = self.count
        if not count:
            return None
        if count == total or count > max_bad_fraction * total:
            cure = f"raise data.max_bad_fraction above {count / total:.3f} to train without them"
            if count == total:
                cure = f"see {columns}"
            raise DataError(
                f"{count} of {total} {what} cannot be read ({self}); fix them, or {cure}"
            )
        return f"{count} of {total} {what} cannot be read and are left out: {self}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kinds": {key: vars(kind) for key, kind in self.kinds.items()},
            "files": {file: dict(reasons) for file, reasons in self.files.items()},
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Problems:
        return cls(
            {key: Kind(**kind) for key, kind in saved["kinds"].items()},
            {file: Counter(reasons) for file, reasons in saved["files"].items()},
        )
