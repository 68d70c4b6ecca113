"""Training under the profiler: real runs, on CPU ranks."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from pathlib import Path

import pytest
import torch

from muster.observe import heartbeat
from muster.observe.profile import Profile, window
from muster.observe.results import STOP_FILE, read_lines, summarise_metrics
from muster.observe.trace import read, summarise
from muster.training.loop import train
from processes import muster
from training import make_job

SMALL = [
    "training.global_batch_size=8",
    "training.gradient_accumulation_steps=2",
    "evaluation.final=false",
    "logging.every_steps=4",
]
PHASES = {
    "waiting for data",
    "counting the batch",
    "forward and backward",
    "optimizer step",
    "waiting for the device",
}


def load_trace(folder: Path, rank: int) -> dict:
    return json.loads(gzip.decompress((folder / "profile" / f"rank-{rank}.json.gz").read_bytes()))


def load_summary(folder: Path) -> dict:
    return json.loads((folder / "profile" / "summary.json").read_text())


@pytest.fixture(scope="module")
def command_line(tmp_path_factory) -> tuple[Path, str]:
    """A run's folder, and what its terminal showed."""
    folder = tmp_path_factory.mktemp("profiled")
    words = [
        "train",
        "gpt-micro",
        "--gpus",
        "2",
        "--profile",
        "training.epochs=null",
        "training.steps=8",
        *SMALL,
    ]
    words += ["data.sequence_length=64"]
    done = muster(*words, folder=folder)
    return folder / "runs" / "latest", done.stdout


@pytest.mark.guides
def test_each_rank_has_a_trace_of_the_same_steps_with_all_phases(command_line):
    run, _ = command_line
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        "rank-0.json.gz",
        "rank-1.json.gz",
        "summary.json",
        "summary.txt",
    ]
    for rank in (0, 1):
        trace = load_trace(run, rank)
        assert trace["distributedInfo"]["rank"] == rank
        timeline = read(trace)
        assert len(timeline.steps) == 3
        assert {name for _, name in timeline.phases} == PHASES
        passes = [name for _, name in timeline.phases if name == "forward and backward"]
        assert len(passes) == 3 * 2, "a range for each micro-batch"
    assert load_summary(run)["steps"] == [4, 6]


def test_shares_add_up_and_gradients_travel_in_the_backward_pass(command_line):
    summary = load_summary(command_line[0])
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    for rank in summary["ranks"]:
        whole = rank["computing"] + rank["exposed_communication"] + rank["idle"]
        assert whole == pytest.approx(1)
        assert 0 < rank["exposed_communication"] <= rank["communication"] < 1
        assert rank["computing"] > 0.01  # more on an idle machine
        phases = {phase["phase"]: phase for phase in rank["phases"]}
        assert phases["forward and backward"]["communication_ms"] > 0
        share = sum(p["wall_ms"] for p in phases.values()) / rank["step_ms"]
        assert 0.5 < share < 1.01, "phases follow each other, and little lies between them"
        kernels = {kernel["name"]: kernel for kernel in rank["kernels"]}
        assert "gloo:all_reduce" in kernels
        assert "aten::mm" in kernels
    assert summary["notes"] == []


def test_the_page_is_written_and_pointed_to(command_line):
    run, shown = command_line
    assert "profile of steps 4 to 6 on 2 CPU rank(s): computing " in shown
    assert f"{run.resolve().name}/profile/summary.txt" in shown
    text = (run / "profile" / "summary.txt").read_text()
    assert text.startswith("profile of steps 4 to 6 on 2 CPU rank(s)\n")
    for words in ("top kernels", "largest idle gaps", "exposed", "optimizer step"):
        assert words in text


def test_steps_under_the_profiler_are_marked_and_no_measure_of_speed(command_line):
    run, _ = command_line
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("profiled")] == [3, 4, 5, 6]
    results = json.loads((run / "training_results.json").read_text())
    others = sorted(line["step_time_s"] for line in lines if not line.get("profiled"))
    assert results["measured"]["median_step_time_s"] == (others[1] + others[2]) / 2
    assert results["steps"] == 8
    everything = sum(line["step_time_s"] for line in lines)
    assert sum(epoch["time_s"] for epoch in results["epochs"]) == pytest.approx(everything)


def test_a_run_of_profiled_steps_alone_is_measured_by_them():
    line = {"step": 1, "epoch": 0, "loss": 1.0, "samples": 8, "samples_per_s": 4.0}
    line |= {"step_time_s": 2.0, "memory_gib": 1.0, "profiled": True}
    assert summarise_metrics([line])["measured"]["median_step_time_s"] == 2.0


def train_in_pool(mesh, folder: str, overrides: list[str]) -> dict:
    """Losses, how many steps the balance counts, and the profile's words in the log."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("muster.observe.profile")
    logger.addHandler(handler)
    job = make_job(mesh, folder, [*SMALL, *overrides], "digits")
    train(job)
    job.observer.close()
    mesh.barrier()
    logger.removeHandler(handler)
    losses = [line["loss"] for line in read_lines(Path(folder) / "metrics.jsonl")]
    return {"losses": losses, "counted": job.observer.balance.steps, "words": words}


@pytest.mark.parametrize(
    ("strategy", "collective"),
    [("ddp", "all_reduce"), ("fsdp", "all_gather")],
)
@pytest.mark.full
def test_a_profile_changes_no_loss(ranks, tmp_path, strategy, collective):
    overrides = ["training.epochs=null", "training.steps=7", f"distributed.strategy={strategy}"]
    plain = ranks(2)(train_in_pool, str(tmp_path / "plain"), overrides)
    profiled = ranks(2)(train_in_pool, str(tmp_path / "a"), [*overrides, "logging.profile=2"])
    assert profiled[0]["losses"] == plain[0]["losses"]
    assert len(plain[0]["losses"]) == 7
    assert not (tmp_path / "plain" / "profile").exists()
    assert (plain[0]["counted"], profiled[0]["counted"]) == (6, 3), "not the first, nor profiled"
    for rank in (0, 1):
        found = summarise(load_trace(tmp_path / "a", rank))
        assert len(found["steps_ms"]) == 2
        kernels = {kernel["name"]: kernel["calls"] for kernel in found["kernels"]}
        assert kernels[f"gloo:{collective}"] >= 2
        assert found["communication"] >= found["exposed_communication"] > 0


def test_where_it_cannot_be_written_training_goes_on(ranks, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    overrides = ["training.epochs=null", "training.steps=6", "logging.profile=2"]
    for told in ranks(2)(train_in_pool, str(tmp_path), overrides):
        assert "could not write" in told["words"][0]
        assert len(told["losses"]) == 6


def test_a_full_disk_leaves_no_half_trace(ranks, tmp_path, small_disk):
    (tmp_path / "profile").symlink_to(small_disk)
    (small_disk / "others").write_bytes(bytes(900 * 2**10))  # too little is left for any trace
    overrides = ["training.epochs=null", "training.steps=6", "logging.profile=3"]
    for told in ranks(2)(train_in_pool, str(tmp_path), overrides):
        assert any("disk full" in words or "No space" in words for words in told["words"])
        assert len(told["losses"]) == 6
    assert [path.name for path in small_disk.iterdir()] == ["others"]


def test_a_rank_without_a_trace_is_named_and_the_others_are_shown(ranks, tmp_path):
    (tmp_path / "profile" / "rank-1.json.gz").mkdir(parents=True)
    overrides = ["training.epochs=null", "training.steps=6", "logging.profile=2"]
    _, told = ranks(2)(train_in_pool, str(tmp_path), overrides)
    assert "could not write (IsADirectoryError" in told["words"][0]
    assert len(told["losses"]) == 6
    summary = load_summary(tmp_path)
    assert [rank["rank"] for rank in summary["ranks"]] == [0]
    assert summary["notes"] == ["no trace of rank(s) 1; see ranks/1.log"]


class Alone:
    def gather(self, value):
        return [value]


def test_a_profiler_that_does_not_start_is_a_warning(tmp_path, caplog):
    profile = Profile(tmp_path, asked=1, steps=9)
    profile.first = -1  # a schedule that torch refuses
    for step in range(9):
        profile.begin(step, Alone())
    profile.end(Alone())
    assert "could not start (AssertionError" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_a_run_that_goes_on_leaves_the_profile_of_its_newest_attempt(ranks, tmp_path):
    ranks(2)(
        train_in_pool,
        str(tmp_path),
        ["training.epochs=null", "training.steps=2", "logging.profile=2"],
    )
    summary = load_summary(tmp_path)
    assert summary["steps"] == [2, 2]
    assert summary["notes"][0].startswith("2 step(s) are few for logging.profile=2: recorded 1")
    before = load_trace(tmp_path, 0)
    (tmp_path / "profile" / "rank-2.json.gz").write_bytes(b"of a third rank")
    ranks(2)(
        train_in_pool,
        str(tmp_path),
        ["training.epochs=null", "training.steps=9", "logging.profile=2"],
    )
    assert load_summary(tmp_path)["steps"] == [6, 7]
    assert load_trace(tmp_path, 0) != before
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {"rank-0.json.gz", "rank-1.json.gz", "summary.json", "summary.txt"}


def test_a_run_stopped_before_its_profile_ends_as_others_do(ranks, tmp_path):
    (tmp_path / STOP_FILE).touch()
    overrides = ["training.epochs=null", "training.steps=9", "logging.profile=2"]
    told, _ = ranks(2)(train_in_pool, str(tmp_path), overrides)
    assert len(told["losses"]) == 1
    assert told["words"] == ["profile: no rank recorded a step"]


@pytest.mark.parametrize(
    ("asked", "start", "steps", "expected"),
    [
        (3, 0, 100, (2, 3, 6)),
        (3, 50, 100, (52, 53, 56)),
        (3, 0, 6, (2, 3, 6)),
        (3, 0, 5, (1, 2, 5)),
        (3, 0, 4, (0, 1, 4)),
        (3, 0, 3, (0, 1, 3)),
        (3, 7, 9, (7, 8, 9)),
        (3, 0, 1, (0, 0, 1)),
    ],
)
def test_a_short_run_gives_up_settling_first(asked, start, steps, expected):
    assert window(asked, start, steps) == expected
    profile = Profile(asked=asked, start=start, steps=steps)
    begins, _, stop = expected
    covered = [step for step in range(start, steps) if profile.covers(step)]
    assert covered == list(range(begins, stop))
    assert bool(profile.notes) == (steps - start < 6)


@pytest.mark.parametrize(("asked", "start", "steps"), [(0, 0, 100), (3, 9, 9)])
def test_nothing_to_record_is_nothing_done(asked, start, steps, monkeypatch):
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    profile = Profile(asked=asked, start=start, steps=steps)
    assert not any(profile.covers(step) for step in range(100))
    profile.begin(start, ranks=None)  # type: ignore[arg-type]
    assert heartbeat._listener is None
    assert profile.notes == []


def test_under_nsys_phases_are_marked_from_the_first_step_to_the_last(monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    profile = Profile(steps=2)
    with torch.profiler.profile() as recorded:
        for step in range(2):
            profile.begin(step, ranks=None)  # type: ignore[arg-type]
            heartbeat.beat("forward and backward")
            opened = heartbeat._listener.range
            elsewhere = threading.Thread(target=heartbeat.beat, args=("saving",))
            elsewhere.start()
            elsewhere.join()
            assert heartbeat._listener.range is opened, "only the training thread has phases"
            heartbeat.beat("optimizer step")
        profile.end(ranks=None)  # type: ignore[arg-type]
        heartbeat.beat("evaluation")
    names = [event.name for event in recorded.events() if event.name.startswith("phase: ")]
    assert names == ["phase: forward and backward", "phase: optimizer step"] * 2
