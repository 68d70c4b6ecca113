"""Summary of a corpus of any kind: sizes, lengths, what cannot be read, what is there twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from muster.data import corpus
from muster.data.account import Account, not_used
from muster.data.inspection import Inspection, find_duplicates, histogram, spread
from muster.data.parquet import AUDIO_NAMES, holds_text, open_parquet
from muster.data.problems import Problems
from muster.data.progress import Progress
from muster.data.splits import SPLITS, Assigned, Split, assign_names
from muster.data.text.conversations import are_chat, read_conversations
from muster.data.text.documents import read_documents, row_name
from muster.errors import DataError
from muster.workloads import Content

CONTENTS: tuple[Content, ...] = ("speech", "images", "text")
COMMON = 8


def inspect(
    specs: str | Sequence[str],
    content: Content | None = None,
    progress: Progress | None = None,
    decode: bool = False,
) -> tuple[list[Inspection], list[str]]:
    """Each split of the corpora together, and what is said of their files; a single file or glob counts as one
    split.

    `decode` decodes every clip, and the index stores those that fail.
    """
    specs = [specs] if isinstance(specs, str) else list(dict.fromkeys(specs))
    content = content or _content_of_all(specs)
    paths = split_paths(specs, content)
    if content == "speech":
        from muster.data.speech.inspect import inspect_speech

        parts = inspect_speech(paths, progress, decode)
    elif content == "images":
        parts = [_images(specs[0], split, files) for split, files in paths.items()]
    else:
        parts = [_text(split, files) for split, files in paths.items()]
    remarks, notes = not_used({"train": specs, "validation": None, "test": None}, content, None)
    return find_duplicates(parts), notes + Account([], remarks, []).warnings()


def split_paths(specs: Sequence[str], content: Content) -> dict[str, list[Path]]:
    """The files of each split; `all` where there are no splits. Embedded images have none. Of several corpora
    as training on them reads them; several files, of which names say nothing to training, have the
    splits that their names say."""
    if corpus.DIGITS in specs:
        if len(specs) > 1:
            raise DataError(f"{corpus.DIGITS} has no files; name it alone")
        return {"train": [], "test": []}
    places = [corpus.find(spec, "data", content) for spec in specs]
    files = [path for found, _ in places for path in found]
    assigned = [assigned for _, assigned in places]
    if len(specs) > 1 and not any(one.of for one in assigned):
        assigned = [assign_names({path: Path(path.name) for path in files})]
        places = [(files, assigned[0])]
    paths = {"all": list(dict.fromkeys(files))}
    if any(split for one in assigned for split in one.of.values()):
        paths = {str(split): _of_split(split, places) for split in SPLITS}
        paths = {split: found for split, found in paths.items() if found}
    corpus.remote.fetch([path for found in paths.values() for path in found])
    return paths


def _of_split(split: Split, places: Sequence[tuple[list[Path], Assigned]]) -> list[Path]:
    """Without a split of its own, a corpus is training data."""
    found: dict[Path, None] = {}
    for files, assigned in places:
        whole = files if split == "train" else []
        found |= dict.fromkeys(assigned.of_split(split) if assigned.of else whole)
    return list(found)


def _content_of_all(specs: Sequence[str]) -> Content:
    found = {spec: content_of(spec) for spec in specs}
    if len(set(found.values())) > 1:
        words = ", ".join(f"{spec} holds {content}" for spec, content in found.items())
        raise DataError(f"{words}; look at each kind by itself, or name one with --kind")
    return found[specs[0]]


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
