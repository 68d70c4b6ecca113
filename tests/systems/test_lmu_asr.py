"""The commands of systems/lmu-asr/README.md, as printed, on CPU ranks and cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import run

SYSTEM = Path(__file__).parents[2] / "systems" / "lmu-asr"
SHORT = ["training.steps=3", "training.warmup_steps=1", "data.max_parquet_files=1"]
SHORT += ["evaluation.every_steps=null", "evaluation.final=false"]


@pytest.mark.parametrize(
    ("command", "ranks", "batch"),
    [
        pytest.param("python scripts/train.py", 1, 16, marks=pytest.mark.guides),
        pytest.param(
            "torchrun --nproc_per_node=2 scripts/train_torchrun.py", 2, 32, marks=pytest.mark.guides
        ),
        pytest.param(
            "python scripts/train_distributed.py distributed.devices=2",
            2,
            32,
            marks=pytest.mark.full,  # --guides runs the command itself
        ),
    ],
)
def test_the_commands_of_the_guide_train(tmp_path, command, ranks, batch):
    words = [*command.split(), *SHORT, f"logging.dir={tmp_path}"]
    spawns = "train_distributed" in command  # torch.multiprocessing starts interpreters of its own
    done = run(words, SYSTEM, real=spawns)
    assert "finished: 3 steps" in done.stdout
    results = json.loads((tmp_path / "latest" / "training_results.json").read_text())
    assert (results["world_size"], results["global_batch_size"]) == (ranks, batch)
    assert (tmp_path / "latest" / "checkpoints" / "step-3" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("gpus", "overrides", "ranks"),
    [(0, [], 4), (0, ["distributed.devices=6"], 6), (8, [], 8)],
    ids=["CPU cores", "as asked", "GPUs"],
)
def test_spawned_ranks_are_the_gpus_or_a_few_on_cpus(monkeypatch, gpus, overrides, ranks):
    """On 64 cores a rank per core would be 64 processes."""
    from muster.entrypoints import script
    from muster.hardware.inventory import Gpu, Inventory

    cards = tuple(Gpu(i, "GPU", 80.0, f"GPU-{i}") for i in range(gpus))
    started = []
    monkeypatch.setattr(script.inventory, "detect", lambda: Inventory(cards, 64, 512.0, "host"))
    monkeypatch.setattr(script, "spawn", lambda function, arguments, count: started.append(count))
    script.train_spawned(str(SYSTEM / "configs" / "multi_gpu.yaml"), overrides)
    assert started == [ranks]


def test_the_learning_rate_follows_the_batch_as_the_guide_says():
    from muster.recipe.batch import settle, solve
    from muster.recipe.load import load
    from muster.training.optimizer import peak_lr

    config = str(SYSTEM / "configs" / "multi_gpu.yaml")
    assert peak_lr(load(config).training) == 2e-3
    words = "training.batch_size=16 training.lr=1e-3 training.scale_with_ranks=batch_and_lr"
    assert words in (SYSTEM / "README.md").read_text()
    grows = load(config, words.split())
    for ranks in (1, 2, 4, 8):
        first = settle(grows, ranks).training
        assert (first.global_batch_size, solve(first, ranks).per_device) == (16 * ranks, 16)
        assert peak_lr(first) == pytest.approx(1e-3 * ranks)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("python test_distributed_setup.py", 2),
        ("torchrun --nproc_per_node=1 test_distributed_setup.py", 1),
    ],
)
@pytest.mark.full
def test_the_set_up_is_tested_as_the_guide_prints_it(command, ranks):
    done = run(command.split(), SYSTEM, code=None, env={"CUDA_VISIBLE_DEVICES": ""})
    assert f"Rank: {ranks - 1}/{ranks}, " in done.stdout, done.stdout + done.stderr
    *_, verdict = done.stdout.splitlines()
    slow = verdict == "not fit to train on: balance"  # a test beside this one may hold a rank up
    assert slow or verdict.startswith("fit to train on")
    assert done.returncode == int(slow)
