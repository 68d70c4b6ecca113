"""Chat rows as sequences: loss on the replies alone, several rows in one sequence.

Rows are tokenized once per machine, as a chat template renders them, into the user's cache. A row of
n tokens takes n − 1 places of a sequence: its inputs are all but the last, its targets those after
them, which count where they are of a reply. Rows in one sequence are different `documents` with
positions of their own, so a row costs there what it costs alone.

Which rows share a sequence depends on their lengths and `data.sequence_length` alone; sequences are
shuffled per epoch like any task's samples.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from muster.data import cache
from muster.data.account import FileAccount
from muster.data.batches import IGNORE
from muster.data.overlap import Documents, Overlap, text_overlap
from muster.data.problems import Problems
from muster.data.progress import log_tenths
from muster.data.text.chat_template import ChatTemplate
from muster.data.text.conversations import ASSISTANT, read_conversations
from muster.data.text.documents import count_rows, row_name
from muster.data.text.packing import GrowingArray
from muster.data.text.tokenizers import Tokenizer
from muster.errors import DataError

log = logging.getLogger(__name__)

ROWS_VERSION = 1
SAMPLED = 1 << 20  # tokens that go into a source's fingerprint
SIZED = 1 << 14  # tokens whose bytes are counted
ARRAYS = ("tokens", "replies", "starts", "files", "row_numbers")


@dataclass(frozen=True)
class ChatSample:
    id: int
    inputs: NDArray[np.int64]  # [time]
    targets: NDArray[np.int64]  # [time], IGNORE where no reply is predicted
    documents: NDArray[np.int64]  # [time] which of the sequence's rows an input belongs to
    positions: NDArray[np.int64]  # [time] restart with each row
    room: int = (
        2  # for documents in a batch of its source: the most rows of a sequence, and padding
    )


@dataclass(frozen=True)
class Question:
    """A conversation up to its last reply, and that reply."""

    name: str
    asked: list[int]
    expected: list[int]


@dataclass(frozen=True)
class ChatRows:
    """All rows of some files, one after the other."""

    tokens: NDArray[np.uint32]
    replies: NDArray[np.bool_]  # of each token: whether an assistant wrote it
    starts: NDArray[np.int64]  # of each row, and the end of the last
    files: NDArray[np.int64]  # of each row
    row_numbers: NDArray[np.int64]
    rows: int  # looked at
    bad: Problems

    @property
    def lengths(self) -> NDArray[np.int64]:
        """In tokens."""
        return np.diff(self.starts)

    def first_reply(self) -> NDArray[np.int64]:
        """Of each row, where in it the first token of a reply is."""
        places = np.flatnonzero(self.replies)
        return places[np.searchsorted(places, self.starts[:-1])] - self.starts[:-1]


class ChatSource:
    """Indexed sequences of at most `length` places, with one row each or with several."""

    groups: None = None

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: Tokenizer,
        template: ChatTemplate,
        length: int,
        *,
        pack: bool = True,
        long_rows: Literal["skip", "cut"] = "skip",
        max_bad_fraction: float = 0.01,
    ) -> None:
        self.paths, self.length, self.tokenizer = list(paths), length, tokenizer
        self.broken: dict[int, str] = {}
        self.left_out: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.rows = open_rows(self.paths, tokenizer, template)
        keys = "data.format and data.chat_template"
        if words := self.rows.bad.check(self.rows.rows, max_bad_fraction, "chat rows", keys):
            log.warning("%s", words)
        self._left_out_by_file: dict[int, dict[str, int]] = {}
        used = self._usable(long_rows)
        self.used = np.array(used)
        places = np.minimum(self.rows.lengths[used] - 1, length)
        self.sequences = pack_rows(places, used, length) if pack else [[row] for row in used]
        self.lengths = np.full(len(self.sequences), float(length))
        self.room = max(map(len, self.sequences)) + 1

    def __len__(self) -> int:
        return len(self.sequences)

    def load(self, index: int) -> ChatSample:
        parts = [self._row(number, row) for number, row in enumerate(self.sequences[index])]
        inputs, targets, documents, positions = (
            np.concatenate(arrays) for arrays in zip(*parts, strict=True)
        )
        return ChatSample(index, inputs, targets, documents, positions, self.room)

    def name(self, index: int) -> str:
        """The first row of the sequence."""
        return self._row_name(self.sequences[index][0])

    def _row_name(self, row: int) -> str:
        return row_name(self.paths[int(self.rows.files[row])], int(self.rows.row_numbers[row]))

    def questions(self, count: int, longest: int) -> list[Question]:
        """Of `count` of the rows whose question has at most `longest` tokens, spread evenly over them."""
        rows, found = self.rows, []
        replied = np.flatnonzero(np.diff(rows.replies.astype(np.int8), prepend=0) == 1)
        begins = replied[np.searchsorted(replied, rows.starts[1:]) - 1]  # of each row's last reply
        fits = self.used[begins[self.used] - rows.starts[self.used] <= longest]
        for row in fits[
            np.arange(min(count, len(fits))) * len(fits) // max(1, min(count, len(fits)))
        ]:
            start, begin, end = int(rows.starts[row]), int(begins[row]), int(rows.starts[row + 1])
            expected = rows.tokens[begin:end][rows.replies[begin:end]]
            found.append(
                Question(self._row_name(row), rows.tokens[start:begin].tolist(), expected.tolist())
            )
        return found

    def overlap(self, train: ChatSource) -> list[Overlap]:
        mine, theirs = (Documents(rows.tokens, rows.starts) for rows in (self.rows, train.rows))
        sample = self.rows.tokens[:SIZED]
        size = len(self.tokenizer.decode(sample.tolist()).encode()) / max(1, len(sample))
        return [text_overlap(mine, theirs, size)]

    def account(self) -> list[FileAccount]:
        """The rows of each file, and what they hold. A row may be several where the template makes it so."""
        rows, files = self.rows, len(self.paths)
        mine = rows.files[self.used]
        replies = np.add.reduceat(rows.replies, rows.starts[:-1], dtype=np.int64)
        sums = [
            np.bincount(mine, amounts[self.used], files).astype(np.int64).tolist()
            for amounts in (np.ones(len(rows.files)), rows.lengths, replies)
        ]
        return [
            FileAccount(
                str(path),
                count,
                "rows",
                {"rows": count, "tokens": tokens, "tokens of replies": replied},
                {**rows.bad.files.get(str(path), {}), **self._left_out_by_file.get(i, {})},
            )
            for i, (path, count, tokens, replied) in enumerate(zip(self.paths, *sums, strict=True))
        ]

    def preload(self, threads: int) -> None:
        """Nothing to do: the tokens are memory-mapped."""

    def reserve(self, samples: int) -> None:
        """Likewise."""

    def fingerprint(self) -> bytes:
        """Hash of a sample of the tokens, and of which rows share a sequence."""
        step = len(self.rows.tokens) // SAMPLED + 1
        found = hashlib.sha256(self.rows.tokens[::step].tobytes())
        found.update(self.rows.replies[::step].tobytes())
        found.update(np.concatenate([np.array(rows) for rows in self.sequences]).tobytes())
        found.update(np.array([len(rows) for rows in self.sequences]).tobytes())
        return found.digest()

    def _row(self, number: int, row: int) -> tuple[NDArray[np.int64], ...]:
        begin, end = int(self.rows.starts[row]), int(self.rows.starts[row + 1])
        end = min(end, begin + self.length + 1)
        tokens = self.rows.tokens[begin:end].astype(np.int64)
        targets = np.where(self.rows.replies[begin + 1 : end], tokens[1:], IGNORE)
        time = len(targets)
        return tokens[:-1], targets, np.full(time, number), np.arange(time)

    def _usable(self, long_rows: str) -> list[int]:
        """Rows that are used; the others are counted."""
        long = self.rows.lengths - 1 > self.length
        late = self.rows.first_reply() > self.length
        what = f"longer than data.sequence_length={self.length}"
        unused = late if long_rows == "cut" else long
        reason = (
            f"without a reply in the first {self.length} tokens" if long_rows == "cut" else what
        )
        if count := int(unused.sum()):
            self.left_out[reason] = count
            for file, rows in zip(
                *np.unique(self.rows.files[unused], return_counts=True), strict=True
            ):
                self._left_out_by_file[int(file)] = {reason: int(rows)}
            first = int(np.flatnonzero(unused)[0])
            named = self._row_name(first)
            log.warning("left out %d of %d chat rows: %s (%s …)", count, len(long), reason, named)
        if long_rows == "cut" and (count := int((long & ~late).sum())):
            self.cut[what] = count
            log.warning("cut %d of %d chat rows: %s", count, len(long), what)
        used: list[int] = np.flatnonzero(~unused).tolist()
        if not used:
            raise DataError(
                f"no usable chat row among {self.rows.rows} of "
                f"{', '.join(map(str, self.paths[:5]))}: {', '.join(f'{n} {why}' for why, n in self.left_out.items())}; "
                "raise data.sequence_length, or set data.long_texts=cut"
            )
        return used


def pack_rows(places: NDArray[np.int64], rows: Sequence[int], length: int) -> list[list[int]]:
    """Rows of so many `places` in sequences of `length`: the longest first, each into the fullest
    sequence that it fits (best fit decreasing, at most 11 / 9 of the fewest possible, Johnson 1973)."""
    sequences: list[list[int]] = []
    open_: dict[int, list[int]] = {}  # sequences by the places that are left in them
    left: list[int] = []  # its keys, sorted
    for i in np.argsort(-places, kind="stable").tolist():
        need = int(places[i])
        at = bisect.bisect_left(left, need)
        if at == len(left):
            number, room = len(sequences), length
            sequences.append([])
        else:
            room = left[at]
            number = open_[room].pop()
            if not open_[room]:
                del open_[room], left[at]
        sequences[number].append(rows[i])
        room -= need
        if room not in open_:
            open_[room] = []
            bisect.insort(left, room)
        open_[room].append(number)
    return sequences


def open_rows(paths: Sequence[Path], tokenizer: Tokenizer, template: ChatTemplate) -> ChatRows:
    """From the cache, else rendered, tokenized and cached."""
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    identities = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    document = [ROWS_VERSION, identities, tokenizer.fingerprint(), template.to_json()]
    key = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]
    return cache.load_or_build(
        cache.cache_folder() / "tokens" / f"chat-{key}",
        _load,
        lambda folder: _write(folder, paths, tokenizer, template),
        "tokens of chat rows",
    )


def encode(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Any], tools: Any = None
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
    """Tokens of a conversation, and which of them are of replies; see `ChatTemplate.replies`. A reply
    at the end that no special token ends is ended by the tokenizer's own."""
    for rendered in template.replies(messages, tools):
        ids, starts = tokenizer.encode_marked(rendered.text)
        replies = np.zeros(len(ids), bool)
        for begin, end in rendered.replies:
            replies |= (starts >= begin) & (starts < end)
        if len(ids) and replies[-1] and int(ids[-1]) not in tokenizer.special:
            ids, replies = np.append(ids, np.uint32(tokenizer.end)), np.append(replies, True)
        replies[:1] = False  # nothing comes before the first token, so it is not predicted
        if not replies.any():
            raise ValueError("its replies have no tokens")
        yield ids, replies


def reply_ends(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """Tokens after which a reply is over: the end of text, and what ends the template's replies."""
    asked = [{"role": "user", "content": "x"}, {"role": ASSISTANT, "content": "x"}]
    try:
        ((ids, replies),) = encode(tokenizer, template, asked)
    except ValueError:  # a template with wishes of its own
        return frozenset([tokenizer.end])
    return frozenset([int(ids[replies][-1])]) & tokenizer.special | {tokenizer.end}


def _load(folder: Path) -> ChatRows | None:
    try:
        about = json.loads((folder / "rows.json").read_text())
        arrays: dict[str, Any] = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS
        }
    except (OSError, ValueError):
        return None
    return ChatRows(**arrays, rows=about["rows"], bad=Problems.from_json(about["bad"]))


def _write(
    folder: Path, paths: Sequence[Path], tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    kinds: dict[str, Any] = dict.fromkeys(ARRAYS, np.int64)
    kinds |= {"tokens": np.uint16 if tokenizer.size <= 2**16 else np.uint32, "replies": np.bool_}
    arrays = {name: GrowingArray(folder / f"{name}.npy", kind) for name, kind in kinds.items()}
    bad, rows = Problems(), 0
    total, tell = sum(map(count_rows, paths)), log_tenths(log, "tokenized %d of %d chat rows")
    arrays["starts"].append([0])
    for conversation in read_conversations(paths, bad):
        tell(rows, total)
        rows += 1
        try:
            encoded = list(encode(tokenizer, template, conversation.messages, conversation.tools))
        except ValueError as error:
            path = paths[conversation.file]
            bad.add(row_name(path, conversation.row), str(error), str(path))
            rows -= 1
            continue
        for ids, replies in encoded:
            arrays["tokens"].append(ids)
            arrays["replies"].append(replies)
            arrays["starts"].append([arrays["tokens"].length])
            arrays["files"].append([conversation.file])
            arrays["row_numbers"].append([conversation.row])
    for array in arrays.values():
        array.close()
    about = {"rows": rows + bad.count, "bad": bad.to_json()}
    (folder / "rows.json").write_text(json.dumps(about))
