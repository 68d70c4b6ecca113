"""Laws 2 and 6: any layout to any layout, and nothing half-written ever counts."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import StagingOptions

from muster.errors import CheckpointError
from muster.observe.results import complete_steps, read_lines, step_folders
from muster.training.checkpoint import Checkpoints
from muster.training.loop import train
from muster.training.manifest import open_checkpoint, read_manifest, verify
from pool import RankError
from training import make_job, run_training, weights

STEPS = 8


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def stop_at(mesh, folder: str, overrides: list[str], step: int, recipe: str = "speech") -> None:
    """Train as if a stop had been asked for during step `step`."""
    job = make_job(mesh, folder, overrides, recipe)
    job.observer.stop_requested = lambda: (
        len(read_lines(Path(folder) / "metrics.jsonl")) == step - 1
    )
    assert train(job) == step
    job.observer.close()
    mesh.barrier()


def train_and_weigh(mesh, folder: str, overrides: list[str]) -> torch.Tensor:
    job = make_job(mesh, folder, overrides)
    train(job)
    job.observer.close()
    mesh.barrier()
    return weights(job)


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory):
    """Eight steps without a break, on two ranks: metrics and final weights."""
    folder = tmp_path_factory.mktemp("straight")
    final = ranks(2)(train_and_weigh, str(folder), [f"training.steps={STEPS}"])
    return read_lines(folder / "metrics.jsonl"), final[0], folder


def test_stopping_and_resuming_on_the_same_ranks_changes_no_bit(ranks, straight, tmp_path):
    lines, final, _ = straight
    ranks(2)(stop_at, str(tmp_path), [f"training.steps={STEPS}"], 3)
    resumed = ranks(2)(train_and_weigh, str(tmp_path), [f"training.steps={STEPS}"])
    assert losses(read_lines(tmp_path / "metrics.jsonl")) == losses(lines)
    assert torch.equal(resumed[0], final)


@pytest.mark.full
def test_four_ranks_go_on_in_the_buckets_they_had(ranks, tmp_path):
    """Two numbers add up alike in any order, four do not: DDP's buckets must be those of before."""
    asked = ["training.steps=4"]
    final = ranks(4)(train_and_weigh, str(tmp_path / "straight"), asked)
    ranks(4)(stop_at, str(tmp_path / "stopped"), asked, 2)
    resumed = ranks(4)(train_and_weigh, str(tmp_path / "stopped"), asked)
    assert torch.equal(resumed[0], final[0])


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.full)])
def test_resuming_on_another_world_continues_at_the_same_sample(ranks, straight, tmp_path, world):
    lines, final, _ = straight
    ranks(2)(stop_at, str(tmp_path), [f"training.steps={STEPS}"], 3)
    resumed = ranks(world)(train_and_weigh, str(tmp_path), [f"training.steps={STEPS}"])
    continued = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in continued] == list(range(1, STEPS + 1))
    assert losses(continued) == pytest.approx(losses(lines), rel=1e-5)
    # Weights, not only losses: Adam turns rounding in a near-zero gradient into a step of up to
    # lr, so single weights may differ by a few per mille of one; their norm may not.
    assert torch.linalg.norm(resumed[0] - final) < 1e-3 * torch.linalg.norm(final)


def test_every_rank_writes_its_share_and_the_manifest_names_every_file(straight):
    _, _, folder = straight
    saved = folder / "checkpoints" / f"step-{STEPS}"
    manifest = read_manifest(saved)
    on_disk = {p.name for p in saved.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    verify(saved, manifest)


@pytest.mark.parametrize(
    "harm",
    [
        "manifest",
        "flipped",
        pytest.param("truncated", marks=pytest.mark.full),
        pytest.param("missing", marks=pytest.mark.full),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(ranks, recipe, tmp_path, harm):
    overrides = [f"training.steps={STEPS}", "checkpoint.every_steps=4"]
    lines = ranks(1)(run_training, str(tmp_path), overrides, recipe)[0]
    newest, older = step_folders(tmp_path / "checkpoints")
    shard = next(newest.glob("__0_0*"))
    if harm == "manifest":
        (newest / "manifest.json").unlink()
    elif harm == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif harm == "flipped":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(bytes(data))
    else:
        shard.unlink()
    again = ranks(1)(run_training, str(tmp_path), overrides, recipe)[0]
    assert losses(again) == losses(lines)
    events = [e for e in read_lines(tmp_path / "events.jsonl") if e["event"] == "resumed"]
    assert events[0]["step"] == 4
    assert newest.name in events[0]["passed_over"][0]
    assert older.name in events[0]["path"]


def test_training_on_while_saving_does_not_leak_into_the_checkpoint(ranks, recipe, tmp_path):
    """The shards hold the weights of their step although later steps ran while they were written."""
    slow = ["training.steps=4", "checkpoint.every_steps=2"]
    ranks(1)(run_training, str(tmp_path / "a"), slow, recipe)
    ranks(1)(
        run_training,
        str(tmp_path / "b"),
        ["training.steps=4", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"],
        recipe,
    )
    for step in (2, 4):
        ours, theirs = (
            json.loads(
                (tmp_path / side / "checkpoints" / f"step-{step}" / "manifest.json").read_text()
            )
            for side in "ab"
        )
        shards = [name for name in ours["files"] if name.endswith(".distcp")]
        assert shards
        for name in shards:
            assert ours["files"][name]["sha256"] == theirs["files"][name]["sha256"]


def save_on_gpu_1(mesh, folder: str) -> list[tuple[str, str]]:
    """Save as if this rank were bound to GPU 1; what touched CUDA or the disk, and in which thread."""
    calls: list[tuple[str, str]] = []

    def note(what: str) -> None:
        calls.append((what, threading.current_thread().name))

    def save(*arguments, **options):
        note("save")
        return saved(*arguments, **options)

    saved, bound = dcp.save, replace(mesh, device=torch.device("cuda", 1))
    checkpoints = Checkpoints(Path(folder), bound, {}, {}, keep=1, asynchronous=True)
    engine = SimpleNamespace(state=lambda: {"model": {"weight": torch.ones(3)}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_device", lambda device: note(str(device)))
        patch.setattr("torch.distributed.checkpoint.save", save)
        patch.setattr("torch.distributed.checkpoint.state_dict_saver.save", save)
        plain = StagingOptions(False, False, False, False)  # pinning needs a GPU
        patch.setattr("muster.training.checkpoint.StagingOptions", lambda **_: plain)
        checkpoints.save(1, engine, {})
        checkpoints.wait()
    read_manifest(Path(folder) / "step-1")
    return calls


def test_the_thread_that_writes_is_on_the_device_of_its_rank(ranks, tmp_path):
    """A thread begins on GPU 0, and whatever touches CUDA in it creates a context there."""
    found = ranks(1)(save_on_gpu_1, str(tmp_path))[0]
    assert found == [("cuda:1", "checkpoint"), ("save", "checkpoint")]


def test_only_the_newest_are_kept(ranks, recipe, tmp_path):
    for name in ("step-1", "step-99", "step-1.bak"):  # incomplete, as a killed run leaves them
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    ranks(1)(
        run_training,
        str(tmp_path),
        ["training.steps=8", "checkpoint.every_steps=2", "checkpoint.keep=2"],
        recipe,
    )
    found = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert found == {"step-99", "step-8", "step-6", "step-1.bak"}


def test_the_end_may_go_unsaved_but_a_stop_never_does(ranks, recipe, tmp_path):
    overrides = ["training.steps=5", "checkpoint.every_steps=2", "checkpoint.final=false"]
    ranks(1)(run_training, str(tmp_path / "ended"), overrides, recipe)
    saved = [f.name for f in step_folders(tmp_path / "ended" / "checkpoints")]
    assert saved == ["step-4", "step-2"]
    ranks(1)(stop_at, str(tmp_path / "stopped"), overrides, 3, recipe)
    saved = [f.name for f in step_folders(tmp_path / "stopped" / "checkpoints")]
    assert saved == ["step-3", "step-2"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("training.global_batch_size=16", "training.global_batch_size"),
        pytest.param("model.preset=lmu-micro-causal", "model.preset", marks=pytest.mark.full),
        pytest.param("seed=7", "seed", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused_by_key(ranks, straight, tmp_path, change, key):
    shutil.copytree(straight[2], tmp_path / "run")
    with pytest.raises(RankError) as failure:
        ranks(2)(run_training, str(tmp_path / "run"), [f"training.steps={STEPS}", change])
    assert failure.value.kind == "CheckpointError"
    assert key in failure.value.message


def test_a_new_run_starts_from_the_checkpoint_it_is_given(ranks, straight, tmp_path):
    lines, _, folder = straight
    overrides = [f"training.steps={STEPS + 2}", f"checkpoint.resume={folder}"]
    continued = ranks(1)(run_training, str(tmp_path), overrides)[0]
    assert [line["step"] for line in continued] == [STEPS + 1, STEPS + 2]
    assert continued[0]["loss"] < lines[0]["loss"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(ranks, small_disk):
    with pytest.raises(RankError) as failure:
        ranks(1)(run_training, str(small_disk), ["training.steps=2"])
    assert failure.value.kind == "CheckpointError"
    assert "no space" in failure.value.message
    assert not step_folders(small_disk / "checkpoints")


def fill_during_save(mesh, folder: str) -> None:
    """The space check passes, then the disk fills up before the shards are written."""
    job = make_job(mesh, folder, ["training.steps=2", "checkpoint.asynchronous=true"])
    job.checkpoints._check_space = lambda state: None
    train(job)


def test_a_disk_that_fills_while_saving_is_a_sentence_too(ranks, small_disk):
    with pytest.raises(RankError) as failure:
        ranks(2)(fill_during_save, str(small_disk))
    assert failure.value.kind == "CheckpointError"
    assert "step-2 could not be written" in failure.value.message
    assert "where 0.0 MiB were free" in failure.value.message
    assert not step_folders(small_disk / "checkpoints")


def test_foreign_names_beside_the_checkpoints_are_left_alone(ranks, recipe, tmp_path):
    """Copies that a user made, and digits that are none to Python."""
    asked = ["training.steps=4", "checkpoint.every_steps=2", "checkpoint.keep=1"]
    root = tmp_path / "checkpoints"
    strange = [root / name for name in ("step-2.bak", "step-²", "step-007", "step-")]
    for folder in strange:
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("mine")
    ranks(1)(run_training, str(tmp_path), asked, recipe)
    assert step_folders(root) == [root / "step-4"]
    assert complete_steps(tmp_path) == [4]
    assert all((folder / "manifest.json").read_text() == "mine" for folder in strange)


def test_opening_a_folder_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_checkpoint(tmp_path)
