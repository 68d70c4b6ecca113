"""How much one rendering of a chat template may do and make: a template comes with a model, from anywhere."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from typing import Any

MOST = 2**20  # characters, or parts of a list, that an operator makes of a number
LONGEST = 2**24  # characters of what is put together from text
MOST_BITS = 4096  # of a number
MOST_TURNS = 10**6  # of all loops, calls and filters of one rendering
PER_CALL = 10
PER_TURN = 1024  # characters or parts that count as one turn
WIDEST = 10_000  # of a field, an indent, a precision
PADDING = frozenset(["ljust", "rjust", "center", "zfill", "expandtabs"])
VALUES = frozenset(["default", "d", "sum", "select", "reject", "selectattr", "rejectattr"])
TEXTS = frozenset(["string", "pprint", "tojson", "join", "e", "escape", "forceescape", "urlencode"])

_left: ContextVar[list[int]] = ContextVar("turns of this rendering")


def begin() -> None:
    """A rendering: all its loops together take so many turns, so that loops in each other end too."""
    _left.set([MOST_TURNS])


def take(turns: int) -> None:
    left = _left.get(None)
    if left is not None:  # None while a template is compiled
        left[0] -= turns
        if left[0] < 0:
            refuse(f"its loops and calls take more than {MOST_TURNS:,} turns")


def refuse(words: str) -> None:
    from jinja2.exceptions import SecurityError

    raise SecurityError(words)


def counted(values: Any) -> Any:
    """What a loop goes over."""
    if isinstance(values, Sized):
        take(len(values))
        return values
    return _each(values) if isinstance(values, Iterable) else values


def _each(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        take(1)
        yield value


def bounded_range(*bounds: int) -> range:
    found = range(*bounds)
    if found and abs((found[-1] - found[0]) // found.step) >= MOST_TURNS:
        refuse(f"its loops and calls take more than {MOST_TURNS:,} turns")
    return found


def concat(parts: Iterable[str]) -> str:
    """What a template, a macro or a block puts out."""
    kept, length = [], 0
    for part in parts:
        length += len(part)
        if length > LONGEST:
            refuse(f"it makes a text of more than {LONGEST:,} characters")
        kept.append(part)
    take(length // PER_TURN)
    return "".join(kept)


def joined(values: Iterable[Any]) -> str:
    return concat(str(shown(value)) for value in values)


def shown(value: Any) -> Any:
    """A value that becomes text: lists that hold each other again and again are long as text alone."""
    waiting, left = [value], MOST
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        left -= 1
        if left < 0 or len(waiting) > MOST:
            refuse(f"a list of more than {MOST:,} parts becomes text")
    return value


def filtered(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within bounds. `wraps` keeps jinja2's mark for those that take the environment first."""
    first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @functools.wraps(filter_)
    def bounded(*given: Any, **named: Any) -> Any:
        value, rest = given[first], [*given[first + 1 :], *named.values()]
        take(1 + _size(value) // PER_TURN)
        if name not in VALUES:
            _refuse_wide(rest)
        if name == "format":
            _refuse_format(str(value))
        if name == "replace" and len(rest) > 1:
            _refuse_replaced(str(value), str(rest[0]), str(rest[1]))
        if name in ("indent", "join", "batch", "slice"):
            longest = max([WIDEST if name == "indent" else 0, *map(_size, rest)])
            parts = str(value).count("\n") if name == "indent" else _size(value)
            if parts * longest > LONGEST:
                refuse(f"the filter {name} makes a text of more than {LONGEST:,} characters")
        if name in TEXTS:
            shown(value)
        return filter_(*given, **named)

    return bounded


def check_call(called: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Before a function, a macro or a method of a text is called."""
    text = getattr(called, "__self__", None)
    take(PER_CALL + _size(text) // PER_TURN)
    if not isinstance(text, str):
        return
    name, rest = getattr(called, "__name__", ""), [*given, *named.values()]
    if name in PADDING:
        _refuse_wide(rest)
    if name == "expandtabs" and text.count("\t") * WIDEST > LONGEST:
        refuse(f"expandtabs makes a text of more than {LONGEST:,} characters")
    if name == "replace" and len(rest) > 1:
        _refuse_replaced(text, *map(str, rest[:2]))
    if name == "join" and rest and len(text) * _size(rest[0]) > LONGEST:
        refuse(f"join makes a text of more than {LONGEST:,} characters")


def check_format_spec(text: str) -> None:
    """Of `str.format`: widths of many digits, or taken from a value."""
    if re.search(r"\{[^{}]*[:.\[][^{}]*(?:[0-9]{5}|\{)", text):
        refuse("a format asks for too wide a field")


def _refuse_format(text: str) -> None:
    if re.search(r"[0-9]{5}|%[^a-zA-Z%]*\*", text):
        refuse("a format asks for too wide a field")


def _refuse_wide(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > WIDEST for value in values):
        refuse(f"a width or a count is beyond {WIDEST:,}")


def _refuse_replaced(text: str, old: str, new: str) -> None:
    if len(text) + text.count(old) * max(0, len(new) - len(old)) > LONGEST:
        refuse(f"replace makes a text of more than {LONGEST:,} characters")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | Mapping | range) else 0


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before an operator whose result could be too large."""
    numbers = [side for side in (left, right) if isinstance(side, int)]
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    if operator == "%":
        if isinstance(left, str):
            _refuse_format(left)
    elif operator == "**":
        if len(numbers) == 2 and abs(left) > 1 and right * math.log2(abs(left)) > MOST_BITS:
            refuse("a power is too large")
    elif operator == "+":
        if sum(sizes) > (LONGEST if isinstance(left, str) else MOST):
            refuse(f"a text or list grows to more than {MOST:,}")
        take(1 + sum(sizes) // PER_TURN)
    elif sizes and numbers and sizes[0] * numbers[0] > MOST:
        refuse(f"a text or list is repeated to more than {MOST:,}")
    elif len(numbers) == 2 and sum(number.bit_length() for number in numbers) > MOST_BITS:
        refuse("a product is too large")
