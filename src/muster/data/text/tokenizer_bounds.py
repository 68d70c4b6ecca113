"""What a tokenizer.json may ask for: ids and texts of bounded size, whoever made it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError, RecipeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LARGEST_VOCABULARY = 2**24
MOST_STEPS = 32  # of a normaliser, or a decoder
MOST_GROWTH = 64  # times as long as the text


def check(tokenizer: Tokenizer, where: str, kind: type[MusterError] = RecipeError) -> None:
    """Before it is written as JSON, which takes memory and time by its largest id, and before it is used."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise kind(f"{where} has no tokens; take another tokenizer")
    if largest >= LARGEST_VOCABULARY:
        raise kind(
            f"{where} has ids up to {largest:,}, which is too large: muster reads up to "
            f"{LARGEST_VOCABULARY:,}; take another tokenizer"
        )
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if part is not None:
            _check_growth(json.loads(part.__getstate__()), where, kind)


def _check_growth(document: Any, where: str, kind: type[MusterError]) -> None:
    """A text that each of many steps makes longer has no end."""
    growth = 1
    for steps, step in enumerate(_steps(document), 1):
        growth *= _growth(step)
        if steps > MOST_STEPS or growth > MOST_GROWTH:
            raise kind(
                f"{where} has a chain of {document.get('type')} that makes text more than {MOST_GROWTH} times as "
                f"long, or of more than {MOST_STEPS} steps; take another tokenizer"
            )


def _steps(document: Any) -> Iterator[dict[str, Any]]:
    waiting = [document]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        inner = [
            one
            for name in ("normalizers", "pretokenizers", "decoders")
            for one in part.get(name) or ()
        ]
        waiting += inner
        if not inner:
            yield part


def _growth(step: dict[str, Any]) -> int:
    """How many times as long it makes a text at most."""
    if step.get("type") == "ByteLevel":
        return 2  # each character beyond ASCII is two bytes at least, and each of those a character
    pattern = step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(pattern, dict):
        return 1
    content = len(str(step.get("content") or ""))
    if "String" in pattern:
        return -(-content // max(1, len(str(pattern["String"])))) or 1
    return content + _may_match_nothing(str(pattern.get("Regex"))) or 1


def _may_match_nothing(pattern: str) -> bool:
    try:
        return re.search(pattern, "") is not None
    except re.error:  # not of Python's form: it may
        return True
