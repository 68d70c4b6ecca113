"""Tokens per second of muster's loop beside Hugging Face's Trainer.

    python benchmarks/trainer.py --preset gpt2 --batch 32 --length 1024 --steps 30 --compile
    python benchmarks/trainer.py --preset llama-1b --batch 8 --length 2048

Same weights, same random tokens in the same steps, bf16, AdamW, clipping at 1; each in a process of
its own. Steps before the first `--warmup` (compilation, allocation) are not counted; the clock is
read with the device idle. Tokens per second and memory appear only for a GPU, whose name gives them
meaning. Needs accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 0.01  # between first losses: bf16 rounds differently in the two models' kernels


class Enough(Exception):
    """The last step is timed; what a loop does after it (saving) is not wanted."""


class Clock:
    """Reads the time after step `warmup` and after the last one."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.first, self.last = warmup, warmup + steps
        self.began = self.seconds = 0.0

    def tick(self, step: int) -> None:
        if step not in (self.first, self.last):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == self.first:
            self.began = now
        else:
            self.seconds = now - self.began
            raise Enough


def make_recipe(args: argparse.Namespace, folder: Path) -> Any:
    """A recipe over random letters: bytes as tokens, but the preset's own number of rows."""
    from muster import models
    from muster.recipe.load import load

    config: Any = models.configure(args.preset)
    corpus = folder / "train.txt"
    wanted = args.batch * args.length * (args.warmup + args.steps) + 1
    letters = torch.randint(97, 123, (wanted,), generator=torch.Generator().manual_seed(0))
    corpus.write_bytes(bytes(letters.tolist()))
    text = f"""
task: causal-lm
model: {{preset: {args.preset}, vocab_size: {config.vocab}}}
data: {{train: {corpus}, sequence_length: {args.length}, workers: 4}}
training:
  steps: {args.warmup + args.steps}
  global_batch_size: {args.batch}
  gradient_accumulation_steps: {args.accumulation}
  precision: bf16
  compile: {str(args.compile).lower()}
checkpoint: {{every_steps: null}}
evaluation: {{every_steps: null}}
logging: {{dir: {folder}, to: []}}
"""
    (folder / "recipe.yaml").write_text(text)
    return load(str(folder / "recipe.yaml"), [])


def time_muster(recipe: Any, clock: Clock, folder: Path) -> float:
    """The first step's loss."""
    from muster import run_directory
    from muster.observe.results import read_lines
    from muster.parallel import mesh as meshes
    from muster.parallel.layout import Layout
    from muster.training.loop import train
    from muster.worker.prepare import prepare

    mesh = meshes.join(0, 0, Layout(), "auto", 600.0)
    run = run_directory.create(folder, "benchmark", {})
    job = prepare(recipe, mesh, run)
    observe = job.observer.step

    def step(record: Any, mesh: Any) -> None:
        observe(record, mesh)
        clock.tick(record.step)

    job.observer.step = step  # type: ignore[method-assign]
    with suppress(Enough):
        train(job)
    job.observer.close()
    meshes.leave()
    return float(read_lines(run.path / "metrics.jsonl")[0]["loss"])


def time_trainer(recipe: Any, clock: Clock, folder: Path) -> float:
    """The first step's loss."""
    from transformers import TrainerCallback

    from muster.data.batches import BatchPlan
    from muster.entrypoints import hf_trainer
    from muster.recipe.batch import solve
    from muster.tasks.causal_lm import CausalLM

    class Ticking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.tick(state.global_step)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task, steps = CausalLM(recipe), recipe.training.steps
    source = task.source("train")
    assert source is not None
    sizes = solve(recipe.training, 1)
    plan = BatchPlan(source.lengths, sizes.global_batch, recipe.seed, recipe.data.pool_batches)
    model = hf_trainer.as_transformers(task, device)
    if device.type == "cuda":  # muster's copy of the weights is gone, and shall not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = hf_trainer.PlannedTrainer(
        recipe.training,
        steps,
        model=model,
        args=hf_trainer.trainer_arguments(
            recipe.training,
            sizes,
            steps,
            "bf16",
            folder / "trainer",
            device,
            dataloader_num_workers=4,
            logging_first_step=True,
            logging_steps=10,
        ),
        train_dataset=hf_trainer.PlannedSequences(task, source, plan, steps),
        callbacks=[Ticking()],
    )
    with suppress(Enough):
        trainer.train()
    return float(trainer.state.log_history[0]["loss"])


SIDES = {"muster": time_muster, "trainer": time_trainer}


def measure(args: argparse.Namespace) -> None:
    """One side, in this process; the last line printed is what was found."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # the corpus as tokens shall not outlive this
        clock = Clock(args.warmup, args.steps)
        loss = SIDES[args.only](make_recipe(args, Path(folder)), clock, Path(folder))
    tokens = args.batch * args.length * args.steps
    gpu = torch.cuda.is_available()
    found = {
        "loss": loss,
        "tokens_per_s": tokens / clock.seconds,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
    }
    print(json.dumps(found), flush=True)


def run_side(name: str, device: str) -> dict[str, Any]:
    environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(args: argparse.Namespace) -> None:
    rounds = [{name: run_side(name, args.device) for name in SIDES} for _ in range(args.rounds)]
    best = {n: max((r[n] for r in rounds), key=lambda f: float(f["tokens_per_s"])) for n in SIDES}
    ours, theirs = best["muster"], best["trainer"]
    if abs(ours["loss"] / theirs["loss"] - 1) > TOLERANCE:
        sys.exit(f"not the same work: first losses {ours['loss']:.4f} and {theirs['loss']:.4f}")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    compiled = ", compiled" if args.compile else ""
    print(
        f"{args.preset}, {args.batch} × {args.length} tokens per step{compiled} "
        f"({where}, torch {torch.__version__}); first losses {ours['loss']:.4f}, {theirs['loss']:.4f}"
    )
    for name, found in best.items():
        ratio = found["tokens_per_s"] / theirs["tokens_per_s"]
        line = f"{name:<10}{ratio:6.2f} × Trainer's tokens/s"
        if args.device == "cuda":
            memory = found["memory_gib"] / theirs["memory_gib"]
            line += f"{found['tokens_per_s']:12,.0f} tokens/s"
            line += f"{memory:8.2f} × its memory ({found['memory_gib']:.1f} GiB)"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="gpt2", help="a language model of muster's")
    parser.add_argument("--batch", type=int, default=32, help="sequences per optimizer step")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches they come in")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=30, help="steps that count")
    parser.add_argument("--warmup", type=int, default=10, help="steps before those")
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many counts")
    parser.add_argument("--compile", action="store_true")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=list(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    measure(args) if args.only else compare(args)


if __name__ == "__main__":
    main()
