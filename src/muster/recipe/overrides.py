"""Overrides: what a `key=value` text of the command line sets, and those given in Python as such texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.errors import RecipeError
from muster.reading.text import in_one_line
from muster.reading.values import DEEPEST, LONGEST

Overrides = Mapping[str, Any] | Iterable[str]

# Text that Hydra's grammar reads as this same text, unquoted; `5`, `true` and `null` are not texts.
_PLAIN = re.compile(r"[A-Za-z_/.][\w/.:@-]*")
_OTHER_KINDS = ("true", "false", "null", "nan", "inf")

MOST = 2000  # values of one list: Hydra's grammar takes seconds for more
_SHAPE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w-]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def parse(text: str) -> tuple[str, Any, bool]:
    """Key, value, and whether the key is to be deleted."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shape = _SHAPE.fullmatch(text)
    if shape is None or (shape[1] != "~" and shape[3] is None):
        raise RecipeError(
            f"{in_one_line(text)}: not an override, expected key=value, such as training.steps=100"
        )
    sign, key, raw = shape.groups()
    _refuse_large(key, raw or "")
    if sign == "~":
        return key, None, True
    try:
        override = OverridesParser.create().parse_override(f"++{key}={raw}")
    except HydraException:
        # Hydra refuses '=', '~', '#' and letters beyond ASCII outside quotes. A path may hold them,
        # and what begins like text can only mean text.
        if raw[:1] in ("[", "{", "'", '"') or "${" in raw:
            raise RecipeError(
                f"{key}: got {in_one_line(raw)}, which has no end or no meaning; check its quotes and brackets"
            ) from None
        return key, raw, False
    except ValueError:  # Python's own bound on the digits of a number
        raise RecipeError(f"{key}: got a number of thousands of digits") from None
    if override.is_sweep_override():
        raise RecipeError(
            f"{key}: got {in_one_line(raw)}, which is several values, expected one: "
            f"a list is [a,b], and text with a comma needs quotes"
        )
    return key, override.value(), False


def _refuse_large(key: str, raw: str) -> None:
    """Before Hydra's grammar is asked, which is slow on what is long, and recursive on what is deep."""
    if len(key) > LONGEST or key.count(".") >= DEEPEST:
        raise RecipeError(f"{in_one_line(key)}: no such key; keys are at most {DEEPEST} deep")
    if len(raw) > LONGEST:
        raise RecipeError(
            f"{in_one_line(key)}: got {len(raw):,} characters, at most {LONGEST:,} fit an override; "
            "give it in a recipe file"
        )
    bare = _QUOTED.sub("", raw)
    depth = deepest = 0
    for character in bare:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise RecipeError(f"{key}: lists and sections lie more than {DEEPEST} deep in each other")
    if bare.count(",") + bare.count(":") >= MOST:
        raise RecipeError(f"{key}: got more than {MOST:,} values; give them in a recipe file")


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
