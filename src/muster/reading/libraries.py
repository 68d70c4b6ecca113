"""What other libraries raise for a damaged file is any of a dozen: one sentence of ours instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from muster.errors import MusterError, UnreadableError
from muster.reading.text import in_one_line, printable

MOST = 300  # characters of a library's own words


@contextmanager
def refused(
    where: object,
    cure: str = "copy it again",
    kind: type[MusterError] = UnreadableError,
    problem: str = "cannot be read",
) -> Iterator[None]:
    """Around a library that reads, or builds from, what anybody may have written. `where` names it."""
    try:
        yield
    except MusterError:
        raise
    except BaseException as error:
        # Libraries in Rust end damaged input with an exception of this name, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = in_one_line(error, MOST) or type(error).__name__
        raise kind(f"{printable(str(where))} {problem} ({words}); {cure}") from None
