"""The index of durations: built once, by many hands, kept, and never waited for in vain."""

import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from clips import encode, tone, write_parquet

from muster.data import cache, progress
from muster.data.parquet import ParquetClips
from muster.data.speech import audio, index
from muster.data.speech.index import ensure_index
from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.errors import DataError

GOOD = encode(tone(0.3))


@pytest.fixture
def measured(monkeypatch):
    """Every clip whose header is read from here on."""
    seen = []
    header = audio.header
    monkeypatch.setattr(audio, "header", lambda clip: seen.append(clip) or header(clip))
    return seen


def write(tmp_path: Path, files: int = 3, rows: int = 8) -> list[Path]:
    clips = [encode(tone(0.2 + 0.1 * i)) for i in range(rows)]
    names = [f"train-{n}.parquet" for n in range(files)]
    return [write_parquet(tmp_path / name, clips, ["x"] * rows) for name in names]


def test_durations_come_in_the_order_of_files_and_rows(tmp_path, monkeypatch):
    paths = [
        write_parquet(
            tmp_path / f"{n}.parquet",
            [encode(tone(0.1 * n + 0.01 * i)) for i in range(7)],
            ["x"] * 7,
        )
        for n in range(1, 6)
    ]
    for pid in range(5):  # each process begins elsewhere
        monkeypatch.setattr(index.os, "getpid", lambda pid=pid: pid)
        for n, found in enumerate(ensure_index(paths), 1):
            assert found.seconds == pytest.approx([0.1 * n + 0.01 * i for i in range(7)])
            assert found.kinds == {"WAV 16000 Hz": 7}
        for path in paths:
            cache.index_paths(path)[0].unlink()


def test_progress_goes_up_to_the_whole_and_counts_what_was_kept(tmp_path):
    paths = write(tmp_path)
    told = []
    ensure_index(paths[:1])
    ensure_index(paths, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (24, 24)
    assert len(told) >= 7, "row group by row group"


def test_row_groups_are_measured_side_by_side(tmp_path, monkeypatch):
    (path,) = write(tmp_path, files=1, rows=6)
    monkeypatch.setattr(index.os, "cpu_count", lambda: 2)
    both, header = threading.Barrier(2, timeout=60), audio.header

    def meet(clip):
        both.wait()  # passes only if another thread is here too
        return header(clip)

    monkeypatch.setattr(audio, "header", meet)
    assert len(ensure_index([path])[0].seconds) == 6


def test_those_who_come_together_build_it_once(tmp_path, measured):
    paths = write(tmp_path)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: ensure_index(paths), range(6)))
    assert len(measured) == 24
    for indexes in found:
        assert [i.seconds.tolist() for i in indexes] == [i.seconds.tolist() for i in found[0]]
    assert sorted(p.name for p in (tmp_path / ".muster-index").iterdir()) == [
        f"{path.name}.json" for path in paths
    ], "no lock is left behind"


BUILDER = """
import sys, time
from pathlib import Path
from muster.data.speech import audio
from muster.data.speech.index import ensure_index

def stuck(clip, header=audio.header):
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    return header(clip)

audio.header = stuck
print(ensure_index([Path(sys.argv[1])])[0].seconds.tolist(), flush=True)
"""


@pytest.fixture
def builder():
    """`builder(path, seconds)`: another process that has begun to build, so slowly per clip."""
    started = []

    def start(path: Path, seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", BUILDER, str(path), str(seconds)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "building\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_waits_for_another_that_builds(tmp_path, builder, measured):
    (path,) = write(tmp_path, files=1, rows=3)
    other = builder(path, 0.3)
    (found,) = ensure_index([path])
    assert measured == [], "it was the other's work"
    assert json.loads(other.stdout.readlines()[-1]) == found.seconds.tolist()


@pytest.mark.parametrize("closed", [False, True])
def test_a_builder_that_dies_holds_nobody_up(tmp_path, builder, measured, closed):
    (path,) = write(tmp_path, files=1, rows=3)
    if closed:  # then the lock is in the cache, like the index
        tmp_path.chmod(0o555)
    other = builder(path, 600)
    waiting = threading.Timer(0.5, other.kill)
    begun = time.monotonic()
    waiting.start()
    (found,) = ensure_index([path])
    tmp_path.chmod(0o755)
    assert time.monotonic() - begun >= 0.5
    assert found.seconds == pytest.approx([0.2, 0.3, 0.4])
    assert len(measured) == 3
    assert (tmp_path / ".muster-index").exists() == (not closed)


def test_patience_has_an_end(tmp_path, builder, measured, monkeypatch):
    (path,) = write(tmp_path, files=1, rows=3)
    builder(path, 600)
    monkeypatch.setattr(index, "LOCK_TIMEOUT_S", 0.2)
    ensure_index([path])
    assert len(measured) == 3


def test_a_closed_folder_stays_as_it_is_even_for_root(tmp_path):
    (path,) = write(tmp_path, files=1)
    tmp_path.chmod(0o555)
    ensure_index([path])
    tmp_path.chmod(0o755)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_only_files_that_could_not_be_read_are_looked_at_again(tmp_path, measured):
    names = [f"{i}.wav" for i in range(6)]
    for name in names[:4]:
        (tmp_path / name).write_bytes(GOOD)
    (tmp_path / names[4]).write_bytes(b"garbage")
    path = write_parquet(tmp_path / "a.parquet", names, ["x"] * 6, pa.string())
    (found,) = ensure_index([path])
    assert found.unsettled == set(found.problems) == {4, 5}
    measured.clear()
    (tmp_path / names[5]).write_bytes(GOOD)
    (found,) = ensure_index([path])
    assert [clip.name for clip in measured] == ["4.wav", "5.wav"]
    assert list(found.problems) == [4]
    assert found.seconds == pytest.approx([0.3] * 4 + [0, 0.3])
    measured.clear()
    ensure_index([path])
    assert [clip.name for clip in measured] == ["4.wav"]


def test_bodies_are_looked_at_once_and_remembered(tmp_path):
    noise = np.random.default_rng(0).standard_normal(16000) * 0.1
    flac, mp3 = encode(noise, container="FLAC"), encode(noise, container="MP3")
    clips = [GOOD, flac[: len(flac) // 2], mp3[: len(mp3) // 2], GOOD]
    path = write_parquet(tmp_path / "a.parquet", clips, ["x"] * 4)
    assert ensure_index([path])[0].problems == {}, "the headers are sound"
    (found,) = ensure_index([path], decode=True)
    assert sorted(found.problems) == [1, 2]
    assert "the header says 1.0" in found.problems[2]
    assert ensure_index([path])[0].problems == found.problems
    source = SpeechSource([path], SpeechLimits(max_bad_fraction=0.5))
    assert [source.rows[i].number for i in range(len(source))] == [0, 3]


def test_a_file_replaced_after_bodies_were_looked_at_is_looked_at_whole(tmp_path):
    flac = encode(np.random.default_rng(0).standard_normal(16000) * 0.1, container="FLAC")
    (tmp_path / "x.flac").write_bytes(flac)
    path = write_parquet(tmp_path / "a.parquet", ["x.flac"], ["x"], pa.string())
    assert ensure_index([path], decode=True)[0].problems == {}
    (tmp_path / "x.flac").write_bytes(flac[: len(flac) // 2])
    assert list(ensure_index([path])[0].problems) == [0]


def test_long_work_is_logged_by_tenths(monkeypatch, caplog):
    clock = itertools.count(0, 10)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    caplog.set_level("INFO")
    tell = progress.log_tenths(logging.getLogger("test"), "read %d of %d clips")
    for done in range(0, 1001, 7):
        tell(done, 1000)
    shares = [record.getMessage().split("(")[1] for record in caplog.records]
    assert shares == [f"{share} %)" for share in range(10, 100, 10)]


def test_a_lock_whose_file_was_removed_meanwhile_is_no_lock(tmp_path):
    """Another process opened it, its holder finished and removed it, a third made a new one."""
    file = tmp_path / "lock"
    with file.open("w") as opened:
        assert cache.try_lock(opened.fileno(), file)
        file.unlink()
        assert not cache.try_lock(opened.fileno(), file)
        file.touch()
        assert not cache.try_lock(opened.fileno(), file)


@pytest.mark.parametrize(("room", "most"), [(0, 1), (2.5, 2), (100, 4)])
def test_row_groups_held_at_once_have_a_bound_and_one_always_passes(
    tmp_path, monkeypatch, room, most
):
    path = write_parquet(tmp_path / "a.parquet", [GOOD] * 24, ["x"] * 24, rows_per_group=2)
    table = index.open_table(path)
    monkeypatch.setattr(index, "MAX_BYTES", int(room * table.sizes[0]))
    monkeypatch.setattr(index.os, "cpu_count", lambda: 4)
    held, seen, together, measure = set(), [], threading.Condition(), index.measure

    def slow(cells, rows, decode):
        """Holds its row group until as many are held as may be, or for a moment where they have been."""
        with together:
            held.add(threading.get_ident())
            seen.append(len(held))
            together.notify_all()
            together.wait_for(lambda: max(seen) >= most, timeout=60)
        time.sleep(0.01)
        try:
            return measure(cells, rows, decode)
        finally:
            with together:
                held.discard(threading.get_ident())

    monkeypatch.setattr(index, "measure", slow)
    (found,) = ensure_index([path])
    assert found.seconds == pytest.approx([0.3] * 24)
    assert max(seen) == most


def test_those_who_wait_ask_less_and_less_often(tmp_path, builder, monkeypatch):
    (path,) = write(tmp_path, files=1, rows=3)
    builder(path, 600)
    pauses, now = [], [0.0]
    monkeypatch.setattr(index.time, "monotonic", lambda: now[0])

    def sleep(pause):
        pauses.append(pause)
        now[0] += pause

    monkeypatch.setattr(index.time, "sleep", sleep)
    monkeypatch.setattr(index, "LOCK_TIMEOUT_S", 60.0)
    ensure_index([path], progress=lambda *_: None)
    assert pauses[:7] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert set(pauses[7:]) == {2.0}
    assert len(pauses) < 40


def test_a_row_group_that_could_not_be_read_is_tried_again(tmp_path, monkeypatch, measured):
    (path,) = write(tmp_path, files=1, rows=6)
    read = ParquetClips.read

    def fail(table, group):
        if group:
            raise DataError("the disk is away")
        return read(table, group)

    monkeypatch.setattr(ParquetClips, "read", fail)
    (found,) = ensure_index([path])
    assert found.problems == dict.fromkeys(range(3, 6), "the disk is away")
    monkeypatch.setattr(ParquetClips, "read", read)
    measured.clear()
    (found,) = ensure_index([path])
    assert found.problems == {}
    assert len(measured) == 3


def test_a_full_disk_costs_the_index_and_nothing_else(small_disk, monkeypatch, caplog):
    """Neither beside the data nor in the cache is room for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk / "cache"))
    paths = write(small_disk, files=1)
    with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):  # until it is full
            pass
    (found,) = ensure_index(paths)
    assert len(found.seconds) == 8
    assert "could not save the index of" in caplog.text
    assert not [path for path in small_disk.rglob("*.json*") if path.is_file()]
    (small_disk / "ballast").unlink()
    ensure_index(paths)
    assert cache.index_paths(paths[0])[0].is_file()


def test_no_index_is_written_through_a_link_in_a_folder_of_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.parquet"
    path.write_text("x")
    victim = tmp_path / "victim"
    beside = tmp_path / "data" / cache.BESIDE
    beside.mkdir()
    (beside / ".a.parquet.json.lock").symlink_to(victim)
    with cache.lock(path) as held:
        assert held
    assert not victim.exists()
    (beside / ".a.parquet.json.lock").unlink()
    beside.rmdir()
    (tmp_path / "elsewhere").mkdir()
    beside.symlink_to(tmp_path / "elsewhere")
    with cache.lock(path) as held:
        assert held
    cache.save_index(path, cache.stamp(path, "audio"), [1])
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert cache.load_index(path, "audio") == [1]
