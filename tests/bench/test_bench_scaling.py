"""Scaling: real runs on one and two ranks, and the arithmetic of where their time went."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from muster.bench import results, scaling
from muster.cli import app
from muster.errors import LaunchError, MusterError
from processes import muster

SMALL = ("training.global_batch_size=2", "data.sequence_length=32")
two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or torch.cuda.is_available(),
    reason="needs two cores, and no GPU that would be measured",
)


def rank(compute: float, waiting: float, data: float, total: float) -> dict[str, float]:
    return {
        "compute_s": compute,
        "comm_wait_s": waiting,
        "data_wait_s": data,
        "step_time_s": total,
    }


def test_parts_of_a_step_add_up_to_it():
    draw = random.Random(0)
    for _ in range(50):
        ranks = []
        for _ in range(draw.randint(1, 8)):
            parts = [draw.random() for _ in range(4)]
            ranks.append(rank(*parts[:3], sum(parts)))
        found = scaling.step_parts(ranks)
        mean = sum(r["step_time_s"] for r in ranks) / len(ranks)
        assert sum(found.values()) == pytest.approx(mean)
        assert min(found["imbalance"], found["exposed"]) >= 0


def test_waiting_for_a_slow_rank_is_not_called_communication():
    """Rank 0 computes 1 s longer, rank 1 waits for it, and both then take 0.2 s to exchange."""
    found = scaling.step_parts([rank(3.0, 0.2, 0.0, 3.3), rank(2.0, 1.2, 0.0, 3.3)])
    assert found["compute"] == pytest.approx(2.5)
    assert found["imbalance"] == pytest.approx(0.5)
    assert found["exposed"] == pytest.approx(0.2)
    assert found["rest"] == pytest.approx(0.1)


def test_waiting_for_a_rank_without_data_is_not_called_communication():
    found = scaling.step_parts([rank(1.0, 0.0, 1.0, 2.0), rank(1.0, 1.0, 0.0, 2.0)])
    assert found["exposed"] == 0
    assert found["imbalance"] == pytest.approx(0.5)
    assert found["data"] == pytest.approx(0.5)


def row(kind: str, ranks: int, batch: int, step: float, **parts: float) -> dict:
    whole = dict.fromkeys(scaling.PARTS, 0.0) | parts
    return {
        "kind": kind,
        "ranks": ranks,
        "batch": batch,
        "samples_per_s": batch / step,
        "step_s": step,
        "parts": whole,
    }


def test_lost_time_is_what_a_perfect_step_would_not_take():
    rows = [
        row("weak", 1, 8, 1.0, compute=0.9, rest=0.1),
        row("weak", 4, 32, 1.25, compute=1.0, exposed=0.15, rest=0.1),
        row("strong", 1, 8, 1.0, compute=0.9, rest=0.1),
        row("strong", 4, 8, 0.4, compute=0.225, exposed=0.075, rest=0.1),
    ]
    scaling.judge(rows)
    weak, strong = rows[1], rows[3]
    assert weak["efficiency"] == pytest.approx(0.8)
    assert sum(weak["lost"].values()) == pytest.approx(1.25 - 1.0)
    assert weak["lost"]["compute"] == pytest.approx(0.1)
    assert weak["lost"]["exposed"] == pytest.approx(0.15)
    assert strong["speedup"] == pytest.approx(2.5)
    assert strong["efficiency"] == pytest.approx(0.625)
    assert sum(strong["lost"].values()) == pytest.approx(0.4 - 0.25)
    assert strong["lost"]["compute"] == pytest.approx(0.0)
    assert strong["lost"]["rest"] == pytest.approx(0.075)  # an optimizer does not get faster


def test_only_the_middle_half_of_steps_after_warming_up_counts(tmp_path: Path):
    times = [9.0] * scaling.WARM_UP + [5.0, 1.0, 1.0, 0.1]
    (tmp_path / "ranks").mkdir()
    lines = [{"step": i, "step_time_s": t, "samples": 6} for i, t in enumerate(times, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for name in "01":
        steps = [{"step": i} | rank(0.5 * t, 0.1 * t, 0.0, t) for i, t in enumerate(times, 1)]
        text = "".join(json.dumps(step) + "\n" for step in steps)
        (tmp_path / "ranks" / f"{name}.jsonl").write_text(text)
    found = scaling.read_run(tmp_path)
    assert found["step_s"] == pytest.approx(1.0)
    assert found["samples_per_s"] == pytest.approx(6.0)
    assert found["parts"]["compute"] == pytest.approx(0.5)


def test_worlds_double_and_end_at_the_last():
    assert [scaling.worlds(n) for n in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(LaunchError, match="its own core"):
        scaling.most_ranks(100_000)


@two_cores
def test_one_of_two_ranks_gets_half_of_the_cores():
    before = os.sched_getaffinity(0)
    with scaling._cores(1, 2):
        assert len(os.sched_getaffinity(0)) == len(before) // 2
    with scaling._cores(2, 2):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.guides
@two_cores
def test_a_recipe_on_one_and_two_ranks(tmp_path: Path):
    words = ["gpt-micro", *SMALL, "--gpus", "2", "--steps", "4", "--dir", "kept"]
    done = muster("bench", "scaling", *words, folder=tmp_path)
    (kept,) = (tmp_path / "kept").glob("*.json")
    document = json.loads(kept.read_text())
    found = {(r["kind"], r["ranks"]): r for r in document["rows"]}
    assert [found[key]["batch"] for key in found] == [2, 4, 2, 2]
    assert (done.stdout + done.stderr).count("samples/s") == 3, "one rank is the same run for both"
    for each in found.values():
        assert sum(each["parts"].values()) == pytest.approx(each["step_s"])
    assert found["weak", 2]["parts"]["exposed"] + found["weak", 2]["parts"]["imbalance"] > 0
    assert not list((tmp_path / "kept").glob("*runs*")), "what was read is removed"


def test_what_a_later_point_cannot_do_is_refused_before_the_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(scaling, "_train", lambda *_: pytest.fail("it ran"))
    with pytest.raises(MusterError, match=r"global_batch_size.* 4 "):
        scaling.measure("gpt-micro", SMALL, 4, ["weak", "strong"], 4, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.guides
def test_the_command_shows_keeps_and_draws(tmp_path, monkeypatch):
    rows = [
        row("weak", 1, 8, 1.0, compute=0.9, rest=0.1) | {"strategy": "ddp"},
        row("weak", 2, 16, 1.25, compute=1.0, exposed=0.15, rest=0.1) | {"strategy": "ddp"},
    ]
    scaling.judge(rows)
    head = results.document_head("scaling", torch.device("cpu"), 2, ["here"])
    kind = {"keys": ["kind", "ranks"], "figure": "efficiency", "better": "higher"}
    document = {**head, **kind, "recipe": "gpt-micro", "overrides": [], "rows": rows}
    monkeypatch.setattr(scaling, "measure", lambda *_: document)
    asked = ["bench", "scaling", "--gpus", "1", "--dir", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "0.80" in done.output
    assert "+12%" in done.output
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]
    document["rows"][1]["efficiency"] = 0.4
    done = CliRunner().invoke(app, [*asked, "--against", "last"])
    assert "× 0.50" in done.output
    assert "1 of them worse by more than a tenth" in done.output.replace("\n", " ")


def test_ranks_of_a_launcher_do_not_start_ranks_of_their_own(monkeypatch):
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
    }.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["bench", "scaling"])
    assert "starts its own ranks" in str(done.exception)


def test_a_run_that_fails_is_named_and_kept(tmp_path: Path):
    words = ["gpt-micro", *SMALL, "data.train=/nonexistent/text", "--gpus", "1", "--dir", "kept"]
    said = muster("bench", "scaling", *words, folder=tmp_path, code=2).stderr
    assert re.search(r"run on 1 rank.* failed: .*nonexistent", said), said
    assert (tmp_path / said.split("see ")[-1].strip() / "recipe.yaml").is_file()
