"""Clips: encoded audio, parquet tables, folders with metadata, and the index of durations."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import soxr  # noqa: F401 - loaded before the limits

from fuzzing import mutate
from fuzzing.reader import Case, reader
from muster.data import corpus
from muster.data.speech import audio
from muster.data.speech.source import SpeechLimits, SpeechSource

RATE = 16000
KINDS = [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "PCM_U8"), ("FLAC", "PCM_16")]
KINDS += [
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
    ("AIFF", "PCM_16"),
    ("AU", "PCM_16"),
]
LIMITS = SpeechLimits(max_bad_fraction=0.5)


@cache
def encoded(kind: tuple[str, str] = KINDS[0], seconds: float = 0.3, channels: int = 1) -> bytes:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * RATE)) / RATE)
    file = io.BytesIO()
    samples = np.stack([tone] * channels, axis=1)
    soundfile.write(file, samples, RATE, format=kind[0], subtype=kind[1])
    return file.getvalue()


def _clip(rng: Random) -> bytes:
    return encoded(rng.choice(KINDS), rng.choice([0.1, 0.3]), rng.choice([1, 1, 2]))


def _header_numbers(rng: Random, clip: bytes) -> bytes:
    """Extreme numbers where headers have theirs."""
    found = bytearray(clip)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, size = rng.randrange(min(60, len(found) - 8)), rng.choice([1, 2, 4, 8])
        number = rng.choice(
            [0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), rng.getrandbits(8 * size)]
        )
        found[at : at + size] = number.to_bytes(size, rng.choice(["little", "big"]))
    return bytes(found)


def hostile_clip(rng: Random) -> bytes:
    clip = _clip(rng)
    return _header_numbers(rng, clip) if rng.random() < 0.5 else mutate.raw_bytes(rng, clip)


@reader("audio", 1800)
def encoded_audio(rng: Random, folder: Path) -> Case:
    clip: Any = hostile_clip(rng)
    if rng.random() < 0.4:
        clip = mutate.place(rng, folder / mutate.name(rng, "clip.wav"), clip)

    def read() -> Any:
        found = audio.header(clip)
        samples = audio.read(clip, RATE, found.seconds, rng.choice([None, 30.0]))
        return samples, found

    def wrong(taken: Any) -> str | None:
        samples, _ = taken
        return (
            None if np.isfinite(samples).all() and samples.ndim == 1 else "samples are not finite"
        )

    return Case(read, wrong=wrong)


def _texts(rng: Random, count: int) -> pa.Array:
    """Of which some are null, odd, or no UTF-8."""
    texts: list[bytes | None] = [b"one two three"] * count
    for i in range(count):
        if rng.random() < 0.15:
            odd = mutate.text(rng)[:2000].encode("utf-8", "surrogatepass")
            texts[i] = rng.choice([None, b"", b"\xff\xfe\xfd", odd])
    plain = pa.array(texts, pa.binary())
    kind = rng.choice(
        [pa.string(), pa.string(), pa.string(), pa.large_string(), pa.binary(), pa.int64()]
    )
    if kind == pa.int64():
        return pa.array(range(count), kind)
    if kind == pa.large_string():
        large = plain.cast(pa.large_binary())
        return pa.Array.from_buffers(kind, count, large.buffers())
    return pa.Array.from_buffers(kind, count, plain.buffers())


def _rates(rng: Random, count: int) -> pa.Array:
    kind = rng.choice([pa.int64(), pa.float64(), pa.int32(), pa.string()])
    if kind == pa.string():
        return pa.array(["16000"] * count)
    odd = [10**12, 2**62, -1, 0, 1, 7, None, 16000, 44100, 2**31]
    if kind == pa.float64():
        odd = [1e308, float("nan"), float("inf"), -0.5, 0.001, 16000.0, None, 1e12]
    if kind == pa.int32():
        odd = [2**31 - 1, -1, 0, 1, None]
    return pa.array([rng.choice(odd) if rng.random() < 0.4 else 16000 for _ in range(count)], kind)


def _samples(rng: Random, count: int) -> pa.Array:
    value = rng.choice([pa.float32(), pa.float64(), pa.int16(), pa.int32(), pa.float16()])
    rows: list[Any] = []
    for _ in range(count):
        if pa.types.is_integer(value):
            rows.append(rng.choice([[1000] * 4000, [], None, [None] * 20, [-(2**15)] * 3000]))
        else:
            odd = [float("nan"), float("inf"), 1e308 if value == pa.float64() else 1e4] * 500
            rows.append(rng.choice([[0.25] * 4000, [0.25] * 4000, [], None, odd, [None] * 10]))
    if value == pa.float16():
        rows = [
            None if row is None else [None if x is None else np.float16(x) for x in row]
            for row in rows
        ]
    return pa.array(rows, rng.choice([pa.list_, pa.large_list])(value))


def _table(rng: Random) -> pa.Table:
    count = rng.choice([1, 3, 6])
    kind = rng.randrange(5)
    clips = [hostile_clip(rng) if rng.random() < 0.2 else encoded() for _ in range(count)]
    paths = [rng.choice([None, "x.wav", *mutate.TEXTS[15:30]]) for _ in range(count)]
    paths = [
        p if p is None or p.isprintable() else p.encode("utf-8", "ignore").decode() for p in paths
    ]
    if kind == 0:
        column: Any = pa.array(clips, pa.binary())
    elif kind == 1:
        column = _samples(rng, count)
    elif kind == 2:
        column = pa.array(paths, pa.string())
    elif kind == 3:
        column = pa.StructArray.from_arrays(
            [_samples(rng, count), _rates(rng, count)], ["array", "sampling_rate"]
        )
    else:
        cells = [
            {"bytes": rng.choice([c, c, c, c, None, b""]), "path": p}
            for c, p in zip(clips, paths, strict=True)
        ]
        column = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    columns = {"audio": column, "text": _texts(rng, count)}
    if kind == 1 or rng.random() < 0.2:
        columns["sampling_rate"] = _rates(rng, count)
    if rng.random() < 0.05:
        columns[rng.choice(mutate.ODD_NAMES[:7])] = pa.array(range(count))
    if rng.random() < 0.03:
        del columns[rng.choice(list(columns))]
    return pa.table(columns)


def to_parquet(table: pa.Table, rows: int = 3) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=rows, compression="none")
    return file.getvalue()


def read_speech(paths: list[Path]) -> SpeechSource:
    source = SpeechSource(paths, LIMITS)
    for i in range(len(source)):
        source.name(i)
        source.load(i)
    source.account()
    return source


def sound(source: Any) -> str | None:
    """What is wrong with the durations of a speech source."""
    lengths = source.lengths
    if not (np.isfinite(lengths).all() and (lengths > 0).all() and (lengths < 1e5).all()):
        return f"durations {lengths[:3]}"
    try:
        for one in source.texts:
            one.encode()
    except UnicodeError:
        return "a text that is no UTF-8"
    return None


@reader("parquet", 1600)
def parquet(rng: Random, folder: Path) -> Case:
    """Of speech: hostile cells, columns of other types, damaged files."""
    content = to_parquet(_table(rng))
    if rng.random() < 0.35:
        content = mutate.raw_bytes(rng, content)
    path = mutate.place(rng, folder / mutate.name(rng, "train.parquet"), content)
    return Case(lambda: read_speech([path]), _names(path), sound)


def _names(path: Path) -> tuple[str, ...]:
    """A name that a terminal cannot show is not asked for."""
    return (path.name,) if path.name.isprintable() else ()


@reader("metadata", 1500)
def metadata(rng: Random, folder: Path) -> Case:
    """A folder of clips with metadata.csv or metadata.jsonl."""
    inside = folder / mutate.name(rng, "clips")
    inside.mkdir(exist_ok=True, parents=True)
    rows = []
    for i in range(4):
        (inside / f"{i}.wav").write_bytes(encoded() if rng.random() < 0.9 else hostile_clip(rng))
        rows.append({"file_name": f"{i}.wav", "text": f"clip {i}"})
    if rng.random() < 0.5:
        name, content = "metadata.jsonl", mutate.json_lines(rng, rows)
    else:
        lines = ["file_name,text", *(f"{row['file_name']},{row['text']}" for row in rows)]
        for i in range(len(lines)):
            if rng.random() < 0.2:
                odd = mutate.text(rng)
                lines[i] = rng.choice(
                    [odd, f"{i}.wav,{odd}", f'"{odd}",x', f"{odd},{odd},{odd}", '"']
                )
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        content = mutate.raw_bytes(rng, content) if rng.random() < 0.3 else content
        name = "metadata.csv"
    mutate.place(rng, inside / name, content)

    def read() -> Any:
        found = corpus.files(str(inside), "data.train", "train", None, "speech")
        source = read_speech(found)
        source.unnamed()
        return source

    return Case(read, (*_names(inside), name, ".wav"), sound)


@cache
def _indexed() -> tuple[bytes, dict[str, Any]]:
    """A good table and what its index looks like, without the file's time."""
    table = pa.table({"audio": pa.array([encoded()] * 6, pa.binary()), "text": ["one"] * 6})
    clips = {
        "seconds": [0.3] * 6,
        "problems": {},
        "unsettled": [],
        "kinds": {"WAV 16000 Hz": 6},
        "decoded": False,
        "files": {},
    }
    return to_parquet(table), clips


@reader("index", 1000)
def index(rng: Random, folder: Path) -> Case:
    """A poisoned index of durations beside a good file."""
    content, clips = _indexed()
    path = folder / "train.parquet"
    path.write_bytes(content)
    stat = path.stat()
    of = {"version": 3, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "column": "audio"}
    clips = json.loads(json.dumps(clips))
    kind = rng.randrange(4)
    if kind == 0:
        odd = [
            -1.0,
            float("nan"),
            1e308,
            float("inf"),
            None,
            "x",
            [],
            2**70,
            -(10**30),
            0.0,
            10**400,
        ]
        clips["seconds"][rng.randrange(6)] = rng.choice(odd)
    elif kind == 1:
        clips[rng.choice(["problems", "files"])] = rng.choice(
            [
                {"9": "x"},
                {"-1": "x"},
                {"x": "y"},
                {"0": 1},
                {"0": ["../outside/secret.json", 1, 2, "x"]},
                {"0": [1, 2]},
                {"1": "[/red]\x1b[2J\nx"},
                {"0": ["a\x00b", 1, 2, "k"]},
                {str(2**70): "x"},
            ]
        )
    elif kind == 2:
        clips[rng.choice(["unsettled", "kinds", "decoded"])] = rng.choice(
            [[9], [-1], ["x"], [[]], {"a": "b"}, {"a": -5}, {"a": 1e308}, None, 2, [2**70], "x"]
        )
    saved = {"of": of, "clips": clips}
    if kind == 3:
        made = mutate.json_file(rng, saved)
    else:
        made = mutate.to_json(saved) if kind != 0 or clips["seconds"][0] != 10**400 else b"{}"
    mutate.place(rng, folder / ".muster-index" / "train.parquet.json", made)

    def wrong(source: Any) -> str | None:
        if len(source) and not np.allclose(source.lengths, 0.3, rtol=10):
            return f"durations {source.lengths}"
        return None

    return Case(lambda: read_speech([path]), ("train.parquet",), wrong)
