"""Storage that fails: one sentence with its cure, and last words that are written all the same."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from muster import run_directory
from muster.observe import storage
from muster.observe.results import write_json
from muster.observe.storage import RESERVE, insist, problem, problem_words
from muster.page import report


@pytest.fixture
def no_growth():
    """No file of this process may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_failure_of_storage_has_its_sentence(tmp_path):
    for number in storage.WORDS:
        gone = tmp_path / "gone"
        words = problem_words(OSError(number, os.strerror(number), str(gone / "x.json")), gone)
        assert words is not None
        assert str(gone) in words
        assert words.endswith("and resume")
        assert "\n" not in words
    assert problem_words(OSError(errno.EPIPE, "pipe"), tmp_path) is None


def test_a_missing_file_is_no_missing_folder(tmp_path):
    error = FileNotFoundError(errno.ENOENT, "no such file", str(tmp_path / "plan.json"))
    assert problem_words(error, tmp_path) is None
    other = FileNotFoundError(errno.ENOENT, "no such file", "/data/clips.parquet")
    assert problem_words(other, tmp_path / "gone") is None


def test_a_folder_that_cannot_be_written_says_so(tmp_path, no_growth):
    assert problem(tmp_path) is None
    assert not list(tmp_path.iterdir())
    no_growth()
    told = problem(tmp_path)
    assert told is not None
    assert "ulimit -f" in told
    shutil.rmtree(tmp_path)
    assert "is no longer there" in str(problem(tmp_path))


def test_an_error_of_a_write_names_its_file(tmp_path, no_growth):
    no_growth()
    with pytest.raises(OSError, match="File too large") as failure:
        write_json(tmp_path / "run.json", {})
    assert failure.value.filename == str(tmp_path / "run.json")
    assert "may grow" in str(storage.command_words(failure.value))


def test_last_words_take_the_room_that_was_kept_for_them(tmp_path):
    storage.reserve(tmp_path)
    assert (tmp_path / RESERVE).stat().st_blocks * 512 >= storage.RESERVED
    written: list[Path] = []

    def write() -> None:
        if (tmp_path / RESERVE).exists():
            raise OSError(errno.ENOSPC, "full")
        written.append(tmp_path)

    insist(tmp_path, write, 5.0)
    assert written == [tmp_path]


def test_last_words_that_cannot_be_written_end(tmp_path):
    def write() -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        insist(tmp_path, write, 0.0)


def test_a_report_without_room_is_left_out_and_fails_no_run(small_disk, caplog):
    run = run_directory.create(small_disk, "run", {"recipe.yaml": "name: run\n"})
    run.update(state="finished")
    with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):  # until it is full
            pass
    report.write_at_end(run)
    assert "report.html was not written" in caplog.text
    assert not list(run.path.glob("*report.html*"))
    (small_disk / "ballast").unlink()
    report.write_at_end(run)
    assert (run.path / "report.html").stat().st_size > 1000
