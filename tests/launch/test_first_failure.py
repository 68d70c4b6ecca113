"""Which rank's story is told when several end at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.launch.local import first_failure


def leave(folder: Path, rank: int, time: float, expected: bool, message: str) -> None:
    (folder / "ranks").mkdir(exist_ok=True)
    words = {"rank": rank, "time": time, "expected": expected, "kind": "E", "message": message}
    (folder / "ranks" / f"{rank}.error.json").write_text(json.dumps(words))


def test_a_killed_rank_comes_before_the_complaints_of_the_others(tmp_path):
    leave(tmp_path, 0, 1.0, False, "connection closed by peer")
    failure = first_failure(tmp_path, {0: 1, 1: -9})
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")


def test_a_sentence_meant_for_the_user_comes_before_an_earlier_trace(tmp_path):
    leave(tmp_path, 0, 1.0, False, "connection closed by peer")
    leave(tmp_path, 1, 2.0, True, "no audio column")
    assert first_failure(tmp_path, {0: 1, 1: 1})["error"]["message"] == "no audio column"


def test_ranks_that_the_agent_ended_are_not_to_blame(tmp_path):
    leave(tmp_path, 0, 1.0, False, "boom")
    assert first_failure(tmp_path, {1: -15, 0: 1})["error"]["message"] == "boom"


@pytest.mark.parametrize(("code", "signal"), [(-15, "SIGTERM"), (3, None)])
def test_without_words_the_exit_code_speaks(tmp_path, code, signal):
    failure = first_failure(tmp_path, {0: code})
    assert (failure["exit_code"], failure["signal"], failure["error"]) == (code, signal, None)
