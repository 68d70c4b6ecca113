"""Documents of known keys, whoever wrote them: a value that is not of its key's kind counts as missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Kind = Literal["text", "number", "finite", "count", "whole", "flag", "object", "list", "texts"]
LARGEST = 2**53


def kept(document: Any, kinds: Mapping[str, Kind], *needed: str) -> dict[str, Any]:
    """The keys of `document` without those of the wrong kind; others stay as they are. Empty where one that is
    `needed` is not left."""
    if not isinstance(document, dict):
        return {}
    found = {
        key: value
        for key, value in document.items()
        if key not in kinds or value is None or _fits(value, kinds[key])
    }
    return found if all(found.get(key) is not None for key in needed) else {}


def all_kept(documents: Any, kinds: Mapping[str, Kind], *needed: str) -> Iterator[dict[str, Any]]:
    """Those of a list that have what is needed."""
    for document in documents if isinstance(documents, list) else ():
        if found := kept(document, kinds, *needed):
            yield found


def _fits(value: Any, kind: Kind) -> bool:
    match kind:
        case "text":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "list":
            return isinstance(value, list)
        case "texts":
            return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
    if not finite or abs(value) > LARGEST:
        return kind == "number"
    return kind in ("number", "finite") or (
        isinstance(value, int) and (kind == "whole" or value >= 0)
    )
