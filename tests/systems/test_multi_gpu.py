"""The commands of systems/multi-gpu/README.md, on CPU ranks and cut short."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muster.entrypoints import script as scripts
from muster.errors import RecipeError
from muster.observe.results import read_lines
from muster.recipe.batch import solve
from muster.recipe.load import load
from processes import PROGRAMS, free_port, run

SYSTEM = Path(__file__).parents[2] / "systems" / "multi-gpu"
RECIPE = str(SYSTEM / "recipe.yaml")
STEPS = 4
SHORT = [f"training.steps={STEPS}", "training.warmup_steps=2", "data.sequence_length=32"]
SHORT += ["training.per_device_batch_size=16", "training.precision=fp32"]
FSDP = "torchrun --nproc_per_node=2 run_fsdp_standalone.py"
HF = "torchrun --nproc_per_node=2 run_hf_standalone.py"
HF_ALONE = "python3 run_hf_standalone.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of a few hundred sequences, and room for the runs."""
    folder = tmp_path_factory.mktemp("multi-gpu")
    words = Path(json.__file__).read_text() + Path(socket.__file__).read_text()
    (folder / "train.txt").write_text(words)
    (folder / "held-out.txt").write_text(Path(logging.__file__).read_text()[:5000])
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """`trained(command)`: the run directory that a command of the README leaves, made once."""
    made: dict[str, Path] = {}

    def train(command: str) -> Path:
        if command not in made:
            printed = command.replace("=2", "=$NUM_GPUS")
            assert printed in (SYSTEM / "README.md").read_text()
            logs = folder / str(len(made))
            done = start(
                *command.split(),
                *SHORT,
                f"data.train={folder / 'train.txt'}",
                f"data.validation={folder / 'held-out.txt'}",
                f"logging.dir={logs}",
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"finished: {STEPS} steps" in done.stdout
            made[command] = (logs / "latest").resolve()
        return made[command]

    return train


def start(*command: str, path: Path | None = None, **variables: str):
    """Run from the system's folder, programs of this Python's environment first."""
    env = {"PET_MASTER_PORT": str(free_port()), **variables}
    if path:
        env["PATH"] = f"{path}:{PROGRAMS}"
    return run(command, SYSTEM, code=None, env=env)


def results(run: Path):
    return json.loads((run / "training_results.json").read_text())


def column(run: Path, name: str):
    return [line[name] for line in read_lines(run / "metrics.jsonl")]


@pytest.mark.guides
@pytest.mark.parametrize(
    ("command", "ranks", "strategy"),
    [
        (FSDP, 2, "fsdp"),
        pytest.param(HF, 2, "hf-ddp", marks=pytest.mark.guides),
        pytest.param(HF_ALONE, 1, "hf-ddp", marks=pytest.mark.full),
    ],
)
def test_each_command_trains_and_leaves_the_same_results(trained, command, ranks, strategy):
    found = results(trained(command))
    assert set(found) == set(results(trained(FSDP)))
    assert (found["status"], found["steps"]) == ("finished", STEPS)
    assert (found["world_size"], len(found["devices"])) == (ranks, ranks)
    assert (found["strategy"], found["global_batch_size"]) == (strategy, 64)
    assert found["planned"]["gradient_accumulation_steps"] == 4 // ranks
    assert found["throughput"]["tokens_per_s"] > 0
    assert Path(found["checkpoint"]).is_dir()


@pytest.mark.both
@pytest.mark.guides
@pytest.mark.parametrize("command", [HF, HF_ALONE])
def test_the_trainer_walks_the_same_path_as_musters_loop(trained, command):
    """Same weights, samples and learning rates: float32 sums in another order are all that differs."""
    theirs, ours = trained(command), trained(FSDP)
    assert column(theirs, "lr") == pytest.approx(column(ours, "lr"), rel=1e-9)
    assert column(theirs, "loss") == pytest.approx(column(ours, "loss"), rel=1e-5)
    assert column(theirs, "grad_norm") == pytest.approx(column(ours, "grad_norm"), rel=1e-4)
    assert column(theirs, "epoch") == column(ours, "epoch")
    assert set(read_lines(theirs / "metrics.jsonl")[0]) == set(
        read_lines(ours / "metrics.jsonl")[0]
    )


@pytest.mark.guides
def test_the_perplexity_is_that_of_the_saved_folder(trained, folder):
    """Against transformers' own model over the raw bytes."""
    from transformers import AutoModelForCausalLM

    found = results(trained(HF))
    model = AutoModelForCausalLM.from_pretrained(found["checkpoint"])
    stream = torch.tensor([256, *(folder / "held-out.txt").read_bytes(), 256])
    nll = 0.0
    for begin in range(0, len(stream) - 1, 32):
        piece = stream[begin : begin + 33]
        with torch.no_grad():
            spread = model(piece[None, :-1]).logits[0].double().log_softmax(-1)
        nll -= float(spread.gather(1, piece[1:, None]).sum())
    expected = math.exp(nll / (len(stream) - 1))
    assert found["scored"] == "validation"
    assert found["scores"]["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_accumulation_is_the_guides_arithmetic():
    training = load(RECIPE, ["training.per_device_batch_size=1"]).training
    assert solve(training, 8).accumulation == 8
    assert solve(load(RECIPE).training, 8).accumulation == 1


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.global_batch_size=63", "training.global_batch_size"),
        ("distributed.strategy=fsdp", "distributed.strategy"),
        ("model.lora={rank: 4}", "model.lora"),
        ("data.isolate_documents=true", "data.isolate_documents"),
        ("training.activation_checkpointing=selective", "training.activation_checkpointing"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused_by_its_key(override, key):
    from muster.entrypoints.hf_trainer import _sizes

    with pytest.raises(RecipeError, match=f"^{key}: Hugging Face's Trainer"):
        _sizes(load(RECIPE, [override]), 2)
    assert _sizes(load(RECIPE), 2).accumulation == 4


@pytest.fixture
def several_gpus(monkeypatch):
    """What transformers and accelerate ask torch about GPUs, for a machine with eight."""
    for name, answer in {
        "is_available": True,
        "device_count": 8,
        "get_device_name": "NVIDIA H100",
        "set_device": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def trainer_arguments(folder: Path, device: str):
    from muster.entrypoints import hf_trainer

    training = load(RECIPE, ["training.per_device_batch_size=16"]).training
    sizes = solve(training, 1)
    return hf_trainer.trainer_arguments(training, sizes, 1, "fp32", folder, torch.device(device))


def test_the_trainer_in_one_process_uses_one_gpu_of_several(tmp_path, several_gpus):
    """It would wrap the model in nn.DataParallel, with eight times the batch."""
    found = trainer_arguments(tmp_path, "cuda:0")
    assert (found.n_gpu, found.train_batch_size, found.device) == (1, 16, torch.device("cuda:0"))


def test_the_trainer_uses_the_gpu_its_rank_is_bound_to(tmp_path, several_gpus, monkeypatch):
    """Local rank 3, but GPU 1: two ranks share a GPU, or a mask leaves each rank its own."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        found = trainer_arguments(tmp_path, "cuda:1")
    finally:
        dist.destroy_process_group()
    assert (found.device, found.local_process_index) == (torch.device("cuda:1"), 1)


@pytest.fixture
def log_handlers():
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before
    logging.captureWarnings(False)


@pytest.mark.parametrize("gpus", [1, 8])
def test_plain_python_says_at_once_that_other_gpus_idle(
    tmp_path, monkeypatch, capsys, log_handlers, gpus
):
    said: list[str] = []

    def life(recipe, rank_info, run):
        said.append(capsys.readouterr().err)
        return {}

    monkeypatch.setattr(scripts, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["run_hf_standalone.py", "name=my run"])
    scripts.train_here(RECIPE, [f"logging.dir={tmp_path}"], life)
    wanted = "only GPU 0 of 8 is in use, 7 others are idle; to use all of them: torchrun "
    wanted += "--nproc_per_node=8 run_hf_standalone.py 'name=my run'"
    assert (wanted in said[0]) == (gpus == 8)
    assert ("idle" in said[0]) == (gpus == 8)


@pytest.fixture
def pretend(tmp_path):
    """Programs for PATH: a torchrun that shows what it was given, a python that counts GPUs."""

    def make(nvidia: int, amd: int) -> Path:
        shown = 'echo "$@"; env | grep -E "^(PYTHON|PYTORCH|HSA|OMP)"'
        for name, text in (("torchrun", shown), ("python", f"echo {nvidia} {amd}")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("script", "counts", "vendor"),
    [("run_nvidia_all.sh", (4, 0), "NVIDIA"), ("run_amd_all.sh", (0, 4), "AMD")],
)
def test_launchers_start_one_rank_per_gpu_with_the_guides_variables(
    pretend, script, counts, vendor
):
    done = start(
        "bash", script, "hf", "--recipe", "gpt2", path=pretend(*counts), PYTHONHASHSEED="7"
    )
    assert f"training on 4 {vendor} GPU(s)" in done.stderr
    command, *variables = done.stdout.splitlines()
    wanted = f"--standalone --nproc_per_node=4 {SYSTEM}/run_hf_standalone.py --recipe gpt2"
    assert command == wanted
    assert {"PYTHONUNBUFFERED=1", "PYTHONHASHSEED=7"} <= set(variables)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in variables
    hsa = {"HSA_NO_SCRATCH_RECLAIM=1", "HSA_ENABLE_SDMA=1", "HSA_FORCE_FINE_GRAIN_PCIE=1"}
    assert {v for v in variables if v.startswith("HSA")} == (hsa if vendor == "AMD" else set())


def test_launchers_leave_alone_what_the_user_set(pretend):
    newer = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "NUM_GPUS": "3"}
    done = start("bash", "run_nvidia_all.sh", path=pretend(4, 0), **newer)
    assert f"--nproc_per_node=3 {SYSTEM}/run_fsdp_standalone.py" in done.stdout
    assert "PYTORCH_CUDA_ALLOC_CONF" not in done.stdout


def test_a_launcher_sends_the_owner_of_other_gpus_to_the_other_launcher(pretend):
    done = start("bash", "run_amd_all.sh", path=pretend(2, 0))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no AMD GPU here, but 2 of the other make: bash run_nvidia_all.sh" in done.stderr


def test_the_amd_launcher_without_any_gpu_takes_cpu_ranks(pretend):
    done = start("bash", "run_amd_all.sh", path=pretend(0, 0))
    ranks = min(2, len(os.sched_getaffinity(0)))
    assert f"no AMD GPU here: training on {ranks} CPU rank(s)" in done.stderr
    assert f"--nproc_per_node={ranks} {SYSTEM}/run_fsdp_standalone.py" in done.stdout
