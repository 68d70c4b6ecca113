"""Text of parquet columns: Arrow does not check that it is UTF-8, and a single bad row would end a run."""

from __future__ import annotations

import pyarrow as pa


def in_utf8(texts: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """Texts, empty where one is not UTF-8; and why, by row."""
    try:
        texts.validate(full=True)
        return texts, {}
    except pa.ArrowInvalid:
        pass
    found: list[str | None] = []
    problems = {}
    for row, cell in enumerate(texts.cast(pa.large_binary()).to_pylist()):
        try:
            found.append(None if cell is None else cell.decode())
        except UnicodeDecodeError as error:
            found.append("")
            problems[row] = f"the text is not UTF-8 (byte 0x{cell[error.start]:02x})"
    return pa.array(found, texts.type), problems
