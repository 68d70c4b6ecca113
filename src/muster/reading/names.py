"""Names of files, keys and values that say a number."""

from __future__ import annotations

import re

DIGITS = 9  # of a rank


def number(text: str, digits: int = DIGITS) -> int | None:
    """None for any other text: `isdigit` takes ² too, which is no number, and a thousand digits."""
    return int(text) if len(text) <= digits and re.fullmatch("[0-9]+", text) else None
