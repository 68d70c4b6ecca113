"""Real runs: two commands for one run directory, and secrets of the environment that nothing may keep."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import processes
from muster.observe.results import read_lines
from muster.run_directory import Run
from muster.worker.results import HIDDEN, told_variables

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED0000000001",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret-0002",
    "AWS_SESSION_TOKEN": "planted-aws-session-0003",
    "HF_TOKEN": "hf_planted0004planted0004planted000",
    "WANDB_API_KEY": "0005" * 10,
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-0006",
    "DATABASE_PASSWORD": "planted-database-0007",
    "DATABASE_URL": "postgresql://user:planted-url-0008@db.example/x",
    "HTTPS_PROXY": "http://user:planted-proxy-0009@127.0.0.1:9",
    "NCCL_PLUGIN_TOKEN": "planted-nccl-0010",
    "TORCH_HUB_PASSWORD": "planted-torch-0011",
    "MUSTER_SECRET": "planted-muster-secret-0012",
    "GITHUB_PAT": "ghp_planted0013",
}
BROKEN = """
import sys
if "muster.worker" in sys.orig_argv:
    import torch
    def step(self, *args, **kwargs):
        raise RuntimeError("planted failure")
    torch.optim.AdamW.step = step
"""


def found_in(folder: Path, extra: dict[str, str]) -> list[str]:
    """Which secret is in which file of the folder, or in what else was printed."""
    texts = {
        str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()
    }
    texts |= {name: words.encode() for name, words in extra.items()}
    needles = {
        name: value.partition("user:")[2].partition("@")[0] or value
        for name, value in SECRETS.items()
    }
    return [
        f"{name} in {place}"
        for place, text in texts.items()
        for name, needle in needles.items()
        if needle.encode() in text
    ]


def test_a_secret_that_is_there_is_found(tmp_path):
    (tmp_path / "a").write_text("x" + SECRETS["DATABASE_URL"])
    (tmp_path / "b").write_bytes(b"\0" + SECRETS["HF_TOKEN"].encode())
    told = found_in(tmp_path, {"console": SECRETS["GITHUB_PAT"]})
    names = {words.partition(" in ")[0] for words in told}
    assert names == {"DATABASE_URL", "HF_TOKEN", "GITHUB_PAT"}


def test_variables_that_may_be_secrets_are_told_without_their_value():
    told = told_variables(
        {
            **SECRETS,
            "NCCL_DEBUG": "INFO",
            "TORCH_HOME": "/data/torch",
            "NCCL_PROXY": "http://user:x@proxy",
            "HOME": "/root",
        }
    )
    assert {name for name, value in told.items() if value != HIDDEN} == {"NCCL_DEBUG", "TORCH_HOME"}
    assert set(told) - {"NCCL_DEBUG", "TORCH_HOME"} == {
        "NCCL_PLUGIN_TOKEN",
        "NCCL_PROXY",
        "TORCH_HUB_PASSWORD",
    }


@pytest.mark.full
@pytest.mark.timeout(900)
def test_no_file_of_a_run_has_a_secret_of_the_environment(recipe, tmp_path):
    """Console, logs, environment.json, report, trackers' files and the exported folder, of a run that ends well and
    of one that fails."""
    trackers = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name)]
    asked = ["training.steps=3", "logging.report=true", f"logging.to=[{','.join(trackers)}]"]
    environment = {**SECRETS, "WANDB_MODE": "offline"}
    out = {}
    words = ("train", recipe, *asked, "--gpus", "2", "--run", "well")
    out["console"] = processes.muster(*words, folder=tmp_path, env=environment)
    run = tmp_path / "runs" / "well"
    assert (run / "report.html").stat().st_size > 10_000
    assert (run / "environment.json").exists()
    words = ("export", str(run), str(tmp_path / "exported"))
    out["export"] = processes.muster(*words, folder=tmp_path, env=environment)
    (tmp_path / "broken").mkdir()
    broken = {**environment, **processes.python_path(tmp_path / "broken")}
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN)
    words = ("train", recipe, *asked, "--gpus", "2", "--run", "failed")
    out["failure"] = processes.muster(*words, folder=tmp_path, env=broken, code=1)
    assert "planted failure" in out["failure"].stdout + out["failure"].stderr
    failed = str(tmp_path / "runs" / "failed")
    out["explain"] = processes.muster(
        "explain", failed, folder=tmp_path, env=environment, code=None
    )
    assert found_in(tmp_path, {k: told.stdout + told.stderr for k, told in out.items()}) == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_of_two_commands_that_go_on_with_a_run_at_once_one_is_refused(recipe, tmp_path):
    processes.muster(
        "train", recipe, "training.steps=3", "--gpus", "2", "--run", "one", folder=tmp_path
    )
    run = Run(tmp_path / "runs" / "one")
    before = len(read_lines(run.path / "metrics.jsonl"))
    words = [*processes.MUSTER, "train", str(run.path), "training.steps=9", "--gpus", "2"]
    both = [
        subprocess.Popen(
            words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=300)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes)[0] == 0, told
    refused = told[codes.index(max(codes))]
    assert max(codes) > 0, told
    assert "is being run already, by process" in refused, refused
    assert "Traceback" not in refused
    steps = [line["step"] for line in read_lines(run.path / "metrics.jsonl")]
    assert before == 3
    assert steps == list(range(1, 10))
