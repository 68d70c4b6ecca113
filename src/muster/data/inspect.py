"""Summary of a corpus of any kind: sizes, lengths, what cannot be read, what is there twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from muster.data import corpus
from muster.data.account import Account, not_used
from muster.data.inspection import Inspection, find_duplicates, histogram, spread
from muster.data.parquet import AUDIO_NAMES, holds_text, open_parquet
from muster.data.problems import Problems
from muster.data.progress import Progress
from muster.data.splits import SPLITS
from muster.data.text.conversations import are_chat, read_conversations
from muster.data.text.documents import read_documents, row_name
from muster.errors import DataError
from muster.workloads import Content

CONTENTS: tuple[Content, ...] = ("speech", "images", "text")
COMMON = 8


def inspect(
    spec: str,
    content: Content | None = None,
    progress: Progress | None = None,
    decode: bool = False,
) -> tuple[list[Inspection], list[str]]:
    """Each split of `spec`, and what is said of its files; a single file or glob counts as one split.

    `decode` decodes every clip, and the index stores those that fail.
    """
    content = content or content_of(spec)
    paths = split_paths(spec, content)
    if content == "speech":
        from muster.data.speech.inspect import inspect_speech

        parts = inspect_speech(paths, progress, decode)
    elif content == "images":
        parts = [_images(spec, split, files) for split, files in paths.items()]
    else:
        parts = [_text(split, files) for split, files in paths.items()]
    remarks, notes = not_used({"train": spec, "validation": None, "test": None}, content, None)
    return find_duplicates(parts), notes + Account([], remarks, []).warnings()


def split_paths(spec: str, content: Content) -> dict[str, list[Path]]:
    """The files of each split; `all` where there are no splits. Embedded images have none."""
    found, assigned = corpus.find(spec, "data", content)
    if spec == corpus.DIGITS:
        return {"train": [], "test": []}
    paths = {str(split): assigned.of_split(split) for split in SPLITS}
    paths = {split: files for split, files in paths.items() if files}
    if not any(assigned.of.values()):
        paths = {"all": found}
    corpus.remote.fetch([path for files in paths.values() for path in files])
    return paths


def content_of(spec: str) -> Content:
    """What a corpus holds, by its files and, of parquet, by its columns."""
    reasons = []
    for content in CONTENTS:
        try:
            found, _ = corpus.find(spec, "data", content)
        except DataError as error:
            reasons.append(str(error))
            continue
        endings = corpus.ENDINGS[content]
        if content != "text" and found and not f"/{found[0]}".endswith(endings):
            continue  # a file that is named is found whatever it ends in
        if not found or found[0].suffix != ".parquet":
            return content
        corpus.remote.fetch(found[:1])
        with open_parquet(found[0]) as reader:
            schema = reader.schema_arrow
        sounds = [n for n in AUDIO_NAMES if n in schema.names]
        if any(not holds_text(schema.field(name).type) for name in sounds) or "audio" in sounds:
            return "speech"
        return "images" if {"image", "img"} & set(schema.names) else "text"
    raise DataError(reasons[-1])


def _text(split: str, paths: list[Path]) -> Inspection:
    """Documents or chat rows; their lengths are in characters, since no tokenizer is chosen yet."""
    chat = are_chat("auto", None, paths)
    bad, details = Problems(), Counter[str]()
    lengths: list[int] = []
    places: list[tuple[int, int]] = []
    keys: dict[int, int] = {}
    size = 0
    for file, row, text, roles in _conversations(paths, bad) if chat else _documents(paths, bad):
        keys[len(lengths)] = hash(text)
        lengths.append(len(text))
        places.append((file, row))
        size += len(text.encode())
        details.update(roles)

    def name(index: int) -> str:
        file, row = places[index]
        return row_name(paths[file], row)

    of = np.array(lengths, np.float64)
    empty = int((of == 0).sum())
    lines = (
        [f"turns: {', '.join(f'{role} {n:,}' for role, n in details.most_common())}"]
        if chat
        else []
    )
    lines += [f"{empty:,} empty, which training leaves out"] if empty else []
    return Inspection(
        split=split,
        files=len(paths),
        what="conversations" if chat else "documents",
        count=len(lengths),
        amount=f"{size / 1e6:,.2f} MB of text",
        unit="characters",
        lengths=spread(of),
        longest=name(int(of.argmax())) if places else "",
        histogram=histogram(of),
        details=lines,
        unreadable=bad.count,
        problems=[str(kind) for kind in bad.kinds.values()],
        keys={i: key for i, key in keys.items() if lengths[i]},
        name=name,
    )


def _documents(paths: list[Path], bad: Problems) -> Iterator[tuple[int, int, str, list[str]]]:
    for document in read_documents(paths, None, bad):
        yield document.file, document.row, document.text, []


def _conversations(paths: list[Path], bad: Problems) -> Iterator[tuple[int, int, str, list[str]]]:
    for row in read_conversations(paths, bad):
        text = "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in row.messages)
        yield row.file, row.row, text, [str(m["role"]) for m in row.messages]


def _images(spec: str, split: str, files: list[Path]) -> Inspection:
    from muster.data.images.source import read

    images = read(spec, files, "test" if split == "test" else "train", max_bad_fraction=1.0)
    sides = np.array(images.sides(), np.float64)
    classes = Counter(images.labels)
    named = ", ".join(f"{label} {n:,}" for label, n in classes.most_common(COMMON))
    bad: Problems = getattr(images, "problems", Problems())
    return Inspection(
        split=split,
        files=len(files),
        what="images",
        count=len(images.labels),
        amount=f"{len(classes)} classes, {'grey' if images.channels == 1 else 'colour'}",
        unit="px",
        lengths=spread(sides),
        longest=images.name(int(sides.argmax())),
        histogram=histogram(sides),
        details=[f"classes: {named}{' …' if len(classes) > COMMON else ''}"],
        unreadable=bad.count,
        problems=[str(kind) for kind in bad.kinds.values()],
        keys=dict(enumerate(images.digests())),
        name=images.name,
    )
