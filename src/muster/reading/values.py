"""What a document of plain values may not hold, whatever format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Beyond it a float64, and most readers of JSON and YAML, no longer have each whole number.
LARGEST = 2**53
LONGEST = 64 * 2**10  # characters of one text
MOST = 10_000  # values in all
DEEPEST = 32


class Problem(NamedTuple):
    key: str  # dotted
    words: str


def first_problem(document: Any) -> Problem | None:
    """The first value that no recipe can mean, or None."""
    left = MOST
    waiting: list[tuple[str, int, Any]] = [("", 0, document)]
    while waiting:
        key, depth, value = waiting.pop()
        left -= 1
        if left < 0:
            return Problem(
                key, f"is one of more than {MOST:,} values; give a list that long as a file"
            )
        if isinstance(value, (Mapping, list, tuple)) and depth >= DEEPEST:
            return Problem(key, f"lists and sections lie more than {DEEPEST} deep in each other")
        if isinstance(value, Mapping):
            for name in value:
                if name is None or (isinstance(name, str) and _of_text(name)):
                    return Problem(key, "has a key that is no text that can be written")
            inner = [(f"{key}.{name}" if key else str(name), part) for name, part in value.items()]
        elif isinstance(value, (list, tuple)):
            inner = [(f"{key}[{number}]", part) for number, part in enumerate(value)]
        else:
            if words := _of_value(value):
                return Problem(key, words)
            continue
        waiting += [(name, depth + 1, part) for name, part in reversed(inner)]
    return None


def _of_value(value: Any) -> str | None:
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, int) and abs(value) > LARGEST:
        return "is a whole number beyond 2^53, which cannot be kept exactly; give a smaller one"
    return None


def _of_text(text: str) -> str | None:
    if len(text) > LONGEST:
        return f"is a text of {len(text):,} characters, more than {LONGEST:,}; give it as a file"
    if "\0" in text:
        return "holds a NUL character; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a character (a lone surrogate); write the whole character"
    return None
