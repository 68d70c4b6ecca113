"""Images: encoded ones, parquet tables of them, and MNIST's IDX files."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zlib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from fuzzing import mutate
from fuzzing.families.speech import to_parquet
from fuzzing.reader import Case, reader
from muster.data.images.files import ParquetImages
from muster.data.images.source import ImageSource, find_classes, read_idx

LOADED = (
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
KINDS = ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]


@cache
def encoded(kind: str, mode: str = "RGB", label: int = 0) -> bytes:
    pixels = (np.arange(20 * 24 * 3) * (7 + label) % 255).astype(np.uint8).reshape(20, 24, 3)
    image = Image.fromarray(pixels).convert(mode if kind not in ("JPEG", "PPM", "WEBP") else "RGB")
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@cache
def bomb(width: int, height: int, text: bool = False) -> bytes:
    """A PNG whose header promises more than anyone has."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * (50 << 20), 9)
    more = _chunk(b"zTXt", b"c\0\0" + rows) if text else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + more
        + _chunk(b"IDAT", rows)
        + _chunk(b"IEND", b"")
    )


def hostile_image(rng: Random) -> bytes:
    if rng.random() < 0.08:
        sizes = [
            (2**31 - 1, 2**31 - 1),
            (60_000, 60_000),
            (9000, 9000),
            (2**31 - 1, 1),
            (12_000, 12_000),
            (0, 5),
        ]
        return bomb(*rng.choice(sizes), rng.random() < 0.3)
    found = encoded(rng.choice(KINDS), rng.choice(["RGB", "L", "P", "1", "RGBA"]))
    if rng.random() < 0.5:
        changed = bytearray(found)
        for _ in range(rng.choice([1, 2, 4])):
            at, size = rng.randrange(min(80, len(changed) - 8)), rng.choice([1, 2, 4])
            changed[at : at + size] = rng.choice([b"\0", b"\xff", b"\x7f", rng.randbytes(1)]) * size
        return bytes(changed)
    return mutate.raw_bytes(rng, found)


@reader("images", 1400)
def parquet(rng: Random, folder: Path) -> Case:
    count = rng.choice([2, 4])
    cells: list[Any] = []
    for i in range(count):
        cell: Any = hostile_image(rng) if rng.random() < 0.4 else encoded("PNG", "RGB", i)
        cells.append(rng.choice([None, b""]) if rng.random() < 0.05 else cell)
    labels: Any = list(range(count))
    if rng.random() < 0.3:
        labels = [rng.choice([None, -1, 2**62, 0]) for _ in cells]
    column: Any = pa.array(cells, pa.binary())
    if rng.random() < 0.4:
        names = [
            rng.choice([None, "../outside/secret.json", "a\0b", "x" * 5000, "/dev/zero", "."])
            for _ in cells
        ]
        rows = [{"bytes": None if n else c, "path": n} for c, n in zip(cells, names, strict=True)]
        column = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    elif rng.random() < 0.05:
        column = pa.array([{"bytes": 5, "path": 7}] * count)
    content = to_parquet(pa.table({"image": column, "label": pa.array(labels, pa.int64())}))
    if rng.random() < 0.25:
        content = mutate.raw_bytes(rng, content)
    path = mutate.place(rng, folder / mutate.name(rng, "train.parquet"), content)
    for _ in range(rng.random() < 0.1 and os.path.lexists(path)):
        saved = {"of": {}, "clips": [[3, None, "ab", 24]] * count}
        stat = path.lstat()
        saved["of"] = {
            "version": 3,
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "column": "image with digests and sides",
        }
        mutate.place(
            rng, folder / ".muster-index" / f"{path.name}.json", mutate.json_file(rng, saved)
        )

    def read() -> Any:
        images = ParquetImages([path], None, None, 0.9)
        source = ImageSource(images, find_classes(images), images.channels, 16)
        for i in range(len(source)):
            source.load(i)
        images.account(), images.digests(), images.sides()

    return Case(read, (path.name, "data.train") if path.name.isprintable() else ())


@reader("idx", 400)
def idx(rng: Random, folder: Path) -> Case:
    """MNIST's files, packed or not."""
    pixels = bytes(range(256)) * 4
    images = struct.pack(">IIII", 0x803, 16, 8, 8) + pixels
    labels = struct.pack(">II", 0x801, 16) + bytes(i % 10 for i in range(16))
    if rng.random() < 0.4:
        odd = [0, 1, 2**32 - 1, 2**31, 2**16, rng.getrandbits(32)]
        images = (
            struct.pack(">IIII", 0x803, *(rng.choice([*odd, 8, 16]) for _ in range(3))) + pixels
        )
    files = {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels}
    paths = []
    for name, content in files.items():
        made = mutate.raw_bytes(rng, content) if rng.random() < 0.4 else content
        if rng.random() < 0.4:
            made, name = gzip.compress(made), f"{name}.gz"
            made = mutate.raw_bytes(rng, made) if rng.random() < 0.5 else made
            if rng.random() < 0.1:
                made = (
                    gzip.compress(content[:16] + b"\0" * (700 << 20), 1)
                    if rng.random() < 0.1
                    else gzip.compress(b"")
                )
        paths.append(mutate.place(rng, folder / name, made))

    def read() -> Any:
        found = read_idx(paths)
        source = ImageSource(found, find_classes(found), 1, 8)
        return [source.load(i) for i in range(min(len(source), 20))]

    return Case(read, ("ubyte", "data.train"))
