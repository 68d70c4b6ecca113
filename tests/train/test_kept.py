"""Damage on the disk: found when a checkpoint is read back, verified or opened, and never loaded."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from muster import run_directory
from muster.cli import app
from muster.errors import CheckpointError
from muster.observe.results import complete_steps, read_lines
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.training.checkpoint import Checkpoints
from muster.training.kept import kept_in
from muster.training.loop import train
from muster.training.manifest import FORMAT, SEALED, bytes_in, open_checkpoint, sealed
from muster.training.read_back import damaged, drop_cached, set_aside
from pool import RankError
from training import make_job

FILES = (".metadata", "__0_0.distcp", "assets.json", "manifest.json", "recipe.json")


def save(root: Path, *steps: int, best: int | None = None, keep: int = 9) -> None:
    alone = Mesh(0, 0, Layout(), torch.device("cpu"), None)
    checkpoints = Checkpoints(root, alone, {"seed": 1}, {"a": 2}, keep=keep, asynchronous=False)
    for step in steps:
        state = {"model": {"weight": torch.arange(256.0) + step, "bias": torch.ones(3)}}
        trainer = {"bad_steps": 0, "selection": {"keeps": True, "best_step": best}}
        checkpoints.save(step, SimpleNamespace(state=lambda held=state: held), trainer)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Steps 2 and 4."""
    root = tmp_path_factory.mktemp("two")
    save(root, 2, 4)
    assert sorted(path.name for path in (root / "step-4").iterdir()) == list(FILES)
    return root


def changed(data: bytes, at: int, to: Callable[[int], int]) -> bytes:
    return data[:at] + bytes([to(data[at])]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "first bit": lambda data: changed(data, 0, lambda byte: byte ^ 1),
    "bit in the middle": lambda data: changed(data, len(data) // 2, lambda byte: byte ^ 4),
    "last bit": lambda data: changed(data, len(data) - 1, lambda byte: byte ^ 128),
    "another byte": lambda data: changed(data, len(data) // 3, lambda byte: (byte + 1) % 256),
    "cut by a byte": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "twice": lambda data: data * 2,
    "halves exchanged": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "missing": lambda data: None,
}


@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_found_named_and_not_loaded(two, tmp_path, name):
    """12 kinds in each of 5 files: 60 damaged checkpoints."""
    root = shutil.copytree(two, tmp_path / "run")
    path = root / "step-4" / name
    whole = path.read_bytes()
    for kind, harm in DAMAGE.items():
        data = harm(whole)
        assert data != whole
        path.unlink() if data is None else path.write_bytes(data)
        newest, older = kept_in(root, verify=True)
        assert newest.problem is not None, kind
        assert name in newest.problem, kind
        assert older.problem is None
        assert open_checkpoint(root).path == root / "step-2", kind
        with pytest.raises(CheckpointError, match="step-4"):
            open_checkpoint(root / "step-4")
    path.write_bytes(whole)
    assert [one.problem for one in kept_in(root, verify=True)] == [None, None]


def test_any_other_digit_in_a_manifest_is_found(two, tmp_path):
    """The step, the best one and the world are in no other file."""
    root = shutil.copytree(two, tmp_path / "run")
    path = root / "step-4" / "manifest.json"
    whole = path.read_text()
    clock = range(whole.index('"time"'), whole.index('"files"'))  # its last digits may say nothing
    digits = [i for i, letter in enumerate(whole) if letter.isdigit() and i not in clock][::5]
    assert len(digits) > 40
    for i in digits:
        path.write_text(whole[:i] + str((int(whole[i]) + 1) % 10) + whole[i + 1 :])
        assert kept_in(root)[0].problem is not None, whole[i - 20 : i + 5]


def test_what_is_read_back_comes_from_the_disk(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    with path.open("rb") as file:
        drop_cached(file)
        try:
            os.preadv(file.fileno(), [bytearray(10)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return  # not in the kernel's cache
        except OSError:
            pass
    pytest.skip("this file system is in memory, or does not say what it caches")


def test_a_file_that_cannot_be_read_is_damaged(tmp_path):
    entry = {"bytes": 1, "sha256": ""}
    assert damaged(tmp_path, {"gone": entry}) == ["gone cannot be read (No such file or directory)"]


def train_on_a_bad_disk(mesh, folder: str, recipe: str, bad: list[int]) -> None:
    """The disk changes a byte of rank 1's shard at these tries to save."""
    job = make_job(
        mesh, folder, ["training.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=1"], recipe
    )
    real, tries = job.checkpoints._same_on_disk, itertools.count(1)

    def spoilt(at: Path, *arguments):
        if next(tries) in bad and mesh.rank == 1:
            shard = at / "__1_0.distcp"
            shard.write_bytes(changed(shard.read_bytes(), 1000, lambda byte: byte ^ 1))
        return real(at, *arguments)

    job.checkpoints._same_on_disk = spoilt
    train(job)
    job.observer.close()


def test_a_checkpoint_that_the_disk_changed_is_set_aside_and_written_again(ranks, recipe, tmp_path):
    """Step 2 once, step 4 at both tries, step 6 never: what is whole is removed for what is whole only."""
    ranks(2)(train_on_a_bad_disk, str(tmp_path), recipe, [1, 3, 4])
    warnings = [
        e["words"] for e in read_lines(tmp_path / "events.jsonl") if e["event"] == "warning"
    ]
    assert len(warnings) == 3
    assert all("__1_0.distcp does not match its checksum" in words for words in warnings)
    assert "step-2 as it was" in warnings[0]
    assert "it is written again" in warnings[0]
    assert "the newest complete one is step 2; check" in warnings[2]
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["step-4.damaged", "step-6"]
    assert [one.problem for one in kept_in(root, verify=True)] == [None]


def test_a_run_whose_last_checkpoint_the_disk_never_keeps_has_not_finished(ranks, recipe, tmp_path):
    with pytest.raises(RankError) as failure:
        ranks(2)(train_on_a_bad_disk, str(tmp_path), recipe, [3, 4])
    assert failure.value.kind == "CheckpointError"
    assert "did not keep the checkpoint step-6 as it was written, twice" in failure.value.message
    assert "the newest complete one is step 4; check the disk" in failure.value.message


def go_on_after_damage(mesh, folder: str, recipe: str) -> None:
    """With checkpoints at other steps than before, of which two are kept."""
    often = ["training.steps=8", "checkpoint.every_steps=2", "checkpoint.keep=9"]
    train(make_job(mesh, folder, often, recipe))
    shard = Path(folder) / "checkpoints" / "step-8" / "__0_0.distcp"
    shard.write_bytes(changed(shard.read_bytes(), 1000, lambda byte: byte ^ 1))
    shutil.rmtree(shard.parents[1] / "step-4")
    shutil.rmtree(shard.parents[1] / "step-2")
    rarely = ["training.steps=9", "checkpoint.every_steps=9", "checkpoint.keep=2"]
    train(make_job(mesh, folder, rarely, recipe))


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(ranks, recipe, tmp_path):
    ranks(1)(go_on_after_damage, str(tmp_path), recipe)
    assert complete_steps(tmp_path) == [6, 9]


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda m: [], "holds a list"),
    "a number": (lambda m: 1, "holds a number"),
    "only a format": (lambda m: {"format": m["format"]}, "it has no step"),
    "a negative step": (lambda m: {**m, "trainer": {"step": -5}}, "it has no step"),
    "no world": (lambda m: {**m, "world": None}, "it has no world and time"),
    "no files": (lambda m: {**m, "files": {}}, "it has no files"),
    "a list of files": (lambda m: {**m, "files": []}, "it has no files"),
    "an empty entry": (lambda m: {**m, "files": {"a": {}}}, "no size and checksum of a"),
    "a file elsewhere": (lambda m: {**m, "files": {"/etc/passwd": ENTRY}}, "is not inside"),
    "a file above": (lambda m: {**m, "files": {"../../x": ENTRY}}, "is not inside"),
    "long name": (lambda m: {**m, "files": {"x" * 300: ENTRY}}, "longer than 255 bytes"),
    "depth": (lambda m: {**m, "trainer": nested(500)}, "deep in each other"),
}
ENTRY = {"bytes": 1, "sha256": "0"}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("form", [FORMAT, SEALED])
def test_a_forged_manifest_is_refused_in_a_sentence(two, tmp_path, name, form):
    """Also with a checksum of its own that is right: anybody can compute it."""
    root = shutil.copytree(two, tmp_path / "run")
    path = root / "step-4" / "manifest.json"
    forge, words = FORGED[name]
    whole = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    forged = forge({**whole, "format": form})
    if form == SEALED and isinstance(forged, dict):
        forged = sealed(forged)
    path.write_text(json.dumps(forged))
    with pytest.raises(CheckpointError, match="step-4") as refused:
        open_checkpoint(root / "step-4")
    assert words in str(refused.value)
    assert words in str(kept_in(root)[0].problem)
    assert open_checkpoint(root).path == root / "step-2"


def test_a_manifest_that_is_a_link_to_itself_is_refused_in_a_sentence(two, tmp_path):
    root = shutil.copytree(two, tmp_path / "run")
    (root / "step-4" / "manifest.json").unlink()
    (root / "step-4" / "manifest.json").symlink_to("manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        open_checkpoint(root / "step-4")


@pytest.fixture
def finished(tmp_path) -> run_directory.Run:
    """A run with steps 2, 4, 6 and 8, of which 4 is the best, and an interrupted save of step 9."""
    made = run_directory.create(
        tmp_path,
        "small",
        {
            "recipe.yaml": "name: small\ntask: causal-lm\ntraining: {steps: 9, global_batch_size: 4}\ndata: {train: x}\n"
        },
    )
    made.update(state="finished")
    save(made.path / "checkpoints", 2, 4, 6, 8, best=4)
    (made.path / "checkpoints" / "step-1").mkdir()
    return made


def called(run: run_directory.Run, *options: str) -> tuple[int, str]:
    """The exit code, and what is printed, on one line."""
    result = CliRunner().invoke(app, ["checkpoints", str(run.path), *options])
    return result.exit_code, " ".join(result.output.split())


def test_checkpoints_are_listed_and_verified(finished):
    code, text = called(finished)
    assert code == 0
    assert text.index("step-8") < text.index("step-6") < text.index("step-1 ")
    assert text.count("the best") == 1
    assert "interrupted" in text
    (finished.path / "checkpoints" / "step-1").rmdir()
    assert called(finished, "--verify")[0] == 0
    shard = finished.path / "checkpoints" / "step-6" / "__0_0.distcp"
    shard.write_bytes(changed(shard.read_bytes(), 99, lambda byte: byte ^ 1))
    assert called(finished)[0] == 0, "checksums are not looked at"
    code, text = called(finished, "--verify")
    assert code == 1
    assert "__0_0.distcp does not match" in text
    assert text.count("does not match") == 1


def test_pruning_keeps_the_best_and_the_newest_whole_ones(finished):
    root = finished.path / "checkpoints"
    shard = root / "step-8" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, text = called(finished, "--prune", "--keep", "1", "--yes")
    assert code == 0
    assert "step-8 is damaged" in text
    assert complete_steps(finished.path) == [4, 6, 8]
    assert not (root / "step-1").exists()
    (root / "step-6" / "recipe.json").unlink()
    (root / "step-4" / "recipe.json").unlink()
    assert called(finished, "--prune", "--keep", "1", "--yes")[0] == 0
    assert complete_steps(finished.path) == [4, 6, 8], "where none is whole, nothing goes"


def test_a_run_that_is_running_is_not_pruned_from_outside(finished):
    with finished.claim():
        finished.update(state="running", host=os.uname().nodename)
        finished.own()
        result = CliRunner().invoke(app, ["checkpoints", str(finished.path), "--prune", "--yes"])
    assert "is being run already" in str(result.exception)
    assert complete_steps(finished.path) == [2, 4, 6, 8]


def test_a_damaged_copy_goes_where_a_second_one_does_not_fit(two, tmp_path, monkeypatch):
    root = shutil.copytree(two, tmp_path / "run")
    shards = bytes_in(root / "step-4") - (root / "step-4" / "manifest.json").stat().st_size
    usage = SimpleNamespace(free=shards - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert set_aside(root / "step-4") == "it was removed"
    assert [path.name for path in root.iterdir()] == ["step-2"]


def test_a_damaged_copy_that_cannot_be_renamed_counts_as_incomplete(two, tmp_path, monkeypatch):
    root = shutil.copytree(two, tmp_path / "run")

    def refused(self, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", refused)
    assert "could not be renamed (Device or resource busy)" in set_aside(root / "step-4")
    assert not kept_in(root)[0].complete
    assert open_checkpoint(root).path == root / "step-2"


def test_a_file_system_that_drops_no_pages_damages_nothing(two, monkeypatch):
    def unknown(*arguments):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unknown)
    assert [one.problem for one in kept_in(two, verify=True)] == [None, None]
