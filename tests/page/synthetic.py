"""A run directory as a run writes it, without training: any number of ranks and steps, in the real formats."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from muster.recipe.describe import to_yaml
from muster.recipe.schema import Recipe

GPU = "NVIDIA H100 80GB HBM3"
STEP_S = 0.5


def write(
    folder: Path,
    ranks: int = 4,
    steps: int = 200,
    *,
    state: str = "running",
    slow: int | None = None,
    idle: tuple[int, ...] = (),
    seed: int = 0,
    lr: float = 1e-3,
    of_steps: int | None = None,
) -> Path:
    """`slow`: a rank that computes 2.5 × as long in the last fifth of the steps. `idle`: ranks whose GPU does
    nothing."""
    random, now = np.random.default_rng(seed), time.time()
    created = now - steps * STEP_S - 20
    (folder / "ranks").mkdir(parents=True)
    recipe = Recipe.model_validate(
        {
            "name": "synthetic",
            "task": "speech-ctc",
            "model": {"preset": "lmu-7m"},
            "data": {"train": "clips/train", "validation": "clips/validation"},
            "training": {"steps": of_steps or 2 * steps, "global_batch_size": 8 * ranks, "lr": lr},
        }
    )
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    _documents(folder, ranks, recipe, created, state, now)
    compute = _compute(random, ranks, steps, slow)
    data = np.abs(random.normal(0.002, 0.001, (steps, ranks)))
    wait = (compute + data).max(1, keepdims=True) - compute - data + 0.02
    total = (compute + wait + data).mean(1)
    _metrics(folder, random, compute, data, total, now, lr, 8 * ranks)
    for rank in range(ranks):
        _rank(folder, rank, compute[:, rank], wait[:, rank], data[:, rank], rank in idle, now)
    _events(folder, ranks, steps, int(recipe.training.steps or 0), created, now)
    if state == "finished":
        _results(folder, ranks, steps)
    return folder


def _compute(random: Any, ranks: int, steps: int, slow: int | None) -> Any:
    """Seconds, [steps, ranks]."""
    found = np.abs(random.normal(0.4, 0.01, (steps, ranks)))
    if slow is not None:
        found[-max(1, steps // 5) :, slow] *= 2.5
    return found


def _documents(
    folder: Path, ranks: int, recipe: Recipe, created: float, state: str, now: float
) -> None:
    nodes = [f"node-{i}" for i in range(-(-ranks // 8))]
    info: dict[str, Any] = {
        "state": state,
        "created": created,
        "pid": 1,
        "pid_started": 1,
        "owned": now,
        "host": "node-0",
        "boot": "",
        "pids": "",
        "exit_code": None if state == "running" else 0,
        "failure": None,
        "rehearsal": False,
        "ranks": ranks,
        "nodes": nodes,
        "restarts": 0,
        "environment": [
            {
                "name": "NCCL_NVLS_ENABLE",
                "value": "1",
                "reason": "reductions in the NVSwitch",
                "set_by_user": False,
            },
            {
                "name": "OMP_NUM_THREADS",
                "value": "8",
                "reason": "8 cores for each rank",
                "set_by_user": True,
            },
        ],
    }
    if state != "running":
        info["ended"] = now
    _json(folder / "run.json", info)
    (folder / "alive").touch()
    plan = {
        "strategy": "ddp",
        "layout": {"replicate": ranks},
        "global_batch_size": 8 * ranks,
        "per_device_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "data_ranks": ranks,
        "steps": recipe.training.steps,
        "steps_per_epoch": 1000,
        "samples": 8000 * ranks,
        "parameters": 7_000_000,
        "precision": "bf16",
        "ranks_per_gpu": 1,
        "choices": {"compile": {"used": True, "reason": "a GPU", "optional": True}},
        "memory_gib": 21.5,
        "step_time_s": 0.41,
    }
    _json(folder / "plan.json", plan)
    environment = {
        "muster": "0.1.0",
        "python": "3.12.3",
        "torch": "2.13.0",
        "cuda": "13.0",
        "devices": [f"{GPU} (cuda:{rank % 8})" for rank in range(ranks)],
        "threads_per_rank": 8,
        "variables": {"NCCL_NVLS_ENABLE": "1", "OMP_NUM_THREADS": "8"},
    }
    _json(folder / "environment.json", environment)
    split = {"files": 6, "samples": 8000 * ranks, "hours": 96.4, "left_out": {"too long": 12}}
    data = {
        "splits": {"train": split, "validation": {**split, "samples": 400, "left_out": {}}},
        "files_not_read": 0,
        "not_read": [],
        "notes": [],
        "overlap": {},
        "unseen": {},
    }
    _json(folder / "data.json", data)


def _metrics(
    folder: Path,
    random: Any,
    compute: Any,
    data: Any,
    total: Any,
    now: float,
    lr: float,
    batch: int,
) -> None:
    steps = len(compute)
    loss = 0.5 + 5 * np.exp(-np.arange(steps) / (steps / 4)) + random.normal(0, 0.03, steps)
    norm = np.abs(random.normal(1.0, 0.2, steps))
    norm[steps // 2] = 40.0
    times = now - np.cumsum(total[::-1])[::-1] + total
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(steps):
            line = {
                "step": i + 1,
                "epoch": i // 1000,
                "loss": float(loss[i]),
                "grad_norm": float(norm[i]),
                "lr": lr * min(1.0, (i + 1) / max(1, steps // 20)),
                "samples": batch,
                "samples_per_s": batch / float(total[i]),
                "step_time_s": float(total[i]),
                "data_wait_s": float(data[i, 0]),
                "memory_gib": 19.75,
                "audio_s_per_s": 4 * batch / float(total[i]),
                "time": float(times[i]),
            }
            file.write(json.dumps(line) + "\n")


def _rank(
    folder: Path, rank: int, compute: Any, wait: Any, data: Any, idle: bool, now: float
) -> None:
    with (folder / "ranks" / f"{rank}.jsonl").open("w") as file:
        for i in range(len(compute)):
            times = {
                "compute_s": float(compute[i]),
                "comm_wait_s": float(wait[i]),
                "data_wait_s": float(data[i]),
                "step_time_s": float(compute[i] + wait[i] + data[i]),
            }
            file.write(json.dumps({"step": i + 1, **times, "memory_gib": 19.75}) + "\n")
    heartbeat = {
        "rank": rank,
        "host": f"node-{rank // 8}",
        "pid": 100 + rank,
        "step": len(compute),
        "phase": "waiting for the device",
        "since": now,
        "time": now,
        "device": {
            "name": GPU,
            "index": rank % 8,
            "utilisation": 0.0 if idle else 0.97,
            "memory_gib": 1.2 if idle else 24.5,
            "memory_total_gib": 79.6,
            "power_w": 71.0 if idle else 640.0,
            "temperature_c": 31.0 if idle else 62.0,
        },
    }
    _json(folder / "ranks" / f"{rank}.heartbeat.json", heartbeat)


def _events(folder: Path, ranks: int, steps: int, goal: int, created: float, now: float) -> None:
    begin = created + 20
    events: list[dict[str, Any]] = [
        {"time": begin, "event": "started", "step": 0, "steps": goal, "world": ranks}
    ]
    every = max(1, steps // 5)
    for step in range(every, steps, every):
        wer = 0.1 + 0.8 * float(np.exp(-3 * step / steps))
        when = begin + step * (now - begin) / steps
        scores = {"wer": wer, "cer": wer / 3, "words": 5000}
        choice = {"best": True, "metric": "wer", "better": "min"}
        events += [
            {
                "time": when,
                "event": "evaluation",
                "step": step,
                "split": "validation",
                "scores": scores,
                **choice,
            },
            {"time": when + 0.1, "event": "checkpoint", "step": step, "stall_s": 0.04},
        ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def _results(folder: Path, ranks: int, steps: int) -> None:
    results = {
        "status": "finished",
        "total_time_s": steps * STEP_S,
        "world_size": ranks,
        "devices": [GPU] * ranks,
        "strategy": "ddp",
        "global_batch_size": 8 * ranks,
        "steps": steps,
        "throughput": {"samples_per_s": 16.0 * ranks, "audio_s_per_s": 64.0 * ranks},
        "measured": {"step_time_s": 0.43, "median_step_time_s": 0.43, "memory_gib": 19.75},
        "balance": {
            "slowest_over_mean": 1.02,
            "padding_share": 0.05,
            "data_wait_share": 0.01,
            "comm_wait_share": 0.06,
        },
        "planned": {},
        "scored": "validation",
        "scores": {"wer": 0.14, "cer": 0.05, "words": 5000},
        "worst": [
            {
                "id": 17,
                "reference": "five past ten in the morning",
                "hypothesis": "nine past ten the the morning",
                "edits": 2,
            },
            {"id": 40, "reference": "one", "hypothesis": "", "edits": 1},
        ],
        "answers": [],
        "best": None,
        "checkpoint": None,
    }
    _json(folder / "training_results.json", results)


def _json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
