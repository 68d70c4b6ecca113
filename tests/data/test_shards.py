"""The embedded corpus as files."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster.data import corpus
from muster.data.speech.shards import write_shards
from muster.errors import DataError

SPEC = "embedded:spoken-numbers"
EMBEDDED = corpus.embedded_folder("spoken-numbers")


def all_rows(paths):
    return pa.concat_tables([pq.read_table(path) for path in sorted(paths)])


def state(folder: Path):
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.glob("*.parquet")}


def test_the_shards_hold_every_clip_of_the_corpus_in_its_order(tmp_path):
    write_shards(SPEC, tmp_path / "data")
    files = corpus.files(str(tmp_path / "data"), "data.train", "train")
    assert [f.name for f in files] == [f"train-{n:05d}-of-00010.parquet" for n in range(10)]
    original = all_rows(EMBEDDED.glob("train-*.parquet"))
    assert all_rows(files).equals(original, check_metadata=True)
    sizes = [pq.read_metadata(f).num_rows for f in files]
    assert max(sizes) - min(sizes) <= 1
    for split in ("validation", "test"):
        (file,) = corpus.sibling_split(str(tmp_path / "data"), split)
        assert pq.read_table(file).equals(pq.read_table(EMBEDDED / file.name), check_metadata=True)


def test_what_is_there_stays_and_what_is_not_comes_back(tmp_path):
    write_shards(SPEC, tmp_path, 3)
    before = state(tmp_path)
    write_shards(SPEC, tmp_path, 3)
    assert state(tmp_path) == before
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    (tmp_path / ".train-00001-of-00003.parquet.partial").write_bytes(b"cut short")
    write_shards(SPEC, tmp_path, 3)
    after = state(tmp_path)
    assert {n for n in before if before[n] != after[n]} == {"train-00001-of-00003.parquet"}
    assert all_rows(tmp_path.glob("train-*")).equals(all_rows(EMBEDDED.glob("train-*")))
    assert not list(tmp_path.glob(".*.partial"))


def test_of_ranks_that_ask_at_once_one_writes(tmp_path):
    """Another process writes, as its lock says."""
    with (tmp_path / ".lock").open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = pool.submit(write_shards, SPEC, tmp_path, 4)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.5)
        assert state(tmp_path) == {}
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert len(asked.result(timeout=60)) == 6
        fcntl.flock(lock, fcntl.LOCK_EX)
        again = pool.submit(write_shards, SPEC, tmp_path, 4)
        try:
            assert len(again.result(timeout=60)) == 6, "nobody waits for what is there"
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def test_other_parquet_files_in_the_folder_are_refused(tmp_path):
    write_shards(SPEC, tmp_path, 3)
    with pytest.raises(DataError, match=r"train-00000-of-00003\.parquet, which is not one of its"):
        write_shards(SPEC, tmp_path, 4)


def test_a_full_disk_is_told_and_leaves_no_half_file(small_disk):
    with pytest.raises(DataError, match="cannot write the shards of embedded:spoken-numbers to"):
        write_shards(SPEC, small_disk / "data", 3)
    left = os.listdir(small_disk / "data")
    assert ".lock" in left
    assert not [name for name in left if "partial" in name]
    for path in small_disk.glob("data/*.parquet"):
        assert pq.read_metadata(path).num_rows
