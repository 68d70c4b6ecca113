"""`muster plan` as a user meets it."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from muster.cli import app
from muster.errors import MemoryLimitError, MusterError, RecipeError
from muster.observe import progress
from muster.planner import report
from muster.planner.memory import WORKSPACE
from muster.planner.search import SearchResult
from plan.subjects import LLAMA, planner, subject
from processes import muster

SMALL = ["gpt-micro", "data.sequence_length=64", "training.global_batch_size=16"]
SMALL += ["training.compile=false"]
FIXED = "distributed.strategy=ddp"


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class AtOnce(threading.Timer):
    """Does not let its caller be quicker."""

    def start(self) -> None:
        super().start()
        self.join()


def test_the_answer_comes_with_the_command_that_carries_it_out(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "threading", SimpleNamespace(Timer=AtOnce))
    machines = ["--gpus", "4", "--gpu", "h100", "--per-node", "2"]
    words = ["plan", *SMALL, FIXED, *machines, "--explain"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.stderr == "searching strategies …\n", "on a terminal, a bar instead"
    text = done.stdout
    for words in (
        "Does one copy fit",
        "ddp: replicate 4",
        "memory of the largest rank",
        "The arithmetic",
        "muster train gpt-micro --gpus 2 --nodes 2",
        "training.per_device_batch_size=4",
    ):
        assert words in text
    assert text.split("muster train")[-1].count(FIXED) == 1


@pytest.mark.full
def test_a_batch_that_grows_with_the_ranks_is_planned_as_a_first_start_would_make_it():
    grown = [*SMALL, FIXED, "training.scale_with_ranks=batch", "--gpus", "2", "--gpu", "h100"]
    assert json.loads(run(*grown, "--json"))["global_batch_size"] == 32
    command = run(*grown).split("muster train")[-1]
    assert "training.global_batch_size=32 training.compile=false" in command
    assert "training.scale_with_ranks=none" in command


@pytest.mark.full
def test_json_holds_the_whole_answer(tmp_path):
    words = (*SMALL, FIXED, "--gpus", "2", "--gpu", "h100", "--json", "--simulate")
    done = muster("plan", *words, "--plot", tmp_path / "plan", folder=tmp_path)
    document = json.loads(done.stdout)
    answer = document["answer"]
    assert answer["strategy"] == "ddp"
    assert sum(answer["memory_gib"].values()) == pytest.approx(answer["total_gib"])
    assert answer["step_s"]["total"] > 0
    assert document["gpus"] == 2
    (rank,) = document["simulation"]
    planned = answer["allocated_gib"] * 2**30 - WORKSPACE
    assert rank["peak"] == pytest.approx(planned, rel=0.02)
    assert {p.rsplit("/", 1)[1] for p in document["plots"]} == {
        "plan-memory.png",
        "plan-memory.svg",
        "plan-scaling.png",
        "plan-scaling.svg",
    }
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("plan-memory.png",))


def test_all_known_gpus_are_listed():
    text = run("gpt2", "--gpu", "list")
    for name in ("v100", "a100", "l40s", "4090", "h200", "b200", "mi300x"):
        assert name in text


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["gpt2", "--gpu", "h1000"], MusterError, "h100"),
        (["gpt3", "--gpu", "h100"], RecipeError, "gpt2"),
        (["whisper", "--gpu", "h100"], RecipeError, "has no model size"),
        (
            ["gpt-micro", "--gpu", "h100", "--gpus", "12"],
            RecipeError,
            "machines of 8; use 8 or 16, .* --per-node 12, 6, 4, 3 or 2$",
        ),
        (
            ["gpt-micro", "training.precision=bf16", "--gpu", "v100", "--gpus", "1"],
            RecipeError,
            "training.precision",
        ),
        (
            ["gpt2", "--gpu", "a100", "training.precision=fp8"],
            RecipeError,
            "NVIDIA A100 SXM 80 GB has no fp8; use bf16",
        ),
        (
            [*SMALL, FIXED, "--gpu", "h100", "training.precision=fp8"],
            RecipeError,
            "fp8 would convert no layer",
        ),
    ],
    ids=[
        *("no such GPU", "no such model", "no size", "half a machine", "no bf16"),
        *("no fp8", "no matrix for fp8"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_cure(words, kind, said):
    with pytest.raises(kind, match=said):
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)


def test_fp8_is_planned_as_bf16_which_the_answer_says(monkeypatch):
    monkeypatch.setattr(report, "_fits_one_device", lambda planner: (False, "more"))
    thing = planner(subject(*LLAMA, "training.precision=fp8"))
    lines = report.decision_tree(thing, SearchResult([], {}, None))
    assert any(line.startswith("Planned as bf16") for line in lines)


def test_a_machine_without_gpus_must_say_which():
    from muster.hardware import inventory

    if inventory.detect().gpus:
        pytest.skip("this machine has GPUs")
    with pytest.raises(RecipeError, match="--gpu h100"):
        CliRunner().invoke(app, ["plan", "gpt2"], catch_exceptions=False)


def test_what_does_not_fit_says_what_would():
    words = ["llama-7b", "training.global_batch_size=2", "data.sequence_length=256"]
    words += ["training.compile=false", FIXED, "--gpu", "t4", "--gpus", "1"]
    with pytest.raises(MemoryLimitError) as caught:
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    for hint in ("nothing fits", "needs", "strategy=auto", "model.lora", "a smaller model"):
        assert hint in str(caught.value)
