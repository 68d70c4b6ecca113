"""Images and their classes: parquet, MNIST's IDX files, or scikit-learn's digits."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from muster.data.account import FileAccount
from muster.data.corpus import DIGITS, Split
from muster.data.images.files import GREY, Label, ParquetImages, Pixels, Scale, fit, pillow
from muster.data.overlap import Overlap, named_pairs, pairs
from muster.errors import DataError, MusterError
from muster.reading.files import open_file

MAGIC = {"images": (0x803, 16), "labels": (0x801, 8)}  # of an IDX file: first word, bytes of header
DIGITS_SCALE = Scale((0.3059,), (0.3762,))


@dataclass(frozen=True)
class ImageSample:
    id: int
    pixels: Pixels
    label: int  # index of the class


class Images(Protocol):
    """An image dataset: all labels in memory, pixels on demand."""

    labels: Sequence[Label]
    channels: int  # 3 where any image has colour
    size: int | None  # pixels per side where all images share it
    scale: Scale

    def name(self, index: int) -> str: ...
    def pixels(self, index: int, channels: int, size: int) -> Pixels: ...
    def account(self) -> list[FileAccount]: ...
    def digests(self) -> list[str]:
        """Of the pixels of each image."""
        ...

    def sides(self) -> list[int]:
        """The longer side of each image, in pixels."""
        ...


def read(
    spec: str,
    files: Sequence[Path],
    split: Split,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    max_files: int | None = None,
    max_bad_fraction: float = 0.01,
) -> Images:
    """The images of `files`, which `corpus.files` found for `spec` and `split`."""
    if spec == DIGITS:
        return read_digits(split)
    if any(_is_idx(path) for path in files):
        return read_idx(files)
    return ParquetImages(files[:max_files], image_column, label_column, max_bad_fraction)


class ArrayImages:
    """Grey images in memory, `[count, height, width]`."""

    channels = 1

    def __init__(self, source: str, array: Pixels, labels: Sequence[Label], scale: Scale) -> None:
        self.source, self.array, self.labels, self.scale = source, array, labels, scale
        self.size: int | None = max(array.shape[1:])

    def name(self, index: int) -> str:
        return f"{self.source} image {index}"

    def account(self) -> list[FileAccount]:
        return [FileAccount(self.source, len(self.labels), "images")]

    def sides(self) -> list[int]:
        return [max(self.array.shape[1:])] * len(self.array)

    def digests(self) -> list[str]:
        shape = str(self.array.shape[1:])
        return [
            shape + hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in self.array
        ]

    def pixels(self, index: int, channels: int, size: int) -> Pixels:
        if channels == 1 and self.array.shape[1:] == (size, size):
            return self.array[index][None]
        return fit(pillow().fromarray(self.array[index]), channels, size)


def read_digits(split: Split) -> ArrayImages:
    """1,797 digits of 8 × 8 pixels. About every fifth is for the test split, always the same ones."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise MusterError(
            f"{DIGITS} comes with scikit-learn: pip install 'muster-train[examples]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    for_test = np.array([zlib.crc32(b"%d" % i) % 5 == 0 for i in range(len(labels))])
    mask = ~for_test if split == "train" else for_test
    array = np.round(images[mask].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return ArrayImages(f"digits {split}", array, labels[mask].tolist(), DIGITS_SCALE)


def _is_idx(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith("-ubyte")


def read_idx(files: Sequence[Path]) -> ArrayImages:
    found = {kind: _idx_file(files, kind) for kind in MAGIC}
    images, labels = (_idx_array(path, kind) for kind, path in found.items())
    if len(images) != len(labels):
        raise DataError(
            f"{found['images']} has {len(images)} images, {found['labels'].name} {len(labels)} labels; "
            "they are not of one dataset"
        )
    return ArrayImages(found["images"].name, images, labels.tolist(), GREY)


def _idx_file(files: Sequence[Path], kind: str) -> Path:
    fitting = [path for path in files if _is_idx(path) and kind in path.name]
    packed = {path.with_name(path.name + ".gz") for path in fitting}
    fitting = [path for path in fitting if path not in packed]
    if len(fitting) != 1 or any(not _is_idx(path) for path in files):
        listed = ", ".join(map(str, files[:5]))
        raise DataError(
            f"{len(fitting)} IDX files of {kind} among {listed}; expected a folder with one pair such as "
            "train-images-idx3-ubyte and train-labels-idx1-ubyte (also .gz), and no parquet: name it in data.train"
        )
    return fitting[0]


def _idx_array(path: Path, kind: str) -> Pixels:
    magic, header = MAGIC[kind]
    try:
        with open_file(path) as file:
            content = file.read()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from None
    words = np.frombuffer(content[:header], ">u4") if len(content) >= header else [0]
    if words[0] != magic:
        raise DataError(
            f"{path} is not an IDX file of {kind}: expected it to begin with {magic:#x}"
        )
    shape = [int(word) for word in words[1:]]
    if len(content) - header != np.prod(shape):
        raise DataError(
            f"{path} should have {' × '.join(map(str, shape))} bytes and has {len(content) - header}; "
            "fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def find_classes(images: Images) -> list[Label]:
    """The sorted distinct labels; at least two."""
    classes = sorted(set(images.labels), key=lambda label: (isinstance(label, str), label))
    if len(classes) < 2:
        raise DataError(
            f"data.train: every image has the label {classes[0]!r}; expected two classes or more, "
            "see data.label_column"
        )
    return classes


class ImageSource:
    """Indexed images, all of one size and cost."""

    groups: None = None

    def __init__(
        self,
        images: Images,
        classes: Sequence[Label],
        channels: int,
        size: int,
        *,
        key: str = "data.train",
        cache_bytes: int = 1 << 30,
    ) -> None:
        self.images, self.channels, self.size = images, channels, size
        index = {label: i for i, label in enumerate(classes)}
        unknown = [i for i, label in enumerate(images.labels) if label not in index]
        if unknown:
            raise DataError(
                f"{key}: {len(unknown)} images have a label that the training data has not, the first "
                f"is {images.name(unknown[0])} with {images.labels[unknown[0]]!r}; name other data with "
                f"{key}=…, or train on that class too"
            )
        self.labels = [index[label] for label in images.labels]
        self.lengths = np.ones(len(self.labels))
        self.broken: dict[int, str] = {}
        self._cache: dict[int, Pixels] = {}
        self._cache_size = cache_bytes // max(1, channels * size * size)  # in images

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return self.images.name(index)

    def account(self) -> list[FileAccount]:
        return self.images.account()

    def overlap(self, train: ImageSource) -> list[Overlap]:
        """Images with the same pixels."""
        mine, theirs = (dict(enumerate(part.images.digests())) for part in (self, train))
        found = pairs(mine, theirs)
        return [Overlap("pixels", len(found), len(self), "images", named_pairs(found, self, train))]

    def load(self, index: int) -> ImageSample:
        pixels = self._cache.get(index)
        if pixels is None:
            pixels = self.images.pixels(index, self.channels, self.size)
            if len(self._cache) < self._cache_size:
                self._cache[index] = pixels
        return ImageSample(index, pixels, self.labels[index])

    def reserve(self, samples: int) -> None:
        """Nothing to do: images are read one by one."""

    def fingerprint(self) -> bytes:
        """Empty: images are identified by their index."""
        return b""

    def preload(self, threads: int) -> None:
        """Decode everything now, if the cache can hold it, instead of during the first epoch."""
        if len(self) <= self._cache_size:
            with ThreadPoolExecutor(threads) as pool:
                deque(pool.map(self.load, range(len(self))), maxlen=0)
