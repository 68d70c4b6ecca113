"""Exports of more than one model: the mean of checkpoints, and the way from the pretrained weights.

References are made from the plain export of every checkpoint, tensor by tensor.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.numpy import load_file
from test_export import LORA, WHISPER, checkpoint
from typer.testing import CliRunner

from muster.cli.export import export as export_command
from muster.errors import MusterError
from muster.inference import averaging
from muster.inference.export import export_checkpoint

STEPS = (9, 10, 20, 30)  # 9 is the oldest, though the last by its letters
BYTES = ["data.tokenizer.kind=bytes"]
KINDS = {
    "gpt": ("gpt-micro", BYTES),
    "whisper adapters": ("whisper-micro", [*WHISPER, *LORA]),
}
ROWS = ["gpt", pytest.param("whisper adapters", marks=pytest.mark.full)]
Tensors = dict[str, np.ndarray]


class Trained:
    """A run from a pretrained folder, and the tensors of all its exports, in float64."""

    def __init__(self, folder: Path, recipe: str, overrides: list[str]) -> None:
        plain = [option for option in overrides if option not in LORA]
        fresh, _ = checkpoint(folder / "fresh", recipe, plain)
        export_checkpoint(fresh, folder / "pretrained")
        self.pretrained = tensors(folder / "pretrained")
        self.run, self.steps, self.plain = folder / "run", {}, folder / "plain-30"
        for step in STEPS:
            options = [*overrides, f"model.pretrained={folder / 'pretrained'}"]
            checkpoint(self.run, recipe, options, step=step, noise=0.1)
            export_checkpoint(self.at(step), folder / f"plain-{step}")
            self.steps[step] = tensors(folder / f"plain-{step}")

    def at(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step}"

    def mean(self, *steps: int) -> Tensors:
        return {n: np.mean([self.steps[s][n] for s in steps], axis=0) for n in self.pretrained}


def tensors(folder: Path) -> Tensors:
    return {n: t.astype(np.float64) for n, t in load_file(folder / "model.safetensors").items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module", params=ROWS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), *KINDS[request.param])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints, from nothing."""
    folder = tmp_path_factory.mktemp("fresh")
    for step in (1, 2):
        checkpoint(folder, "gpt-micro", [], step=step, noise=0.1)
    return folder


def test_the_last_checkpoints_are_averaged_and_the_rest_of_the_folder_stays(trained, tmp_path):
    export_checkpoint(trained.run, tmp_path / "out", average=3)
    assert_same(tensors(tmp_path / "out"), trained.mean(10, 20, 30))
    for path in trained.plain.iterdir():
        if path.name != "model.safetensors":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(trained.plain.iterdir())) == len(list((tmp_path / "out").iterdir()))


def test_a_step_is_averaged_with_those_before_it(trained, tmp_path):
    export_checkpoint(trained.at(20), tmp_path / "out", average=2)
    assert_same(tensors(tmp_path / "out"), trained.mean(10, 20))


def test_a_blend_lies_between_the_pretrained_and_the_trained(trained, tmp_path):
    export_checkpoint(trained.run, tmp_path / "out", blend=0.3)
    ends = trained.steps[30], trained.pretrained
    expected = {n: 0.3 * ends[0][n] + 0.7 * ends[1][n] for n in ends[0]}
    assert_same(tensors(tmp_path / "out"), expected)
    export_checkpoint(trained.run, tmp_path / "all", blend=1.0)
    written, plain = (f / "model.safetensors" for f in (tmp_path / "all", trained.plain))
    assert written.read_bytes() == plain.read_bytes()


def test_the_mean_is_what_is_blended(trained, tmp_path):
    export_checkpoint(trained.run, tmp_path / "out", average=4, blend=0.5)
    mean = trained.mean(*STEPS)
    assert_same(tensors(tmp_path / "out"), {n: (mean[n] + trained.pretrained[n]) / 2 for n in mean})


def test_the_command_averages_and_blends(trained, tmp_path):
    app = typer.Typer()
    app.command()(export_command)
    words = [str(trained.run), str(tmp_path / "out"), "--average", "2", "--blend", "0.25"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    mean, start = trained.mean(20, 30), trained.pretrained
    expected = {n: start[n] + 0.25 * (mean[n] - start[n]) for n in mean}
    assert_same(tensors(tmp_path / "out"), expected)


@pytest.mark.guides
def test_an_incomplete_checkpoint_is_passed_over_and_told_of(fresh, tmp_path):
    for step in (1, 2):
        export_checkpoint(fresh / "checkpoints" / f"step-{step}", tmp_path / f"plain-{step}")
    run = tmp_path / "run"
    shutil.copytree(fresh, run)
    checkpoint(run, "gpt-micro", [], step=3, noise=0.1)
    export_checkpoint(run / "checkpoints" / "step-3", tmp_path / "plain-3")
    (run / "checkpoints" / "step-2" / "manifest.json").unlink()
    export_checkpoint(run, tmp_path / "out", average=2)
    first, third = tensors(tmp_path / "plain-1"), tensors(tmp_path / "plain-3")
    assert_same(tensors(tmp_path / "out"), {n: (first[n] + third[n]) / 2 for n in first})
    with pytest.raises(MusterError, match=r"has 2 complete up to step 3 \(.*step-2 is incomplete"):
        export_checkpoint(run, tmp_path / "more", average=3)


def test_what_never_learnt_stays_to_the_bit_and_counters_are_the_newest():
    still = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    states = [{"still": still.clone(), "seen": torch.tensor(n)} for n in (3, 2, 1)]
    found = averaging.mean(iter(states), 3)
    assert torch.equal(found["still"], still)
    assert found["still"].dtype == torch.float32
    assert found["seen"] == 3


def test_one_checkpoint_is_in_memory_besides_the_sum():
    held: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def states() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal most
        for _ in range(4):
            most = max(most, sum(one() is not None for one in held))
            state = {str(n): torch.ones(3) for n in range(10)}
            held.extend(weakref.ref(value) for value in state.values())
            yield state
            del state

    averaging.mean(states(), 4)
    assert most <= 1  # the tensor that was added last


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"average": 3},
            r"has 2 complete up to step 2; .*checkpoint\.keep .*checkpoint\.every_steps",
        ),
        ({"average": 0}, "--average 0: expected"),
        ({"blend": 0.0}, r"--blend 0\.0: expected"),
        ({"blend": 1.01}, r"--blend 1\.01: expected"),
        ({"blend": float("nan")}, "--blend nan: expected"),
        ({"blend": 0.5}, r"without model\.pretrained"),
        ({"average": 2, "adapter": True}, "--average is of whole weights.*--adapter"),
        ({"blend": 0.5, "adapter": True}, "--blend is of whole weights.*--adapter"),
    ],
)
def test_what_cannot_be_mixed_says_why(fresh, tmp_path, options, words):
    with pytest.raises(MusterError, match=words):
        export_checkpoint(fresh, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_two_runs_are_not_averaged(fresh, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(fresh, run)
    checkpoint(run, "gpt-micro", ["seed=7"], step=3)
    with pytest.raises(MusterError, match=r"step-2 is of another run than .*step-3"):
        export_checkpoint(run, tmp_path / "out", average=2)


def test_a_blend_without_the_pretrained_folder_names_it(tmp_path):
    run, _ = checkpoint(tmp_path / "base", "gpt-micro", [])
    export_checkpoint(run, tmp_path / "pretrained")
    options = [*BYTES, f"model.pretrained={tmp_path / 'pretrained'}"]
    run, _ = checkpoint(tmp_path / "run", "gpt-micro", options)
    (tmp_path / "pretrained").rename(tmp_path / "elsewhere")
    with pytest.raises(MusterError, match=r"--blend reads .*there is no folder .*/pretrained"):
        export_checkpoint(run, tmp_path / "out", blend=0.5)
