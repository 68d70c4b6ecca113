"""Runs with `--gpus MIN:MAX`: a device that computes wrong is left out, and the others go on."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from muster import run_directory
from muster.errors import DataError, DeviceError
from muster.hardware import inventory
from muster.launch import elastic, failure
from muster.launch.cluster import Node
from muster.launch.elastic import ElasticSupervisor
from muster.launch.local import Supervisor
from muster.launch.process import record_error
from muster.observe.events import EVENTS_FILE
from muster.observe.results import read_lines
from muster.recipe.load import load
from muster.run_directory import Run
from processes import MUSTER, python_path, start

pytestmark = pytest.mark.timeout(300)

STEPS = 8
# Runs in every process before its program: local rank 1 of three has a device that computes wrong, from its
# `test`-th test on. The first is at its start.
FAULTY = """
import os
if os.environ.get("LOCAL_RANK") == "1" and os.environ.get("WORLD_SIZE") == "3":
    import torch
    from muster.parallel import device_test
    real, asked = device_test._product, []
    def product(kind, device):
        found, expected = real(kind, device)
        asked.append(kind)
        if asked.count(kind) >= {test}:
            found[0, 3, 0, 5] += 1
        return found, expected
    device_test._product = product
"""


def train(folder: Path, recipe: str, gpus: str, *words: str, test: int) -> tuple[int, str, Run]:
    (folder / "sitecustomize.py").write_text(FAULTY.format(test=test))
    keys = [f"training.steps={STEPS}", "checkpoint.every_steps=2", *words]
    command = [*MUSTER, "train", recipe, "--gpus", gpus, *keys]
    process: subprocess.Popen[str] = start(command, folder=folder, env=python_path(folder))
    said = process.communicate(timeout=240)[0]
    return process.returncode, said, run_directory.find("latest", folder / "runs")


def events(run: Run, name: str) -> list[dict]:
    return [event for event in read_lines(run.path / EVENTS_FILE) if event["event"] == name]


def assert_as_alone(run: Run, undisturbed) -> None:
    lines, alone = read_lines(run.path / "metrics.jsonl"), undisturbed(1)[:STEPS]
    for name in ("step", "samples"):
        assert [line[name] for line in lines] == [line[name] for line in alone]
    assert [line["loss"] for line in lines] == pytest.approx([a["loss"] for a in alone], rel=1e-5)


@pytest.fixture
def supervisor(recipe, tmp_path, monkeypatch):
    """`supervisor(least, error)` of three GPUs, whose rank 1 ended with that error."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(load(recipe).as_dict()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    started: list[ElasticSupervisor] = []

    def start(least: int, error: Exception) -> ElasticSupervisor:
        record_error(tmp_path, 1, error)
        ended = {1: 1, 0: 1}  # another rank, in a collective
        monkeypatch.setattr(Supervisor, "_attempt", lambda _: failure.collect(tmp_path, ended, 3))
        one = ElasticSupervisor(Run(tmp_path), 3, Node(), least)
        one.devices = ["4", "5", "6"]
        one.nodes = one._connect(secrets.token_bytes(32))
        one._join()
        started.append(one)
        return one

    yield start
    for one in started:
        one.nodes.close()


def test_the_device_of_the_rank_that_failed_is_not_used_again(supervisor):
    one = supervisor(1, DeviceError("rank 1: GPU 1 computes wrong"))
    assert one.ranks == 3
    assert one._decide([one._attempt()]) == {"again": True}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    one._join()
    assert one.ranks == 2
    (lost,) = events(one.run, "device_lost")
    assert (lost["rank"], lost["why"]) == (1, "rank 1: GPU 1 computes wrong")


def test_a_rank_that_fails_for_another_reason_keeps_its_device(supervisor):
    one = supervisor(1, DataError("a row is damaged"))
    found = one._attempt()
    assert found is not None
    assert not one._should_restart(found)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert one.offered == 3


def test_node_0_with_too_few_devices_ends_the_run_whatever_failed_first(supervisor):
    one = supervisor(3, DeviceError("rank 1: GPU 1 computes wrong"))
    one._attempt()
    killed = failure.collect(one.run.path, {0: -9}, 3)  # of another node
    assert killed["signal"] == "SIGKILL"
    assert not one._should_restart(killed)


def test_a_device_that_fails_while_node_0_is_lost_is_left_out_all_the_same(supervisor, monkeypatch):
    one = supervisor(1, DeviceError("rank 1: GPU 1 computes wrong"))

    def lost(key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(one.nodes.store, "set", lost)
    found = one._attempt()
    assert found is not None
    assert found["lost_device"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert one.offered == one.nodes.me.ranks == 2


@pytest.mark.parametrize(
    ("vendor", "given", "found"),
    [
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "4,5,6"}, ("CUDA_VISIBLE_DEVICES", ["4", "5"])),
        ("amd", {"HIP_VISIBLE_DEVICES": "4,5,6"}, ("HIP_VISIBLE_DEVICES", ["4", "5"])),
        ("amd", {"ROCR_VISIBLE_DEVICES": "4,5,6"}, ("CUDA_VISIBLE_DEVICES", ["0", "1"])),
    ],
)
def test_devices_are_left_out_by_the_variable_that_the_hardware_is_read_by(
    monkeypatch, vendor, given, found
):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    gpus = [SimpleNamespace(vendor=vendor)] * 3
    monkeypatch.setattr(inventory, "detect", lambda: SimpleNamespace(gpus=gpus))
    assert elastic._visible_devices(2) == found


def test_a_run_does_not_go_on_with_too_few_devices(supervisor):
    one = supervisor(3, DeviceError("rank 1: GPU 1 computes wrong"))
    found = one._attempt()
    assert found is not None
    assert not one._should_restart(found)


@pytest.mark.full
def test_a_device_that_fails_at_the_start_is_left_out(recipe, tmp_path, undisturbed):
    code, said, run = train(tmp_path, recipe, "1:3", test=1)
    assert code == 0, said
    (lost,) = events(run, "device_lost")
    assert "rank 1: " in lost["why"]
    assert "computes wrong: a matrix product in float32 is wrong in 1 of " in lost["why"]
    assert [event["ranks"] for event in events(run, "world")] == [3, 2]
    assert_as_alone(run, undisturbed)


@pytest.mark.full
def test_a_device_that_fails_in_a_run_is_left_out_and_the_rest_go_on(recipe, tmp_path, undisturbed):
    words = ["checkpoint.verify_device_steps=3"]
    code, said, run = train(tmp_path, recipe, "1:3", *words, test=3)
    assert code == 0, said
    (lost,) = events(run, "device_lost")
    assert lost["step"] == 6
    assert [w["ranks"] for w in run.results()["worlds"]] == [3, 2]
    assert run.results()["worlds"][1]["step"] == 4  # nothing was saved of step 6
    assert "the rest go on from the last checkpoint" in said
    assert_as_alone(run, undisturbed)


@pytest.mark.full
def test_with_too_few_devices_left_the_run_ends_with_the_error_of_the_one_that_failed(
    recipe, tmp_path
):
    code, said, run = train(tmp_path, recipe, "3:3", test=1)
    assert code == 1
    assert "rank 1: " in run.info()["failure"]["what"]
    assert "test its memory and processor" in said
    assert run.state() == "failed"
