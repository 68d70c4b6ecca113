"""Text from elsewhere, as a terminal may show it: generated text, transcripts, log lines, file names, errors.

An untrained model writes any bytes, and a log may hold any. A terminal obeys control characters: they
move the cursor, change colours, or rename the window.
"""

from __future__ import annotations

import re

SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, moves
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"  # titles, links
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
# Marks that turn the direction of the text after them: a file's name then reads as another one.
TURNED = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
HALVES = range(0xD800, 0xE000)  # surrogates, which no terminal can be sent
CONTROLS: dict[int, str | None] = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), *TURNED])
CONTROLS |= dict.fromkeys(HALVES, "\ufffd")
KEPT = CONTROLS.copy()
for character in "\n\t":
    del KEPT[ord(character)]

LONG = 120  # characters of a value in a sentence
LONGEST = 2000  # characters of a sentence


def printable(text: str) -> str:
    """Without control characters, other than line ends and tabs."""
    if text.isprintable():
        return text
    return SEQUENCES.sub("", text).translate(KEPT)


def in_one_line(value: object, most: int = LONG) -> str:
    """A value for a sentence: on one line, printable, and cut where it is long."""
    text = str(value)
    text = " ".join(printable(text[: 4 * most]).split())
    if not text.isprintable():  # marks without a shape of their own
        text = "".join(character for character in text if character.isprintable())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sentence(text: str) -> str:
    """A message on one line, printable, and shortened in its middle: the file comes first, the cure last."""
    text = " ".join(printable(text).split())
    if not text.isprintable():
        text = "".join(character for character in text if character.isprintable())
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 500]} … {text[-490:]}"
