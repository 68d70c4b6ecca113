"""Overrides given in Python, as the `key=value` texts that a command line has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.errors import RecipeError

Overrides = Mapping[str, Any] | Iterable[str]

# Text that Hydra's grammar reads as this same text, unquoted; `5`, `true` and `null` are not texts.
_PLAIN = re.compile(r"[A-Za-z_/.][\w/.:@-]*")
_OTHER_KINDS = ("true", "false", "null", "nan", "inf")


def as_texts(overrides: Overrides | None) -> list[str]:
    """`{"training": {"lr": 0.1}, "training.steps": 5}` as `training.lr=0.1` and `training.steps=5`;
    texts stay as they are."""
    if overrides is None:
        return []
    if isinstance(overrides, str):
        raise RecipeError(
            f"overrides: got the text {overrides!r}, expected a list: [{overrides!r}]"
        )
    if isinstance(overrides, Mapping):
        return [f"{key}={_text(key, value)}" for key, value in _leaves("", overrides)]
    return [str(text) for text in overrides]


def plain(value: Any) -> Any:
    """A recipe's document with paths as text and keys as text, as YAML would hold it."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _leaves(prefix: str, document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _text(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return _quoted(str(value))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_text(key, inner) for inner in value)}]"
    if isinstance(value, Mapping):
        inner = ",".join(f"{name}:{_text(key, part)}" for name, part in value.items())
        return f"{{{inner}}}"
    raise RecipeError(
        f"{key}: got {value!r} of type {type(value).__name__}, expected text, a number, true or false, "
        "None, or a list or dict of those"
    )


def _quoted(text: str) -> str:
    """Only backslashes before a quote, or at the end, are escapes in Hydra's quoted text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_KINDS:
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"
