"""tools/fuzz.py: a few cases of each kind here, all of them with --full. And that it finds what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from fuzzing import outcome, reader, run, worker  # noqa: E402
from fuzzing.families import cluster, logs, recipes, runs, speech, text  # noqa: E402, F401
from fuzzing.mutate import SECRET  # noqa: E402

from muster.errors import DataError, RecipeError  # noqa: E402

QUICK = (
    "deepspeed",
    "run-name",
    "slurm",
    "log",
    "explain-run",
    "trackers",
    "text",
    "chat",
    "index",
)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "SCRATCH", tmp_path / "scratch")


def test_hostile_input_of_each_kind_is_taken_or_refused_in_one_sentence(environment):
    tallies = run.every(list(QUICK), 90, seed=2, workers=1)
    assert not run.problems(tallies)
    assert sum(tally.counts["refused"] for tally in tallies.values()) > 20


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_twenty_thousand_hostile_inputs():
    command = [sys.executable, str(ROOT / "tools/fuzz.py"), "--cases", "20000", "--seed", "1"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]


def _outcome(read, wrong=lambda taken: None, names=("train.txt",)):
    return worker._read(reader.Case(read, names, wrong), tell=False)


def _refuse(words, kind=DataError):
    raise kind(words)


def _write_part():
    Path("result.json").write_text('{"half": ')


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda: [][1], outcome.TRACE),
        (lambda: json.loads("[" * 100_000), outcome.TRACE),
        (lambda: _refuse("something is wrong somewhere"), outcome.UNCLEAR),
        (lambda: _refuse(f"train.txt holds {SECRET}", RecipeError), outcome.UNCLEAR),
        (lambda: _refuse("train.txt is damaged; copy it again"), outcome.REFUSED),
        (lambda: 5, outcome.TAKEN),
    ],
)
def test_the_fuzzer_tells_a_sentence_from_a_stack_trace(environment, read, kind):
    assert _outcome(read).kind == kind


def test_the_fuzzer_finds_half_written_files_and_what_should_not_be_taken(environment, tmp_path):
    made = reader.Case(_write_part)
    reader.READERS["writes"] = reader.Reader("writes", 1, lambda rng, folder: made)
    try:
        assert worker.run("writes", 0, 0, tmp_path / "case").kind == outcome.LEFT
    finally:
        del reader.READERS["writes"]
        os.chdir(tmp_path)
    assert _outcome(lambda: -5, lambda taken: f"{taken} was taken").kind == outcome.WRONG


def test_the_same_seed_makes_the_same_input(tmp_path):
    def files(folder: Path) -> dict[str, bytes]:
        folder.mkdir()
        reader.READERS["log"].make(Random("7 log 3"), folder)
        reader.READERS["trackers"].make(Random("7 trackers 3"), folder)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    assert files(tmp_path / "a") == files(tmp_path / "b") != {}
