"""Text from elsewhere on a terminal: generated text, transcripts, log lines, file names, errors.

An untrained model writes any bytes, and a log may hold any. A terminal obeys control characters: they
move the cursor, change colours, or rename the window. Rich reads `[words in brackets]` as markup.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, moves
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # titles, links
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
KEPT = CONTROLS.copy()
for character in "\n\t":
    del KEPT[ord(character)]


def printable(text: str) -> str:
    """Without control characters, other than line ends and tabs."""
    if text.isprintable():
        return text
    return SEQUENCES.sub("", text).translate(KEPT)


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
