"""Chat rows: who said what, in the spellings that such data comes in, from JSON lines and parquet.

| keys of a row | meaning |
|---|---|
| `messages` or `conversations` | a list of `role` and `content`, or of ShareGPT's `from` and `value` |
| `prompt`, `completion` | texts, or lists of such messages |
| `instruction`, `output`, perhaps `input` | Alpaca's |

`system` (a text), `history` (pairs of question and answer) and `tools` (what a template shows as
functions) are read beside the last two, `tools` and `system` beside all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from muster.data.parquet import DAMAGED, TEXT_NAMES, first_line, open_parquet
from muster.data.problems import Problems
from muster.data.text.documents import ROWS_AT_A_TIME, json_line, row_name
from muster.errors import DataError, UnreadableError
from muster.reading import json_file
from muster.reading.files import open_file
from muster.reading.text import in_one_line

ASSISTANT = "assistant"
LAYOUTS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
BESIDE = ("input", "system", "history", "tools")
ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "function": "tool"}  # ShareGPT's
WANTED = " or ".join(" + ".join(layout) for layout in LAYOUTS)

Message = dict[str, Any]  # `role`, `content`, and what else a template reads


@dataclass(frozen=True)
class Conversation:
    file: int  # which of the paths
    row: int  # counted from 0
    messages: list[Message]
    tools: list[Any] | None = None


def layout_of(names: Sequence[str]) -> tuple[str, ...] | None:
    """Which layout a row with keys of these names has."""
    return next((layout for layout in LAYOUTS if set(layout) <= set(names)), None)


def are_chat(asked: str, text_column: str | None, files: Sequence[Path]) -> bool:
    """Whether training files are read as chat rows: as `data.format` says, else where the first row of
    the first is one, and has no text beside it."""
    if asked != "auto":
        return asked == "chat"
    if text_column is not None or not files:
        return False
    names = _first_names(files[0])
    return layout_of(names) is not None and not set(TEXT_NAMES) & set(names)


def read_conversations(paths: Sequence[Path], bad: Problems) -> Iterator[Conversation]:
    """Every conversation of `paths`, in order; rows that are none go to `bad`."""
    for file, path in enumerate(paths):
        for row, cells in _rows(path):
            try:
                if isinstance(cells, ValueError):
                    raise cells
                yield Conversation(file, row, _messages(cells), _tools(cells.get("tools")))
            except ValueError as error:
                bad.add(row_name(path, row), str(error), str(path))


def _first_names(path: Path) -> list[str]:
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as reader:
                return list(reader.schema_arrow.names)
        if path.suffix == ".jsonl":
            with open_file(path) as lines:
                first = next((line for line in lines if line.strip()), b"")
            return list(json_file.parse(first, path))
    except (OSError, ValueError, DataError):
        pass  # whoever reads the whole file says what is wrong with it
    return []


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows as dictionaries, or the reason why there is none."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".jsonl":
            with open_file(path) as lines:
                yield from (
                    (row, json_line(line)) for row, line in enumerate(lines) if line.strip()
                )
        else:
            raise DataError(
                f"{path}: chat rows come as .jsonl or .parquet; name such files, or set "
                "data.format=text"
            )
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or first_line(error)}); copy it again"
        ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with open_parquet(path) as reader:
        names = reader.schema_arrow.names
        layout = layout_of(names)
        if layout is None:
            raise DataError(f"{path} has no chat columns ({WANTED}); it has {', '.join(names)}")
        wanted = [*layout, *(name for name in BESIDE if name in names)]
        row = 0
        try:
            for batch in reader.iter_batches(ROWS_AT_A_TIME, columns=wanted):
                for cells in _dictionaries(batch):
                    yield row, cells
                    row += 1
        except DAMAGED as error:
            raise DataError(
                f"{path}, from row {row}: {first_line(error)}; repair the file, or remove it from the data"
            ) from None


def _dictionaries(batch: pa.RecordBatch) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # of one row: the others are good
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                yield ValueError(f"a text in it is not UTF-8 (byte 0x{bad:02x})")


def _messages(cells: dict[str, Any]) -> list[Message]:
    """The messages of a row, the assistant among them."""
    given = {name: cell for name, cell in cells.items() if cell is not None}
    layout = layout_of(list(given))
    if layout is None:
        raise ValueError(f"no conversation: it needs {WANTED}")
    found = []
    if layout[0] in ("messages", "conversations"):
        found = _list(given[layout[0]], layout[0])
    elif layout[0] == "prompt":
        found = [
            *_turn("user", given["prompt"], "prompt"),
            *_turn(ASSISTANT, given["completion"], "completion"),
        ]
    else:
        more = given.get("input") or ""
        question = _text(given["instruction"], "instruction")
        question += f"\n\n{_text(more, 'input')}" if more else ""
        found = [*_turn("user", question, ""), *_turn(ASSISTANT, given["output"], "output")]
    if layout[0] in ("prompt", "instruction"):
        found = [*_history(given.get("history")), *found]
    if given.get("system") and found[0]["role"] != "system":
        found = [*_turn("system", given["system"], "system"), *found]
    if not any(message["role"] == ASSISTANT for message in found):
        raise ValueError(f"no reply: none of its {len(found)} messages is of the {ASSISTANT}")
    return found


def _list(cell: Any, name: str) -> list[Message]:
    if isinstance(cell, str):
        try:
            cell = json_file.parse_value(cell, name)
        except UnreadableError:
            raise ValueError(f"{name} holds text that is no JSON list") from None
    if not isinstance(cell, list) or not cell:
        raise ValueError(f"{name} holds no list of messages")
    return [_message(item, f"{name}[{i}]") for i, item in enumerate(cell)]


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, dict):
        raise ValueError(f"{name} is no object with role and content")
    message = {key: value for key, value in item.items() if value is not None}
    if "from" in message and "role" not in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{name} has no role")
    message["role"] = ROLES.get(role, role)
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""  # the message is its calls
    message["content"] = _text(content, f"{name}.content")
    return message


def _turn(role: str, cell: Any, name: str) -> list[Message]:
    """A text as one message of `role`; a list as its own messages."""
    if isinstance(cell, list):
        return _list(cell, name)
    return [{"role": role, "content": _text(cell, name)}]


def _history(cell: Any) -> list[Message]:
    found = []
    if not isinstance(cell or [], list):
        raise ValueError("history holds no list of pairs")
    for pair in cell or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("history holds no pairs of question and answer")
        found += [*_turn("user", pair[0], "history"), *_turn(ASSISTANT, pair[1], "history")]
    return found


def _text(cell: Any, name: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(cell, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in cell]
        kinds = {in_one_line(part.get("type", "text")) for part in parts} - {"text"}
        if kinds:
            raise ValueError(f"{name} has parts of type {', '.join(sorted(kinds))}")
        cell = "".join(str(part.get("text")) for part in parts)
    if not isinstance(cell, str):
        raise ValueError(f"{name} is no text")
    try:
        cell.encode()  # JSON can spell half of a surrogate pair, which is no character
    except UnicodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error})") from None
    return cell


def _tools(cell: Any) -> list[Any] | None:
    if isinstance(cell, str) and cell.strip():
        try:
            cell = json_file.parse_value(cell, "tools")
        except UnreadableError:
            raise ValueError("tools holds text that is no JSON list") from None
    if cell and not isinstance(cell, list):
        raise ValueError("tools holds no list")
    return cell or None
