"""Images from parquet, IDX files and scikit-learn; what is wrong with a row is found and named."""

from __future__ import annotations

import gzip
import io
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from muster.data.corpus import DIGITS, files
from muster.data.images import files as image_files
from muster.data.images.files import ParquetImages
from muster.data.images.source import ImageSource, find_classes, read, read_digits, read_idx
from muster.errors import DataError, MusterError

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (9, 12, 3), np.uint8)
GREY = RNG.integers(0, 256, (8, 8), np.uint8)
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


GOOD = encode(COLOUR)
JPEG = encode(np.kron(COLOUR, np.ones((8, 8, 1), np.uint8)), "JPEG")


@pytest.fixture
def write(tmp_path):
    """`write([cell, …], [label, …])` makes train.parquet, three rows in a group."""

    def make(cells, labels, *, kind=STRUCT, label_kind=None, columns=("image", "label")):
        if kind == STRUCT:
            cells = [{"bytes": c, "path": None} if isinstance(c, bytes) else c for c in cells]
        table = pa.table([pa.array(cells, kind), pa.array(labels, label_kind)], names=columns)
        pq.write_table(table, tmp_path / "train.parquet", row_group_size=3)
        return [tmp_path / "train.parquet"]

    return make


@pytest.mark.parametrize("kind", [STRUCT, pa.binary(), pa.large_binary()])
def test_encoded_bytes_come_back_as_channels_first_pixels(write, kind):
    images = ParquetImages(write([GOOD] * 4 + [encode(COLOUR[::-1])], [1, 0, 1, 0, 5], kind=kind))
    assert images.labels == [1, 0, 1, 0, 5]
    assert images.channels == 3
    assert images.name(4) == "train.parquet row 4"
    square = encode(COLOUR[:9, :9])
    images = ParquetImages(write([square], [0], kind=kind))
    np.testing.assert_array_equal(images.pixels(0, 3, 9), COLOUR[:9, :9].transpose(2, 0, 1))


def test_files_named_by_the_parquet_file_are_found_beside_it(write, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(encode(GREY))
    paths = write([{"bytes": None, "path": "pictures/a.png"}], ["a"])
    images = ParquetImages(paths)
    np.testing.assert_array_equal(images.pixels(0, 1, 8)[0], GREY)
    (tmp_path / "pictures" / "a.png").unlink()
    with pytest.raises(DataError, match=r"row 0: the image file .*a\.png does not exist"):
        images.pixels(0, 1, 8)
    with pytest.raises(DataError, match="does not exist"):
        ParquetImages(paths)


@pytest.mark.parametrize("size", [6, 20])
def test_scaling_is_bilinear_and_averages_when_it_shrinks(write, size):
    images = ParquetImages(write([GOOD], [0]))
    whole = torch.from_numpy(COLOUR).permute(2, 0, 1)[None].double()
    expected = F.interpolate(whole, (size, size), mode="bilinear", antialias=True)[0]
    assert np.abs(images.pixels(0, 3, size) - expected.numpy()).max() <= 1  # Pillow rounds twice


def test_channels_follow_the_most_colourful_image(write):
    grey = encode(GREY)
    assert ParquetImages(write([grey, grey], [0, 1])).channels == 1
    mixed = ParquetImages(write([grey, GOOD], [0, 1]))
    assert mixed.channels == 3
    np.testing.assert_array_equal(mixed.pixels(0, 3, 8), np.stack([GREY] * 3))
    assert mixed.pixels(1, 1, 8).shape == (1, 8, 8)


def test_sixteen_bit_pixels_keep_their_shades(write):
    deep = (GREY.astype(np.uint16) << 8) + 77
    images = ParquetImages(write([encode(deep)], [0]))
    assert images.channels == 1
    np.testing.assert_array_equal(images.pixels(0, 1, 8)[0], GREY)


def test_columns_are_found_by_name_and_type_or_named_by_the_recipe(write):
    assert ParquetImages(write([GOOD], ["cat"], columns=("img", "fine_label"))).labels == ["cat"]
    paths = write([GOOD], [3], columns=("picture", "kind"))
    assert ParquetImages(paths, "picture", "kind").labels == [3]
    with pytest.raises(DataError, match=r"data\.image_column=…; it has picture"):
        ParquetImages(paths)
    with pytest.raises(DataError, match=r"data\.label_column: 'kind' .* holds no label"):
        ParquetImages(write([GOOD], [0.5], columns=("image", "kind")), None, "kind")


def test_labels_may_be_a_category(write):
    paths = write([GOOD] * 2, ["b", "a"], label_kind=pa.dictionary(pa.int8(), pa.string()))
    assert ParquetImages(paths).labels == ["b", "a"]


BAD = [
    (b"garbage", "not readable as an image"),
    (GOOD[: len(GOOD) // 2], "not readable as an image"),
    (JPEG[: len(JPEG) // 2], r"not readable as an image \(image file is truncated"),
    (None, "the image is empty"),
    (encode(GREY.astype(np.int32), "TIFF"), "its pixels have 32 bits"),
]


@pytest.mark.parametrize(("cell", "words"), BAD)
def test_a_bad_row_above_the_share_is_an_error_that_names_row_reason_and_key(write, cell, words):
    paths = write([GOOD, cell, *[GOOD] * 8], [0, 1] * 5)
    with pytest.raises(DataError, match=f"1 of 10 rows .*train.parquet row 1: {words}") as error:
        ParquetImages(paths, max_bad_fraction=0.09)
    assert "data.max_bad_fraction above 0.100" in str(error.value)
    assert "0x" not in str(error.value), "no address of an object"


def test_bad_rows_within_the_share_are_left_out_and_named(write, caplog):
    cells = [GOOD, b"garbage", *[encode(COLOUR[::-1])] * 7, GOOD]
    paths = write(cells, [0, 1, 2, None, 4, 5, 6, 7, 8, 9])
    for _ in range(2):  # from the images, then from the index
        caplog.clear()
        images = ParquetImages(paths, max_bad_fraction=0.2)
        assert images.labels == [0, 2, 4, 5, 6, 7, 8, 9]
        assert images.name(2) == "train.parquet row 4"
        assert "2 of 10 rows cannot be read" in caplog.text
        assert "train.parquet row 1: not readable as an image" in caplog.text
        assert "train.parquet row 3: the label is empty" in caplog.text
    first, *others, last = (images.pixels(i, 3, 9) for i in range(8))
    np.testing.assert_array_equal(first, last)
    assert all((other != first).any() for other in others)


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_nothing_but_bad_rows_is_an_error_at_any_share(write, share):
    with pytest.raises(DataError, match=r"7 of 7 .* row 4 …\); .*data\.image_column") as error:
        ParquetImages(write([b"garbage"] * 7, [0] * 7), max_bad_fraction=share)
    assert "row 5" not in str(error.value)


def test_images_are_examined_once_for_as_long_as_the_file_stays(write, monkeypatch):
    seen = []
    examine = image_files._check_image
    monkeypatch.setattr(
        image_files, "_check_image", lambda cell, folder: seen.append(cell) or examine(cell, folder)
    )
    paths = write([GOOD] * 5, [0, 1, 0, 1, 0])
    assert ParquetImages(paths).channels == 3
    assert ParquetImages(paths).channels == 3
    assert len(seen) == 5
    assert ParquetImages(write([encode(GREY)] * 4, [0, 1, 0, 1])).channels == 1
    assert len(seen) == 9


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim)
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Five training and two test images in the folder, one pair packed."""
    pixels = RNG.integers(0, 256, (7, 28, 28), np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(pixels[:5]))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([3, 1, 4, 1, 5])))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels[5:])))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([9, 2]))))
    return tmp_path, pixels


def of_split(folder, split):
    found = files(str(folder), f"data.{split}", split, content="images")
    return read(str(folder), found, split, max_files=1)


def test_a_folder_with_mnists_files_has_both_splits(mnist):
    folder, pixels = mnist
    train, test = of_split(folder, "train"), of_split(folder, "test")
    assert (train.labels, test.labels) == ([3, 1, 4, 1, 5], [9, 2])
    assert (train.size, train.channels) == (28, 1)
    np.testing.assert_array_equal(train.pixels(4, 1, 28)[0], pixels[4])
    np.testing.assert_array_equal(test.pixels(1, 1, 28)[0], pixels[6])
    np.testing.assert_array_equal(test.pixels(1, 3, 28), np.stack([pixels[6]] * 3))
    assert test.pixels(0, 1, 14).shape == (1, 14, 14)


def test_a_file_and_its_packed_copy_are_one(mnist):
    folder, _ = mnist
    plain = folder / "train-images-idx3-ubyte"
    plain.with_name(plain.name + ".gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert len(of_split(folder, "train").labels) == 5


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: c[:-100], "should have 5 × 28 × 28 bytes and has 3820"),
        (lambda c: b"\x00\x00\x08\x01" + c[4:], "is not an IDX file of images"),
        (lambda c: b"", "is not an IDX file of images"),
        (lambda c: idx(np.zeros((6, 28, 28))), "has 6 images, train-labels-idx1-ubyte 5 labels"),
    ],
)
def test_a_damaged_idx_file_is_named(mnist, damage, words):
    path = mnist[0] / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words) as error:
        of_split(mnist[0], "train")
    assert str(path) in str(error.value)


def test_a_packed_idx_file_cut_short_is_named(mnist):
    path = mnist[0] / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        of_split(mnist[0], "test")


def test_idx_files_must_be_one_pair_and_nothing_else(mnist, write):
    folder = mnist[0]
    pair = sorted(folder.glob("train-*"))
    with pytest.raises(DataError, match="0 IDX files of labels"):
        read_idx(pair[:1])
    with pytest.raises(DataError, match="2 IDX files of images"):
        read_idx([*pair, *folder.glob("t10k-*")])
    with pytest.raises(DataError, match="no parquet"):
        read(str(folder), [*pair, *write([GOOD], [0])], "train")


def test_the_digits_are_split_once_and_for_all():
    from sklearn.datasets import load_digits

    train, test = read_digits("train"), read(DIGITS, [], "test")
    everything = load_digits()
    assert (len(train.labels), len(test.labels)) == (1450, 347)
    together = sorted([*train.array.tolist(), *test.array.tolist()])
    assert together == sorted(np.round(everything.images * 255 / 16).astype(int).tolist())
    assert min(np.bincount(test.labels)) > 20
    assert test.labels[:6] == [6, 2, 9, 9, 9, 8]
    scaled = train.array / 255
    assert (scaled.mean(), scaled.std()) == pytest.approx((0.3059, 0.3762), abs=1e-4)


def test_without_scikit_learn_the_digits_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MusterError, match=r"pip install 'muster-train\[examples\]'"):
        read_digits("train")


def test_without_pillow_images_say_how_to_get_it(write, monkeypatch):
    paths = write([GOOD], [0])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MusterError, match=r"Pillow: pip install 'muster-train\[examples\]'"):
        ParquetImages(paths)


def test_classes_are_the_labels_that_occur_in_order(write):
    assert find_classes(ParquetImages(write([GOOD] * 4, [10, 2, -1, 2]))) == [-1, 2, 10]
    assert find_classes(ParquetImages(write([GOOD] * 3, ["b", "a", "b"]))) == ["a", "b"]
    with pytest.raises(DataError, match="every image has the label 'b'"):
        find_classes(ParquetImages(write([GOOD] * 2, ["b", "b"])))


def test_a_label_unknown_to_the_training_data_names_the_row_and_the_key(write):
    images = ParquetImages(write([GOOD] * 3, ["a", "x", "x"]))
    with pytest.raises(DataError, match=r"^data\.test: 2 images .* train\.parquet row 1 with 'x'"):
        ImageSource(images, ["a", "b"], 3, 9, key="data.test")


def test_a_source_gives_samples_by_number_from_many_threads(write):
    cells = [encode(np.full((8, 8), i, np.uint8)) for i in range(24)]
    images = ParquetImages(write(cells, [f"{i:02d}" for i in range(24)]))
    source = ImageSource(images, find_classes(images), 1, 8, cache_bytes=10 * 64)
    assert len(source) == 24
    np.testing.assert_array_equal(source.lengths, np.ones(24))
    wanted = RNG.integers(0, 24, 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(source.load, wanted))
    for i, sample in zip(wanted, loaded, strict=True):
        assert (sample.id, sample.label) == (i, i)
        assert (sample.pixels == i).all()


@pytest.mark.parametrize(("room", "decoded"), [(5, 5), (2, 8)])
def test_decoded_images_are_kept_within_the_budget(write, monkeypatch, room, decoded):
    images = ParquetImages(write([GOOD] * 5, [0, 1, 0, 1, 0]))
    source = ImageSource(images, [0, 1], 3, 9, cache_bytes=room * 3 * 81)
    calls, pixels = [], images.pixels
    monkeypatch.setattr(images, "pixels", lambda *args: calls.append(args) or pixels(*args))
    for _ in range(2):
        for i in range(5):
            source.load(i)
    assert len(calls) == decoded


def test_what_fits_is_decoded_ahead_and_what_does_not_is_left(write, monkeypatch):
    images = ParquetImages(write([GOOD] * 5, [0, 1, 0, 1, 0]))
    calls, pixels = [], images.pixels
    monkeypatch.setattr(images, "pixels", lambda *args: calls.append(args) or pixels(*args))
    ImageSource(images, [0, 1], 3, 9, cache_bytes=4 * 3 * 81).preload(2)
    assert not calls
    ImageSource(images, [0, 1], 3, 9, cache_bytes=5 * 3 * 81).preload(2)
    assert len(calls) == 5
