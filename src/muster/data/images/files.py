"""Encoded images, and parquet files of them with their labels."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from muster.data import parquet
from muster.data.account import FileAccount
from muster.data.cache import load_index, save_index, stamp
from muster.data.problems import Problems
from muster.data.utf8 import in_utf8
from muster.errors import DataError, MusterError

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

LONGEST_NAME, LARGEST_SIDE = 4096, 2**24

IMAGE_NAMES = ("image", "img")
LABEL_NAMES = ("label", "labels", "fine_label")

Label = int | str
Pixels = NDArray[np.uint8]  # [channels, height, width]


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of pixels between 0 and 1, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


GREY = Scale((0.1307,), (0.3081,))  # MNIST's
COLOUR = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's


def decode(encoded: bytes | Path, draft: bool = False) -> Image:
    """`draft` reads the whole JPEG but decodes it at an eighth of its size."""
    library = pillow()
    try:
        image = library.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded)
        if draft:
            image.draft(image.mode, (1, 1))
        image.load()
    except FileNotFoundError:
        raise DataError(f"the image file {encoded!s} does not exist") from None
    except (OSError, SyntaxError, ValueError, library.DecompressionBombError) as error:
        words = "" if isinstance(error, library.UnidentifiedImageError) else f" ({error})"
        raise DataError(f"not readable as an image{words}") from None
    if image.mode in ("I", "F"):
        raise DataError("its pixels have 32 bits; expected 8 or 16")
    return image


def fit(image: Image, channels: int, size: int) -> Pixels:
    """[channels, size, size], bilinear."""
    if image.mode.startswith("I;16"):  # Pillow would clip at 255 and not scale
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = image.resize((size, size), pillow().Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels).transpose(2, 0, 1)


def pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MusterError("images need Pillow: pip install 'muster-train[examples]'") from None
    return Image


class ImageRow(NamedTuple):
    file: int
    number: int
    label: Label | None
    channels: int
    problem: str | None
    digest: str  # of its pixels
    side: int  # the longer one


class ParquetImages:
    """Rows with an encoded image, as bytes or as a file beside the parquet file, and a label.

    Row groups are read on demand and cached within a budget; thread-safe.
    """

    size: int | None = None

    def __init__(
        self,
        paths: Sequence[Path],
        image_column: str | None = None,
        label_column: str | None = None,
        max_bad_fraction: float = 0.01,
    ) -> None:
        self.paths = list(paths)
        self._readers = [parquet.open_parquet(path) for path in self.paths]
        self._starts = [parquet.group_starts(reader) for reader in self._readers]
        self._columns = [
            _find_columns(path, reader.schema_arrow, image_column, label_column)
            for path, reader in zip(self.paths, self._readers, strict=True)
        ]
        self._cache: OrderedDict[tuple[int, int], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()
        self.problems = Problems()
        rows = [row for file in range(len(self.paths)) for row in self._check_rows(file)]
        self._check_bad_rows(rows, max_bad_fraction)
        self.rows = [row for row in rows if not row.problem]
        self.labels: Sequence[Label] = [row.label for row in self.rows if row.label is not None]
        self.channels = max(row.channels for row in self.rows)
        self.scale = GREY if self.channels == 1 else COLOUR

    def name(self, index: int) -> str:
        return self._row_name(self.rows[index])

    def pixels(self, index: int, channels: int, size: int) -> Pixels:
        row = self.rows[index]
        starts = self._starts[row.file]
        group = int(np.searchsorted(starts, row.number, side="right")) - 1
        with self._lock:
            cells = self._group(row.file, group)
        try:
            cell = cells[row.number - starts[group]].as_py()
            return fit(decode(_encoded(cell, self.paths[row.file].parent)), channels, size)
        except DataError as error:
            raise DataError(f"{self.name(index)}: {error}") from None

    def _row_name(self, row: ImageRow) -> str:
        """`train-00003.parquet row 17`, for messages."""
        return f"{self.paths[row.file].name} row {row.number}"

    def _check_rows(self, file: int) -> list[ImageRow]:
        """Every row and its problem. Each image is decoded once, as only that finds truncated data; the
        result is cached in an index while the file does not change."""
        path, (image, label) = self.paths[file], self._columns[file]
        groups = range(self._readers[file].num_row_groups)
        labels, bad = self._labels(file, label)
        of = stamp(path, f"{image} with digests and sides")
        checks = load_index(path, of["column"])
        if not _is_index(checks, len(labels)):
            log.info("checking %d images of %s", len(labels), path.name)
            checks, cacheable = [], True
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                for group in groups:
                    cells = self._cells(file, group, image)
                    checks += pool.map(_check_image, cells, repeat(path.parent))
                    cacheable = cacheable and all(_inside(cell) for cell in cells)
            if cacheable:
                save_index(path, of, checks)
        return [
            ImageRow(
                file,
                i,
                name,
                int(channels or 0),
                bad.get(i) or ("the label is empty" if name is None else problem),
                digest,
                side,
            )
            for i, (name, (channels, problem, digest, side)) in enumerate(
                zip(labels, checks, strict=True)
            )
        ]

    def _labels(self, file: int, column: str) -> tuple[list[Any], dict[int, str]]:
        """Of every row; and why some cannot be read."""
        labels: list[Any] = []
        bad: dict[int, str] = {}
        for group in range(self._readers[file].num_row_groups):
            for chunk in self._read(file, group, column).chunks:
                if parquet.holds_text(chunk.type):
                    chunk, found = in_utf8(chunk)
                    bad |= {len(labels) + row: why for row, why in found.items()}
                labels += chunk.to_pylist()
        return labels, bad

    def _check_bad_rows(self, rows: list[ImageRow], max_bad_fraction: float) -> None:
        if not rows:
            raise DataError(f"no rows in {', '.join(map(str, self.paths))}")
        bad = self.problems
        for row in rows:
            if row.problem:
                bad.add(self._row_name(row), row.problem, str(self.paths[row.file]))
        columns = "data.image_column and data.label_column"
        if words := bad.check(len(rows), max_bad_fraction, "rows", columns):
            log.warning("%s", words)

    def account(self) -> list[FileAccount]:
        counts = Counter(row.file for row in self.rows)
        return [
            FileAccount(
                str(path), counts[i], "images", {}, dict(self.problems.files.get(str(path), {}))
            )
            for i, path in enumerate(self.paths)
        ]

    def digests(self) -> list[str]:
        return [row.digest for row in self.rows]

    def sides(self) -> list[int]:
        return [row.side for row in self.rows]

    def _group(self, file: int, group: int) -> pa.ChunkedArray:
        key = (file, group)
        if key not in self._cache:
            self._cache[key] = self._read(file, group, self._columns[file][0])
            while (
                sum(cells.nbytes for cells in self._cache.values()) > parquet.ROW_GROUP_CACHE_BYTES
                and len(self._cache) > 1
            ):
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _cells(self, file: int, group: int, column: str) -> list[Any]:
        try:
            return list(self._read(file, group, column).to_pylist())
        except UnicodeDecodeError:
            raise DataError(
                f"{self.paths[file]}, row group {group}, column {column}: a path is not UTF-8; "
                "repair the file, or remove it from the data"
            ) from None

    def _read(self, file: int, group: int, column: str) -> pa.ChunkedArray:
        try:
            return self._readers[file].read_row_group(group, columns=[column]).column(0)
        except parquet.DAMAGED as error:
            raise DataError(
                f"{self.paths[file]}, row group {group}, column {column}: {parquet.first_line(error)}; "
                "repair the file, or remove it from the data"
            ) from None


def _find_columns(
    path: Path, schema: pa.Schema, image_column: str | None, label_column: str | None
) -> tuple[str, str]:
    return (
        parquet.pick_column(path, schema, image_column, IMAGE_NAMES, _holds_image, "image"),
        parquet.pick_column(path, schema, label_column, LABEL_NAMES, _holds_label, "label"),
    )


def _holds_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name in ("bytes", "path") for i in range(kind.num_fields))
    return parquet.is_binary(kind)


def _holds_label(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_label(kind.value_type)
    return bool(pa.types.is_integer(kind)) or parquet.holds_text(kind)


def _inside(cell: Any) -> bool:
    """The image itself is in the parquet file, so it cannot change without it."""
    return isinstance(cell, bytes) or (isinstance(cell, dict) and bool(cell.get("bytes")))


def _encoded(cell: Any, folder: Path) -> bytes | Path:
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if not cell:
        raise DataError("the image is empty")
    if isinstance(cell, bytes):
        return cell
    if not isinstance(cell, str) or "\0" in cell or len(cell) > LONGEST_NAME:
        raise DataError("the image has a path that is no name of a file")
    return folder / cell


def _is_index(saved: Any, rows: int) -> bool:
    """Whether it is what `_check_image` gave of so many rows; an index lies where anybody may write."""
    return (
        isinstance(saved, list)
        and len(saved) == rows
        and all(
            isinstance(row, list)
            and len(row) == 4
            and (row[0] in (1, 3, 4) or (row[0] is None and isinstance(row[1], str)))
            and isinstance(row[1], str | None)
            and isinstance(row[2], str)
            and type(row[3]) is int
            and 0 <= row[3] <= LARGEST_SIDE
            for row in saved
        )
    )


def _check_image(cell: Any, folder: Path) -> tuple[int | None, str | None, str, int]:
    """Channels of an image, or its problem; a digest of its pixels, or of a JPEG's bytes, since of that
    a smaller image was decoded; and its longer side."""
    try:
        encoded = _encoded(cell, folder)
        image = decode(encoded, draft=True)
    except DataError as error:
        return None, str(error), "", 0
    side = max(image.size)
    grey = image.mode in ("1", "L", "LA") or image.mode.startswith("I;16")
    digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=8)
    if image.format == "JPEG":
        whole = encoded if isinstance(encoded, bytes) else encoded.read_bytes()
        digest.update(whole)
        with pillow().open(io.BytesIO(whole)) as header:
            side = max(header.size)
    else:
        digest.update(image.tobytes())
    return 1 if grey else 3, None, digest.hexdigest(), side
