"""Documents as one long stream of tokens, cut into sequences of equal length.

The stream is `end doc end doc end … doc end`, so every token of every document is predicted exactly
once, and so is every end; only the first `end` is not. Sequence `i` reads tokens `i·length` to
`(i+1)·length` and predicts each from those before it: neighbours share one token, the last target
of one and the first input of the next. In training, each epoch has the documents in another order
and cuts in other places (`muster.data.text.arrangement`).

Tokenizing happens once per machine. The stream is written to the user's cache as .npy files, under
a name made of the files' identities and the tokenizer, and mapped into memory by every rank.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.data import cache
from muster.data.account import FileAccount
from muster.data.overlap import Documents, Overlap, text_key, text_overlap
from muster.data.problems import Problems
from muster.data.progress import log_tenths
from muster.data.text.arrangement import Arrangement, Packing, arrange
from muster.data.text.documents import Document, count_rows, read_documents, row_name
from muster.data.text.tokenizers import Tokenizer
from muster.errors import DataError
from muster.reading import json_file
from muster.writing import write

log = logging.getLogger(__name__)

STREAM_VERSION = 2
SAMPLED = 1 << 20  # tokens of a stream that go into its fingerprint
CHARACTERS_AT_A_TIME = 1 << 20
EPOCHS_HELD = 2  # their orders of documents; batches of the next epoch are prefetched
REST = "tokens at the end that do not fill a sequence"
MOVING_REST = "tokens that do not fill a sequence, others in each epoch"
LARGEST_SIZE = 255  # bytes of text per token that fit the small array; the surplus is kept apart


@dataclass(frozen=True)
class PackedSample:
    id: int
    tokens: NDArray[
        np.int64
    ]  # [time + 1]: the inputs are all but the last, the targets all but the first
    bytes: int  # of text that the targets stand for
    documents: NDArray[np.int64]  # [time] which document of the sequence an input belongs to
    positions: NDArray[np.int64]  # [time] restart with each document
    room: int = 2  # for documents in a batch of its source: the most of a sequence, and padding


class PackedSource:
    """Indexed sequences of `length` targets, cut as `packing` says in the epoch that `of_epoch` names.

    The rest of the stream that does not fill a sequence is left out of training (`whole`), and is a
    shorter last sequence where every token must count.
    """

    groups: None = None

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: Tokenizer,
        length: int,
        *,
        whole: bool,
        text_column: str | None = None,
        max_bad_fraction: float = 0.01,
        packing: Packing = "fixed",
        seed: int = 0,
        isolated: bool = False,
    ) -> None:
        self.paths, self.length = list(paths), length
        self.broken: dict[int, str] = {}
        self.stream = open_stream(self.paths, tokenizer, text_column)
        columns = "data.text_column"
        if words := self.stream.bad.check(self.stream.rows, max_bad_fraction, "documents", columns):
            log.warning("%s", words)
        targets = len(self.stream.tokens) - 1
        count = targets // length if whole else -(-targets // length)
        if count == 0:
            raise DataError(
                f"the text in {', '.join(map(str, self.paths[:5]))} makes {targets} tokens, less than "
                f"one sequence of data.sequence_length={length}; add text, or shorten the sequence"
            )
        self.lengths = np.full(count, float(length))
        self.left_out: dict[str, int] = {}
        if (rest := targets - count * length) > 0:
            self.left_out[REST if packing == "fixed" else MOVING_REST] = rest
        self.packing, self.seed = packing, seed
        self.isolated = isolated
        self._set_arrangement(arrange("fixed", self.stream.starts, targets, seed, 0))
        self._epoch: int | None = None
        self._epochs: dict[int, PackedSource] = {}
        self._lock = threading.Lock()

    def of_epoch(self, epoch: int) -> PackedSource:
        """The same number of sequences of the same lengths, as this epoch cuts them."""
        if self.packing == "fixed":
            return self
        with self._lock:  # or every thread of a loader arranges the next epoch
            if epoch not in self._epochs:
                made, whole = copy.copy(self), self.arrangement
                made._set_arrangement(
                    arrange(self.packing, whole.stored, whole.total, self.seed, epoch)
                )
                made._epoch = epoch
                for other in list(self._epochs)[: 1 - EPOCHS_HELD]:
                    del self._epochs[other]
                self._epochs[epoch] = made
            return self._epochs[epoch]

    def _set_arrangement(self, arrangement: Arrangement) -> None:
        """With room for the most documents of a sequence, where a batch tells them apart. A multiple of 8,
        so that epochs have the same shapes."""
        self.arrangement, self.room = arrangement, 2
        if self.isolated:
            most = arrangement.most_documents(self.length, len(self.lengths))
            self.room = -(-(most + 1) // 8) * 8

    def fingerprint(self) -> bytes:
        """Hash of a sample of the tokens, and of the documents where their order changes."""
        arrays = [self.stream.tokens]
        if self.packing == "shuffled":
            arrays.append(self.stream.starts)
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(array[:: len(array) // SAMPLED + 1].tobytes())
        return digest.digest()

    def __len__(self) -> int:
        return len(self.lengths)

    def load(self, index: int) -> PackedSample:
        begin = index * self.length
        count = min(self.length, self.arrangement.total - begin)
        inputs, within = self.arrangement.place(begin, count)
        restarts = within == 0
        restarts[0] = False
        numbers = np.arange(count)
        return PackedSample(
            id=index,
            tokens=self.stream.tokens[np.append(inputs, inputs[-1] + 1)].astype(np.int64),
            bytes=self.stream.bytes_of(inputs + 1),
            documents=np.cumsum(restarts),
            positions=numbers - np.maximum.accumulate(np.where(restarts, numbers, 0)),
            room=self.room,
        )

    def overlap(self, train: PackedSource) -> list[Overlap]:
        """Text that is in the training text too. Found once for each pair of streams."""
        mine, theirs = self.stream, train.stream
        saved = theirs.folder / f"overlap-{text_key()}-{mine.folder.name}.json"
        try:
            return [Overlap(**json.loads(saved.read_text()))]
        except (OSError, ValueError, TypeError):
            found = text_overlap(mine.as_documents(), theirs.as_documents(), mine.bytes_per_token)
        with contextlib.suppress(OSError):
            write(saved, json.dumps(vars(found)))
        return [found]

    def account(self) -> list[FileAccount]:
        """The documents of each file, and what they hold."""
        stream, files = self.stream, len(self.paths)
        documents = np.bincount(stream.files, minlength=files)
        tokens = np.diff(stream.starts, append=len(stream.tokens) - 1)
        tokens = np.bincount(stream.files, tokens, files).astype(np.int64)
        accounts = []
        for i, path in enumerate(self.paths):
            left_out = dict(stream.bad.files.get(str(path), {}))
            if empty := stream.empty.get(str(i)):
                left_out["empty"] = empty
            amounts: dict[str, float] = {"documents": int(documents[i]), "tokens": int(tokens[i])}
            accounts.append(
                FileAccount(str(path), int(documents[i]), "documents", amounts, left_out)
            )
        return accounts

    def name(self, index: int) -> str:
        """The document that the sequence begins in."""
        number = int(self.arrangement.document(self.arrangement.number(index * self.length)))
        file, row = int(self.stream.files[number]), int(self.stream.row_numbers[number])
        epoch = "" if self._epoch is None else f" of epoch {self._epoch}"
        return f"sequence {index}{epoch}, from {row_name(self.paths[file], row)}"

    def reserve(self, samples: int) -> None:
        """Nothing to do: the stream is memory-mapped."""

    def preload(self, threads: int) -> None:
        """Nothing to do: the stream is memory-mapped."""


def document_starts(documents: NDArray[np.int64], room: int) -> NDArray[np.int32]:
    """Of `documents` [batch, time]: where each begins in its sequence, then the length, [batch, room]."""
    batch, time = documents.shape
    starts = np.full((batch, room), time, np.int32)
    for row, numbers in enumerate(documents):
        places = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
        starts[row, : len(places)] = places
    return starts


@dataclass(frozen=True)
class TokenStream:
    """The cached token stream. Arrays are memory-mapped."""

    tokens: NDArray[Any]  # uint16 or uint32
    sizes: NDArray[np.uint8]  # bytes of text per token, up to LARGEST_SIZE
    large: NDArray[np.int64]  # positions of tokens with more …
    surplus: NDArray[np.int64]  # … and how many more
    starts: NDArray[np.int64]  # position of the `end` before each document
    files: NDArray[np.int64]  # of each document
    row_numbers: NDArray[np.int64]
    rows: int  # documents looked at
    bad: Problems
    empty: dict[str, int]  # documents without a character, by the number of their file
    folder: Path  # in the cache

    def as_documents(self) -> Documents:
        """Each with the `end` after it."""
        return Documents(self.tokens, np.append(self.starts + 1, len(self.tokens)))

    @property
    def bytes_per_token(self) -> float:
        part = self.sizes[:SAMPLED]
        return float(part.sum(dtype=np.int64)) / max(1, len(part))

    def bytes_of(self, positions: NDArray[np.int64]) -> int:
        low = np.searchsorted(self.large, positions)
        large = np.searchsorted(self.large, positions, side="right") > low
        return int(self.sizes[positions].sum(dtype=np.int64) + self.surplus[low[large]].sum())


ARRAYS = ("tokens", "sizes", "large", "surplus", "starts", "files", "row_numbers")


def open_stream(
    paths: Sequence[Path], tokenizer: Tokenizer, text_column: str | None
) -> TokenStream:
    """From the cache, else tokenized and cached."""
    folder = cache.cache_folder() / "tokens" / _key(paths, tokenizer, text_column)
    return cache.load_or_build(
        folder, _load, lambda place: _make(place, paths, tokenizer, text_column), "tokens"
    )


def count_cached(
    paths: Sequence[Path], tokenizer: Tokenizer, text_column: str | None, length: int
) -> int | None:
    """Whole sequences of `length` targets in the text, if it was tokenized before."""
    found = _load(cache.cache_folder() / "tokens" / _key(paths, tokenizer, text_column))
    return (len(found.tokens) - 1) // length if found else None


def _key(paths: Sequence[Path], tokenizer: Tokenizer, text_column: str | None) -> str:
    stats = [_stat(path) for path in paths]
    identities = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    document = [STREAM_VERSION, identities, tokenizer.fingerprint(), text_column]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:24]


def _stat(path: Path) -> tuple[str, os.stat_result]:
    try:
        return str(path.resolve()), path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        words = getattr(error, "strerror", None) or "its links lead in a circle"
        raise DataError(f"{path} cannot be read ({words})") from None


def _load(folder: Path) -> TokenStream | None:
    try:
        about = json_file.read(folder / "stream.json")
        arrays: dict[str, Any] = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS
        }
    except (OSError, ValueError):
        return None
    try:
        bad = Problems.from_json(about["bad"])
        rows, empty = int(about["rows"]), dict(about["empty"])
    except (KeyError, TypeError, ValueError, AttributeError):  # a cache that is none: made again
        return None
    return TokenStream(**arrays, rows=rows, bad=bad, empty=empty, folder=folder)


def _make(
    folder: Path, paths: Sequence[Path], tokenizer: Tokenizer, text_column: str | None
) -> None:
    writer = _StreamWriter(folder, tokenizer)
    bad, rows, empty = Problems(), 0, Counter[int]()
    total, tell = sum(map(count_rows, paths)), log_tenths(log, "tokenized %d of %d documents")
    for texts in _groups(read_documents(paths, text_column, bad)):
        rows += len(texts)
        empty.update(document.file for document in texts if not document.text)
        writer.add([document for document in texts if document.text])
        tell(rows, total)
    writer.close()
    about = {"rows": rows + bad.count, "bad": bad.to_json(), "empty": dict(empty)}
    (folder / "stream.json").write_text(json.dumps(about))


def _groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Enough text at a time to keep a tokenizer's threads busy."""
    group: list[Document] = []
    held = 0
    for document in documents:
        group.append(document)
        held += len(document.text)
        if held >= CHARACTERS_AT_A_TIME:
            yield group
            group, held = [], 0
    yield group


class _StreamWriter:
    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        kinds: dict[str, Any] = dict.fromkeys(ARRAYS, np.int64)
        kinds |= {"sizes": np.uint8, "tokens": np.uint16 if tokenizer.size <= 2**16 else np.uint32}
        self.arrays = {n: GrowingArray(folder / f"{n}.npy", kind) for n, kind in kinds.items()}
        self._append([tokenizer.end], [0])

    def add(self, documents: Sequence[Document]) -> None:
        encoded = self.tokenizer.encode_all([document.text for document in documents])
        for document, (ids, sizes) in zip(documents, encoded, strict=True):
            self.arrays["starts"].append([self.arrays["tokens"].length - 1])
            self.arrays["files"].append([document.file])
            self.arrays["row_numbers"].append([document.row])
            self._append(
                np.append(ids, np.uint32(self.tokenizer.end)),
                np.append(sizes, 0)[: len(ids) + 1],
            )

    def close(self) -> None:
        for array in self.arrays.values():
            array.close()

    def _append(self, tokens: Any, sizes: Any) -> None:
        sizes = np.asarray(sizes, np.int64)
        large = np.flatnonzero(sizes > LARGEST_SIZE)
        self.arrays["large"].append(large + self.arrays["tokens"].length)
        self.arrays["surplus"].append(sizes[large] - LARGEST_SIZE)
        self.arrays["sizes"].append(np.minimum(sizes, LARGEST_SIZE))
        self.arrays["tokens"].append(tokens)


class GrowingArray:
    """A one-dimensional .npy file written piece by piece; its header leaves room for the length."""

    def __init__(self, path: Path, kind: Any) -> None:
        self.kind, self.length = np.dtype(kind), 0
        self._file = path.open("wb")
        self._write_header()

    def append(self, values: Any) -> None:
        self._file.write(np.asarray(values, self.kind).tobytes())
        self.length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        about = {"descr": self.kind.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, about)
