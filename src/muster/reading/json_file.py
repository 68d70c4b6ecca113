"""Bounded JSON: size, depth, keys given twice, halves of characters, and what is not of the kind expected."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from muster.errors import UnreadableError
from muster.reading.files import decode, read_bytes
from muster.reading.text import in_one_line, printable

MOST = 16 * 2**20  # bytes of a configuration, a manifest, an index
MOST_TOKENIZER = 256 * 2**20  # large vocabularies take 30 MiB
DEEPEST = 64  # lists and objects in each other

Numbers = Literal["any", "finite", "null"]  # NaN and infinities: taken, refused, or None

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


def read(path: Path, *, most: int = MOST, numbers: Numbers = "any") -> dict[str, Any]:
    """A file's object. OSError where there is no such file."""
    return parse(read_bytes(path, most), path, numbers=numbers)


def read_value(path: Path, *, most: int = MOST, numbers: Numbers = "any") -> Any:
    """A file's list, object, text or number."""
    return parse_value(read_bytes(path, most), path, numbers=numbers)


def parse(text: str | bytes, where: object, *, numbers: Numbers = "any") -> dict[str, Any]:
    """An object. `where` is the file, or what else the sentence is to name."""
    return as_object(parse_value(text, where, numbers=numbers), where)


def as_object(value: Any, where: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "a number")
        raise UnreadableError(f"{_name(where)}: holds {kind}, expected an object of JSON: {{…}}")
    return value


def parse_value(text: str | bytes, where: object, *, numbers: Numbers = "any") -> Any:
    if isinstance(text, bytes):
        text = decode(text, where)
    options: dict[str, Any] = {}
    if numbers == "null":
        options = {"parse_constant": lambda name: None, "parse_float": _finite_or_none}
    elif numbers == "finite":

        def refuse(name: str) -> float:
            if not math.isfinite(number := float(name)):
                raise UnreadableError(
                    f"{_name(where)}: holds {in_one_line(name, 20)}, expected finite numbers"
                )
            return number

        options = {"parse_constant": refuse, "parse_float": refuse}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise UnreadableError(f"{_name(where)}: has the key {in_one_line(twice)!r} twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=once, **options)
    except json.JSONDecodeError as error:
        raise UnreadableError(
            f"{_name(where)}, line {error.lineno}: not valid JSON: {in_one_line(error.msg)}"
        ) from None
    except RecursionError:
        raise _too_deep(where) from None
    except UnreadableError:
        raise
    except ValueError:  # Python's own bound on the digits of a number
        raise UnreadableError(f"{_name(where)}: holds a number of thousands of digits") from None
    if text.count("[") + text.count("{") > DEEPEST and _deeper(value, DEEPEST):
        raise _too_deep(where)
    if _HALF.search(text):
        _refuse_halves(value, where)
    return value


def _name(where: object) -> str:
    return printable(str(where))


def _finite_or_none(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None


def _too_deep(where: object) -> UnreadableError:
    return UnreadableError(
        f"{_name(where)}: lists and objects lie more than {DEEPEST} deep in each other"
    )


def _deeper(value: Any, limit: int) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _refuse_halves(value: Any, where: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnreadableError(
            f"{_name(where)}: text in it holds half of a character (a lone surrogate, \\ud800 to \\udfff)"
        ) from None
