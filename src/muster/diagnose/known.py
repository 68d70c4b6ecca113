"""Known failures, read from `failures.yaml`: patterns in the log, cause, cure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

import yaml

DATA = Path(__file__).with_name("failures.yaml")

# Every line of interest holds one of these. Searching them first makes a log of a gigabyte take
# a minute or two; a test checks each example of the catalogue against them.
# fmt: off
HINTS = (
    "rror", "ERROR", "WARN", "arning", "Traceback", "xception", "fail", "Fail", "FAIL", "kill",
    "Kill", "xit", "ignal", "SIG", "bort", "TIME", "imed", "imeout", "annot", "CANCELLED", "Cause",
    "Insufficient", "Assertion", "Xid", "Duplicate", "imbalance", "BackOff", "Back-off", "OOM",
    "mismatch", "Missing", "Illegal", "Segmentation", "enough", "nan", "False", "mapping", "nranks",
    "forked", "terminated",
)
# fmt: on
NO_DIGITS = str.maketrans("", "", "0123456789")


@dataclass(frozen=True)
class Known:
    """One entry of the catalogue. `order` is its position in the file: the specific before the general."""

    id: str
    section: str
    title: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    cure: str
    source: str
    examples: tuple[str, ...]
    order: int
    consequence: bool = False  # usually follows from something else that may also be in the log
    warning: bool = False  # harmless alone

    @property
    def level(self) -> int:
        """0 a cause, 1 what follows from one, 2 a warning."""
        return 2 if self.warning else int(self.consequence)

    def matches(self, text: str) -> bool:
        return any(pattern.search(text) for pattern in self.patterns)

    @cached_property
    def anchors(self) -> tuple[str, ...]:
        """For each pattern, a literal that a text must contain for it to match."""
        return tuple(longest_literal(pattern.pattern) for pattern in self.patterns)


@cache
def catalogue() -> tuple[Known, ...]:
    return tuple(_read(DATA.read_text(encoding="utf-8")))


def _read(document: str) -> Iterator[Known]:
    order = 0
    for section, entries in yaml.load(document, Loader=_loader()).items():
        for entry in entries:
            words = {key: entry[key].strip() for key in ("id", "title", "cause", "cure", "source")}
            yield Known(
                section=section,
                patterns=tuple(re.compile(pattern) for pattern in entry["patterns"]),
                examples=tuple(entry["examples"]),
                order=order,
                consequence=entry.get("consequence", False),
                warning=entry.get("warning", False),
                **words,
            )
            order += 1


def _loader() -> type:
    """The C parser where PyYAML has it: ten times as fast."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def match(text: str) -> list[Known]:
    """Known failures that match `text`, causes before consequences, the specific before the general."""
    found = [known for known in _candidates(text.translate(NO_DIGITS)) if known.matches(text)]
    return sorted(found, key=lambda known: (known.level, known.order))


@lru_cache(4096)
def _candidates(shape: str) -> tuple[Known, ...]:
    """Those with an anchor in `shape`, a text without its digits: lines of a log repeat their shapes."""
    return tuple(known for known in catalogue() if any(words in shape for words in known.anchors))


def longest_literal(pattern: str) -> str:
    """The longest literal, digits left out, that every match of `pattern` contains."""
    runs, depth = [""], 0
    for token in re.findall(r"\\.|\[[^\]]*\]|\{[^}]*\}|.", pattern):
        if token in "()":
            depth += 1 if token == "(" else -1
        if depth == 0 and token == "|":
            return ""
        plain = token[1:] if token[0] == "\\" and not token[1].isalnum() else token
        if token[0] in "?*{":
            runs[-1] = runs[-1][:-1]
        if depth == 0 and len(plain) == 1 and (plain != token or plain not in "()[]{}.?*+^$|"):
            runs[-1] += plain.translate(NO_DIGITS)
        else:
            runs.append("")
    return max(runs, key=len)


def suspicious(text: str) -> bool:
    """Whether a line, or a block of lines, may be about a failure."""
    return any(map(text.__contains__, HINTS))
