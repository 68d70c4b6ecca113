"""What the planner predicts against what a GPU needs: peak memory and step time.

    python benchmarks/planner.py measure FILE [CASE …]      # on the GPU: runs each case, adds to FILE
    python benchmarks/planner.py compare FILE               # anywhere: predicts each case of FILE

A case is a recipe and some overrides, trained as `muster train` would for a few steps. `calibration`
cases set the constants of muster.planner; the others only judge them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.recipe.load import load
from muster.recipe.schema import Recipe

WARM_UP, STEPS = 4, 8
QUIET = (
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "checkpoint.every_steps=null",
    "checkpoint.final=false",
    "logging.to=[]",
    "data.cache_gib=0.5",
)


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    overrides: tuple[str, ...]
    calibration: bool = False

    def load(self) -> Recipe:
        return load(self.recipe, [*self.overrides, *QUIET, "training.steps=1000"])


def lm(
    name: str, preset: str, batch: int, *more: str, length: int = 1024, fit: bool = False
) -> Case:
    recipe = "llama-1b" if preset.startswith("llama") else "gpt2"
    size = (f"model.preset={preset}", f"training.global_batch_size={batch}")
    return Case(name, recipe, (*size, f"data.sequence_length={length}", *more), fit)


def speech(name: str, recipe: str, preset: str, batch: int, *more: str, fit: bool = False) -> Case:
    size = (f"model.preset={preset}", f"training.global_batch_size={batch}")
    return Case(name, recipe, (*size, *more), fit)


EAGER, COMPILED = "training.compile=false", "training.compile=true"
AGAIN = "training.activation_checkpointing=full"
SELECTIVE = "training.activation_checkpointing=selective"
WINDOW = "data.window=30"
LORA = ("model.lora.rank=8",)
LAUNCHED = "training.cuda_graphs=false"
OFFLOAD = ("distributed.strategy=zero2", "distributed.deepspeed.offload_optimizer=cpu")

CASES = [
    lm("gpt2 8", "gpt2", 8, EAGER),
    lm("gpt2 32", "gpt2", 32, EAGER, fit=True),
    lm("gpt2 32 compiled", "gpt2", 32, COMPILED, fit=True),
    lm("gpt2 64 compiled", "gpt2", 64, COMPILED),
    lm("gpt2 32 checkpointed", "gpt2", 32, EAGER, AGAIN),
    lm("gpt2 8 fp32", "gpt2", 8, EAGER, "training.precision=fp32"),
    lm("gpt2-medium 16 compiled", "gpt2-medium", 16, COMPILED),
    lm("gpt2-large 16 checkpointed, compiled", "gpt2-large", 16, COMPILED, AGAIN),
    lm("gpt2-xl 8", "gpt2-xl", 8, EAGER),
    lm("llama-1b 4", "llama-1b", 4, EAGER, length=2048, fit=True),
    lm("llama-1b 8 compiled", "llama-1b", 8, COMPILED, length=2048, fit=True),
    lm("llama-1b 16 selective", "llama-1b", 16, EAGER, SELECTIVE, length=2048),
    lm("llama-3b 4", "llama-3b", 4, EAGER, length=2048),
    lm("llama-3b 8 checkpointed", "llama-3b", 8, EAGER, AGAIN, length=2048),
    lm("llama-3b 8 compiled", "llama-3b", 8, COMPILED, length=2048),
    lm("llama-7b 4 LoRA", "llama-7b", 4, EAGER, *LORA, length=2048),
    lm("llama-7b 8 LoRA checkpointed", "llama-7b", 8, EAGER, AGAIN, *LORA, length=2048),
    speech("whisper-small 16", "whisper-micro", "whisper-small", 16, WINDOW, EAGER),
    speech("whisper-small 64", "whisper-micro", "whisper-small", 64, WINDOW, EAGER, fit=True),
    speech("whisper-small 64 compiled", "whisper-micro", "whisper-small", 64, WINDOW, COMPILED),
    speech("whisper-medium 32", "whisper-micro", "whisper-medium", 32, WINDOW, EAGER),
    speech(
        "whisper-medium 64 checkpointed",
        "whisper-micro",
        "whisper-medium",
        64,
        WINDOW,
        EAGER,
        AGAIN,
    ),
    speech("lmu-7m 64", "speech-7m", "lmu-7m", 64, fit=True),
    speech("lmu-7m 256", "speech-7m", "lmu-7m", 256),
    speech("lmu-guide 64", "speech-guide", "lmu-guide", 64),
    # The GPU waits for the host: these set what the host takes.
    lm("gpt2 4 x 256", "gpt2", 4, EAGER, LAUNCHED, length=256, fit=True),
    lm("gpt2 4 x 256 selective", "gpt2", 4, EAGER, SELECTIVE, length=256, fit=True),
    lm("gpt2 4 x 256 compiled", "gpt2", 4, COMPILED, LAUNCHED, length=256, fit=True),
    lm("gpt2 4 x 256 checkpointed, compiled", "gpt2", 4, COMPILED, AGAIN, length=256, fit=True),
    lm("llama-1b 1 x 256 compiled", "llama-1b", 1, COMPILED, LAUNCHED, length=256, fit=True),
    speech("whisper-base 4", "whisper-micro", "whisper-base", 4, WINDOW, EAGER, LAUNCHED, fit=True),
    # What follows was fixed before it was measured, and sets no constant.
    lm("gpt2-medium 12 x 768 selective", "gpt2-medium", 12, EAGER, SELECTIVE, length=768),
    lm(
        "gpt2-medium 12 x 768 selective, compiled",
        "gpt2-medium",
        12,
        COMPILED,
        SELECTIVE,
        length=768,
    ),
    lm("gpt2-large 6 checkpointed, compiled", "gpt2-large", 6, COMPILED, AGAIN),
    lm("llama-1b 6 x 1536 LoRA", "llama-1b", 6, EAGER, *LORA, length=1536),
    lm("llama-3b 2 checkpointed", "llama-3b", 2, EAGER, AGAIN, length=2048),
    lm(
        "gpt2 2 x 10 x 512 fp32",
        "gpt2",
        20,
        EAGER,
        "training.precision=fp32",
        "training.per_device_batch_size=10",
        length=512,
    ),
    speech("whisper-medium 12", "whisper-micro", "whisper-medium", 12, WINDOW, EAGER),
    speech("whisper-base 40 compiled", "whisper-micro", "whisper-base", 40, WINDOW, COMPILED),
    lm("llama-1b 8 offload", "llama-1b", 8, EAGER, *OFFLOAD, length=2048),  # DeepSpeed stays: last
]


def measure(case: Case, profile: bool) -> dict[str, Any]:
    """Peak memory since the start and the median step, after the first few."""
    import torch

    from muster import run_directory
    from muster.launch.cluster import RankInfo
    from muster.observe.results import read_lines
    from muster.training import loop
    from muster.training.loop import train
    from muster.worker.main import connect_ranks
    from muster.worker.prepare import prepare

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    recipe = case.load()
    with tempfile.TemporaryDirectory() as folder:
        new = run_directory.create(Path(folder), "case", {})
        mesh, run, recipe = connect_ranks(recipe, RankInfo(), new)
        job = prepare(recipe, mesh, run)
        job.steps = WARM_UP + STEPS
        train(job)
        lines = read_lines(run.path / "metrics.jsonl")
        times = [line["step_time_s"] for line in lines if line["step"] > WARM_UP + 1]
        found: dict[str, Any] = {"choices": {k: str(v) for k, v in job.choices.items()}}
        found["launch_s"] = launch_seconds(job)
        if profile:
            batches = job.loader.steps(0, 1)
            found["kernels"] = profiled(lambda: loop._launch(job, 0, batches, None))
            batches.close()
        job.observer.close()
        torch.distributed.destroy_process_group()
    if torch.cuda.is_available():
        found |= {
            "device": torch.cuda.get_device_name(),
            "allocated": torch.cuda.max_memory_allocated() - before,  # earlier cases leave some
            "reserved": torch.cuda.max_memory_reserved(),
            "total": torch.cuda.mem_get_info()[1],
            "outside": torch.cuda.mem_get_info()[1]
            - torch.cuda.mem_get_info()[0]
            - torch.cuda.memory_reserved(),
        }
    return found | {
        "step_s": statistics.median(times),
        "steps_s": times,
        "torch": torch.__version__,
    }


def launch_seconds(job: Any) -> float:
    """Until the host has launched a step to an idle device."""
    import torch

    from muster.training import loop

    batches, times = job.loader.steps(0, 3), []
    for step in range(3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loop._launch(job, step, batches, None)
        times.append(time.perf_counter() - begin)
    batches.close()
    return statistics.median(times)


def profiled(work: Any) -> dict[str, Any]:
    """Kernels of one step: how many, how long together, and the dearest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        work()
    kernels: dict[str, list[float]] = {}
    ops = 0
    for event in found.events():
        if event.device_type.name == "CUDA" and not event.name.startswith("Optimizer."):
            kernels.setdefault(event.name, []).append(event.device_time)
        elif event.name.startswith("aten::"):
            ops += 1
    total = {name: (len(t), sum(t)) for name, t in kernels.items()}
    return {
        "count": sum(n for n, _ in total.values()),
        "busy_us": sum(t for _, t in total.values()),
        "aten": ops,
        "top": sorted(([n[:110], c, t] for n, (c, t) in total.items()), key=lambda x: -x[2])[:40],
    }


def predict(case: Case, launch_us: float) -> dict[str, float]:
    """Bytes that torch will allocate, and seconds of a step."""
    from muster.hardware import catalogue
    from muster.parallel.layout import layout_for
    from muster.planner.memory import Choice
    from muster.planner.planner import Planner
    from muster.planner.subject import Subject
    from muster.planner.time import Cluster
    from muster.recipe.batch import solve
    from muster.tasks import build_task

    recipe = case.load()
    task = build_task(recipe)
    source = None if recipe.task == "causal-lm" else task.source("train")
    device = replace(catalogue.find("h200"), measured={"launch_us": launch_us})
    precision = "fp32" if recipe.training.precision == "fp32" else "bf16"
    planner = Planner(Subject(recipe, task, source), Cluster(device, 1, 1), precision)
    layout = layout_for(recipe.distributed, 1)
    sizes = solve(recipe.training, 1)
    plan = planner.evaluate(
        Choice(
            layout,
            precision,
            rows=sizes.per_device,
            accumulation=sizes.accumulation,
            checkpointing=recipe.training.activation_checkpointing,
            compiled=recipe.training.compile,
            offload=planner.offload(layout),
        )
    )
    return {"allocated": plan.memory.allocated, "step_s": plan.duration.total}


def compare(path: Path) -> None:
    """A line per case, and the errors of those that set no constant."""
    document = json.loads(path.read_text())
    launch_us = document.get("launch_us", 8.0)
    print(
        "| case | | GiB predicted | measured | error | s a step predicted | measured | error "
        "| s to launch it |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    errors: dict[str, list[tuple[float, str]]] = {"memory": [], "time": []}
    for case in CASES:
        seen = document.get(case.name)
        if seen is None or "error" in seen:
            continue
        told = predict(case, launch_us)
        memory = told["allocated"] / seen["allocated"] - 1
        step = told["step_s"] / seen["step_s"] - 1
        print(
            f"| {case.name} | {'calibration' if case.calibration else ''} "
            f"| {told['allocated'] / 2**30:.2f} | {seen['allocated'] / 2**30:.2f} | {100 * memory:+.1f} % "
            f"| {told['step_s']:.4f} | {seen['step_s']:.4f} | {100 * step:+.1f} % "
            f"| {seen['launch_s']:.4f} |",
            flush=True,
        )
        if not case.calibration:
            errors["memory"].append((abs(memory), case.name))
            errors["time"].append((abs(step), case.name))
    for what, found in errors.items():
        worst, name = max(found)
        mean = statistics.mean(error for error, _ in found)
        print(
            f"{what}: mean {100 * mean:.1f} %, worst {100 * worst:.1f} % ({name}), of {len(found)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.verb == "compare":
        return compare(args.file)
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        begin = time.perf_counter()
        try:
            found = measure(case, args.profile)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        found["took_s"] = time.perf_counter() - begin
        done = json.loads(args.file.read_text()) if args.file.exists() else {}
        done[case.name] = found
        args.file.write_text(json.dumps(done, indent=1))
        print(
            case.name,
            {k: v for k, v in found.items() if k not in ("kernels", "steps_s")},
            flush=True,
        )


if __name__ == "__main__":
    main()
