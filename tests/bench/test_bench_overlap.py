"""Overlap: what a pass sends is recorded on real ranks, sent again alone, and set against computing."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muster.bench import overlap
from muster.bench import ranks as bench_ranks
from muster.cli import app
from muster.cli.bench.common import recipe_and
from muster.parallel import ddp
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.planner.dtensor_recorder import DTensorRecorder
from muster.planner.messages import Message

pytestmark = pytest.mark.guides

SMALL = ["training.global_batch_size=1", "data.sequence_length=32"]


def measured(mesh: Mesh) -> dict:
    return overlap.measure(mesh, "gpt-micro", SMALL, [1.0, 100.0], 0.05)


@pytest.fixture(scope="module")
def document(ranks) -> dict:
    return ranks(2)(measured)[0]


def rows(document: dict, strategy: str) -> list[dict]:
    return [row for row in document["rows"] if row["strategy"] == strategy]


def test_buckets_change_the_messages_and_not_the_bytes(document: dict):
    small, large = rows(document, "ddp")
    assert small["messages"] > large["messages"] == 1
    assert small["bytes"] == large["bytes"] > 3_000_000  # four bytes for each of 1M parameters


def test_fsdp_gathers_twice_and_scatters_once_whatever_it_prefetches(document: dict):
    """Of P bytes of parameters each of two ranks gives half to a gathering, twice, and all of its
    gradients to be scattered; the model outside its blocks stays gathered between the passes."""
    whole, blocks = rows(document, "ddp")[0]["bytes"], 4
    sent = {row["setting"]: (row["messages"], row["bytes"]) for row in rows(document, "fsdp")}
    assert set(sent) == {"prefetch none", "prefetch backward", "prefetch both"}
    ((messages, size),) = set(sent.values())
    assert messages == 3 * blocks + 2
    assert 1.75 * whole < size <= 2.1 * whole


def test_every_row_has_its_three_times(document: dict):
    for row in document["rows"]:
        assert min(row["step_s"], row["compute_s"], row["communication_s"]) > 0
        assert row["repeats"] >= overlap.LEAST


def slowed(mesh: Mesh, folder: str, nap: float) -> dict:
    """A row of DDP whose gradients take `nap` longer to leave; nothing else does."""
    real = ddp.sum_gradients

    def late(clock, bucket):
        time.sleep(nap)
        return real(clock, bucket)

    alone = replace(mesh, rank=0, layout=Layout(), axes=None)
    options = [*SMALL, *overlap.PLAIN, "distributed.strategy=ddp"]
    own = overlap._job(alone, "gpt-micro", options, Path(folder, f"alone-{mesh.rank}"))
    options += ["training.global_batch_size=2", "distributed.ddp.bucket_mb=100"]
    ddp.sum_gradients = late
    try:
        job = overlap._job(mesh, "gpt-micro", options, Path(folder, "both"))
    finally:
        ddp.sum_gradients = real
    return overlap._times(mesh, own, job, job.loader.micro_batches(0), 0.05)


def test_what_holds_a_pass_up_is_exposed_and_neither_computing_nor_messages(ranks, tmp_path):
    nap = 0.5
    for found in ranks(2)(slowed, str(tmp_path), nap):
        assert found["exposed_s"] > nap / 2
        assert found["step_s"] > nap > 2 * max(found["compute_s"], found["communication_s"])
        assert found["hidden"] in (0.0, None)


def napping(mesh: Mesh) -> list[list[float]]:
    """The second of three acts takes longest, and longer on rank 1."""
    naps = [0.0, 0.1 * (1 + mesh.rank), 0.02]
    return overlap.interleave(mesh, [partial(time.sleep, nap) for nap in naps], 0.01)


def test_each_act_has_its_own_times_and_the_slowest_rank_s(ranks):
    for first, second, third in ranks(2)(napping):
        assert len(first) == len(second) == len(third) == overlap.LEAST
        assert min(second) >= 0.2
        assert 0.1 > min(third) >= 0.02 > min(first)


def replayed(mesh: Mesh) -> list[tuple]:
    sent = [
        Message("all_reduce", 4000, (0, 1), "float32"),
        Message("all_gather", 2000, (0, 1), "bfloat16"),
        Message("reduce_scatter", 6000, (0, 1), "float32"),
        Message("broadcast", 800, (0, 1), "int64"),
    ]
    act = overlap.replay(mesh, sent)
    with DTensorRecorder() as recorder:
        act()
    return [(sent, [message for message, _ in recorder.trace.messages])]


def test_messages_are_sent_again_as_they_were(ranks):
    for (sent, again), *_ in ranks(2)(replayed):
        assert again == sent


def shown(document: dict, monkeypatch, form: str, folder) -> str:
    """What the command makes of a measurement."""
    monkeypatch.setattr(bench_ranks, "measure", lambda *_, **__: document)
    done = CliRunner().invoke(app, ["bench", form, "--dir", str(folder)])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_keeps_and_draws(document, tmp_path, monkeypatch):
    words = shown(document, monkeypatch, "overlap", tmp_path)
    assert "buckets of 1 MB" in words
    assert "prefetch both" in words
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]


def test_overrides_need_no_recipe_before_them():
    assert recipe_and("training.steps=3", ["seed=1"]) == (
        "gpt-micro",
        ["training.steps=3", "seed=1"],
    )
    assert recipe_and("speech", None) == ("speech", [])


def test_one_rank_and_bad_buckets_are_refused(tmp_path):
    for words, reason in ((["--gpus", "1"], "sends nothing"), (["--buckets", "a"], "above 0")):
        done = CliRunner().invoke(app, ["bench", "overlap", *words])
        assert reason in str(done.exception)


def test_what_is_hidden():
    assert overlap.hidden(0.0, communication=0.4, uncertain=0.0) == 1.0
    assert overlap.hidden(-0.05, communication=0.4, uncertain=0.1) == 1.0
    assert overlap.hidden(0.1, communication=0.4, uncertain=0.0) == pytest.approx(0.75)
    assert overlap.hidden(0.9, communication=0.4, uncertain=0.0) == 0.0
    assert overlap.hidden(0.1, communication=0.4, uncertain=0.3) is None
    assert overlap.hidden(-0.2, communication=0.4, uncertain=0.1) is None


def test_the_median_of_noise_is_as_uncertain_as_it_says():
    """95 of 100 samples of a known distribution have their median within the interval."""
    draw = random.Random(1)
    inside = 0
    for _ in range(200):
        values = [draw.gauss(5.0, 1.0) for _ in range(50)]
        inside += abs(statistics.median(values) - 5.0) <= overlap.uncertainty(values)
    assert 0.9 <= inside / 200 <= 1.0
