"""How one case ended."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from fuzzing.mutate import SECRET
from muster.errors import MusterError, RecipeError

TAKEN, REFUSED = "taken", "refused"
TRACE, UNCLEAR, HANG = "stack trace", "no sentence", "hang"
LEFT, MEMORY, WRONG, DIED = "left files", "memory", "wrongly taken", "died"
BAD = (TRACE, UNCLEAR, HANG, LEFT, MEMORY, WRONG, DIED)
LONGEST = 3000  # characters of a sentence
CONTROLS = {*map(chr, range(32)), *map(chr, range(127, 160)), "\u2028", "\u2029", "\u202e"}


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""
    seconds: float = 0.0


class Hang(BaseException):
    """Raised in a case that takes too long; no reader catches it."""


def of_error(error: BaseException, names: tuple[str, ...]) -> Outcome:
    if isinstance(error, Hang):
        return Outcome(HANG, _place(error))
    if isinstance(error, MemoryError):
        return Outcome(MEMORY, _place(error))
    if not isinstance(error, MusterError):
        return Outcome(TRACE, f"{type(error).__name__} at {_place(error)}: {str(error)[:120]}")
    # A recipe of another trainer is told key by key, each on a line.
    several = isinstance(error, RecipeError) and all(
        re.match(r"[^:]+: \S", line) for line in str(error).split("\n")
    )
    problem = unclear(str(error).replace("\n", "; ") if several else str(error), names)
    if problem:
        return Outcome(UNCLEAR, f"{problem}, at {_place(error)}: {str(error)[:200]!r}")
    return Outcome(REFUSED, str(error))


def unclear(words: str, names: tuple[str, ...]) -> str | None:
    """Why it is not one sentence that a terminal can show and that names what it is about."""
    if "\n" in words.strip() or "\r" in words:
        return "several lines"
    if found := sorted(CONTROLS & set(words)):
        return f"control character {found[0]!r}"
    if any("\ud800" <= c <= "\udfff" for c in words):
        return "half a surrogate pair"
    if len(words) > LONGEST:
        return f"{len(words)} characters"
    if SECRET in words:
        return "tells what lies outside"
    if names and not any(name in words for name in names):
        return "names no file or key"
    return None


def _place(error: BaseException) -> str:
    """The innermost line of muster."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/muster/" in f.filename] or list(frames)
    if not own:
        return "?"
    return f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno} {own[-1].name}"
