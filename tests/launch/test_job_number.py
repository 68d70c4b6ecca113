"""A job's number, as run.json says it: it becomes an argument of scancel."""

import json
from subprocess import CompletedProcess

import pytest

from muster.errors import LaunchError
from muster.launch import slurm
from muster.run_directory import Run


@pytest.mark.parametrize("number", ["--me", "-u root", "1 2", "١", "1\n", "", "12_x", "1" * 40])
def test_what_is_no_number_of_a_job_is_not_given_to_scancel(tmp_path, monkeypatch, number):
    asked = []
    monkeypatch.setattr(slurm, "ask", lambda *words: asked.append(words))
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "slurm_job": number}))
    with pytest.raises(LaunchError, match="has no SLURM job"):
        slurm.cancel(Run(tmp_path))
    assert slurm.state(Run(tmp_path)) is None
    assert asked == []


@pytest.mark.parametrize("number", ["17", "17_3"])
def test_a_number_is(tmp_path, monkeypatch, number):
    asked = []

    def ask(*words):
        asked.append(words)
        return CompletedProcess(words, 0, "JobState=RUNNING", "")

    monkeypatch.setattr(slurm, "ask", ask)
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "slurm_job": number}))
    slurm.cancel(Run(tmp_path))
    assert asked[0] == ("scancel", number)
