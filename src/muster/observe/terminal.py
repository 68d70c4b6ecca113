"""A console for text from elsewhere, in which rich would read `[words in brackets]` as markup."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from muster.reading.text import KEPT, printable


def write_text(text: str, end: str = "\n") -> None:
    """To stdout at once: as it is into a file or a pipe, printable on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


class Terminal(Console):
    """A console for which text is text: no markup and no emoji codes, unless asked for by `markup=True`, and no
    control characters, whichever part of a table or panel they are in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False} | options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment(text.translate(KEPT), style)
