"""A log is read in blocks, and lines that occur again and again only once: with the result of each line by itself."""

from __future__ import annotations

import io
import time
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import FEW
from muster.diagnose.explain import explain_stream
from muster.diagnose.scan import Scan

LINES = [
    *("step 1", "Error", "Error: x", "RuntimeError: CUDA out of memory", "ValueError: no"),
    *("Traceback (most recent call last):", '  File "x", line 3, in f', "", "Failures:"),
    *("[rank1]: Traceback (most recent call last):", "[rank1]: ValueError: no", "======"),
    *("  exitcode  : -9 (pid: 3)", "  rank      : 1 (local_rank: 1)", "Exit Code: 137"),
    *("Root Cause (first observed failure):", "process 1 terminated with signal SIGKILL"),
    *("x:1:2 [0] NCCL WARN Call to connect failed", "process 1 terminated with signal SIG_DFL"),
]


@FEW
@given(st.lists(st.tuples(st.sampled_from(LINES), st.integers(1, 4)), max_size=12))
def test_repeated_lines_count_as_each_by_itself(parts: list[tuple[str, int]]) -> None:
    lines = [line for line, times in parts for _ in range(times)]
    one, all_at_once = Scan(), Scan()
    for line in lines:
        one._without.clear()
        one.feed(line)
    if lines:
        all_at_once.feed_block("\n".join(["Error", *lines]))
        one.lines += 1
    assert all_at_once.lines == one.lines
    assert _told(all_at_once) == _told(one)


def _told(scan: Scan) -> list[object]:
    """Where, how often, and of lines that follow each other and are the same, one."""
    errors = [[(e.rank, *e.chain) for e in errors] for errors in (scan.raised, scan.native)]
    endings = [(ending.rank, ending.code, ending.root) for ending in scan.endings]
    alone = [[one for one, _ in groupby(found)] for found in (*errors, endings)]
    return [{name: (seen.count, seen.rank) for name, seen in scan.seen.items()}, *alone]


@pytest.mark.parametrize("text", [b"Error ", b"Error\nError x\n"])
def test_a_log_of_one_word_is_read_at_once(text: bytes) -> None:
    begin = time.process_time()
    explain_stream(io.BytesIO(text * (4 * 2**20 // len(text))), "train.log")
    assert time.process_time() - begin < 2.0
