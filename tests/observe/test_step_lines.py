"""Files of long runs: bounded where they may be, streamed where they are not."""

from __future__ import annotations

import errno
import itertools
import json
import tracemalloc
from pathlib import Path

import pytest

from muster.observe import step_lines
from muster.observe.console import Tail
from muster.observe.results import read_lines, stream_lines, summarise_metrics
from muster.observe.step_lines import RankLines, append_after
from muster.page.files import CHUNK, Growing

STEPS, MOST, NEWEST = 12_000, 2_000, 100
LINE = {"compute_s": 0.25, "comm_wait_s": 0.01, "data_wait_s": 0.0, "step_time_s": 0.26}


@pytest.fixture(scope="module")
def long_file(tmp_path_factory) -> Path:
    """metrics.jsonl of 12,000 steps, as rank 0 writes it."""
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(
                f'{{"step": {step}, "epoch": {step // 1000}, "loss": {1 / step!r}, "samples": 8, '
                f'"step_time_s": 0.25, "memory_gib": 1.5, "samples_per_s": 32.0, "tokens_per_s": 64.0, '
                f'"grad_norm": 0.123456789012345, "lr": 0.001, "data_wait_s": 0.00012345}}\n'
            )
    return path


def peak(call) -> tuple[object, float]:
    """What a call returns, and the most memory that Python had at once, in MiB."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture
def few(monkeypatch):
    """A tenth of the lines."""
    monkeypatch.setattr(step_lines, "MOST_LINES", MOST)
    monkeypatch.setattr(step_lines, "NEWEST", NEWEST)


@pytest.mark.usefixtures("few")
def test_a_ranks_file_stays_bounded_and_keeps_all_of_the_run(tmp_path):
    lines, most = RankLines(tmp_path / "1.jsonl", 0, rank=1, ranks=2), 0
    for step in range(1, 5001):
        lines.write({"step": step, **LINE})
        if step % 97 == 0:
            lines.flush()
            most = max(most, (tmp_path / "1.jsonl").read_bytes().count(b"\n"))
    lines.close()
    steps = [line["step"] for line in read_lines(tmp_path / "1.jsonl")]
    assert most <= MOST
    assert steps[-NEWEST:] == list(range(5001 - NEWEST, 5001))
    assert steps == sorted(set(steps))
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 8
    assert steps[0] <= 8


@pytest.mark.usefixtures("few")
def test_a_thinned_file_goes_on_where_the_run_resumes(tmp_path):
    path = tmp_path / "0.jsonl"
    for start in (0, 2_500):
        lines = RankLines(path, start, rank=0, ranks=1)
        for step in range(start + 1, 3_001):
            lines.write({"step": step, **LINE})
        lines.close()
    steps = [line["step"] for line in read_lines(path)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3_000
    assert len(steps) <= MOST


def test_a_resumed_run_reads_its_metrics_as_a_stream(long_file, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(long_file.read_bytes() + b'{"step": 12001, "lo')
    _, most = peak(lambda: append_after(path, 9_000).close())
    assert most < 1.5  # MiB; the file has 3
    assert [line["step"] for line in stream_lines(path)] == list(range(1, 9_001))
    before = path.stat().st_ino
    append_after(path, 9_000).close()
    assert path.stat().st_ino == before, "nothing had to go"


def test_a_line_cut_short_in_the_middle_goes_and_its_neighbours_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo{"step": 3}\n[4]\n{"loss": 1}\n{"step": 4}\n')
    append_after(path, 9).close()
    assert path.read_text() == '{"step": 1}\n{"step": 4}\n'


@pytest.mark.guides
def test_a_long_run_is_summed_up_line_by_line(long_file):
    found, most = peak(lambda: summarise_metrics(stream_lines(long_file)))
    assert most < 1.5  # MiB; the file has 3
    assert found["steps"] == STEPS
    assert found["throughput"] == {"samples_per_s": 32.0, "tokens_per_s": 64.0}
    assert found["measured"]["median_step_time_s"] == 0.25


def test_whoever_begins_to_watch_a_long_run_reads_its_end(long_file):
    steps = [line["step"] for line in Tail(long_file, most=100_000).new()]
    assert steps == list(range(steps[0], STEPS + 1))
    assert 100 < len(steps) < 1000


def test_the_page_reads_a_long_file_in_pieces(long_file, monkeypatch):
    monkeypatch.setattr("muster.page.files.CHUNK", 200_000)
    pieces = list(Growing(long_file).chunks())
    assert CHUNK > max(len(text) for _, text in pieces) > 100_000
    assert [fresh for fresh, _ in pieces] == [True] + [False] * (len(pieces) - 1)
    joined = b"".join(text for _, text in pieces)
    assert joined == long_file.read_bytes()
    assert json.loads(joined.splitlines()[-1])["step"] == STEPS


@pytest.mark.usefixtures("few")
def test_a_full_disk_leaves_the_file_as_it_is_and_open(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    lines = RankLines(tmp_path / "0.jsonl", 0, rank=0, ranks=1)
    monkeypatch.setattr(step_lines, "write", full)
    for step in range(1, MOST):
        lines.write({"step": step, **LINE})
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": MOST, **LINE})
    lines.flush()  # as a rank does that fails
    lines.close()
    assert len(read_lines(tmp_path / "0.jsonl")) == MOST
