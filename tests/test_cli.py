"""The command line: quick answers, clear errors, nothing half-made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import processes


def muster(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return processes.muster(*arguments, folder=cwd, code=None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speech", "training.learn_rate=1"], "training.learn_rate: no such key"),
        (["speech", "training.steps=many"], "training.steps"),
        (["speach"], "nearest is speech"),
        (["speech", "--gpus", "none"], "--gpus"),
        (["speech", "--gpus", "64"], "training.global_batch_size"),
        (["speech", "data.train=nowhere"], "data.train"),
        (["speech", "data.train=embedded:spoken-words"], "embedded:spoken-numbers"),
        (["speech", "--strategy", "magic"], "distributed.strategy"),
        (["gpt2", "model.preset=whisper-small"], "is no language model; causal-lm takes gpt2"),
        (["speech", "model.preset=gpt2"], "is no CTC model; speech-ctc takes lmu-micro"),
        (["llama-7b"], "muster train llama-1b model.preset=llama-7b"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_a_run_exists(tmp_path, arguments, words):
    done = muster("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_recipes_are_listed_shown_and_described(tmp_path):
    assert "speech" in muster("recipe", "list", cwd=tmp_path).stdout
    assert "global_batch_size" in muster("recipe", "show", "speech", cwd=tmp_path).stdout
    assert '"properties"' in muster("recipe", "schema", cwd=tmp_path).stdout


def test_inspect_shows_every_split_of_the_embedded_corpus(tmp_path):
    words = muster("data", "inspect", "embedded:spoken-numbers", cwd=tmp_path).stdout
    for split in ("train", "validation", "test"):
        assert f"{split}: " in words
    assert "█" in words


def test_runs_clean_and_watch_on_an_empty_folder_say_so(tmp_path):
    assert muster("runs", cwd=tmp_path).returncode == 0
    assert "nothing to remove" in muster("clean", "--yes", cwd=tmp_path).stdout
    missing = muster("watch", "latest", cwd=tmp_path)
    assert missing.returncode == 2
    assert "no run 'latest'" in missing.stderr


def test_transcribe_without_a_checkpoint_is_one_line(tmp_path):
    done = muster("transcribe", "runs/latest", "a.wav", cwd=tmp_path)
    assert done.returncode == 2
    assert "no checkpoint at runs/latest" in done.stderr
