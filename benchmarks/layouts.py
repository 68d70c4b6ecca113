"""Memory per rank under every kind of layout, against the plan: measured ÷ planned.

    python benchmarks/layouts.py [CASE …]

Needs one NVIDIA GPU: several ranks share it in a rehearsal, and each allocates what it would on a GPU
of its own. Every case is a `muster train` of a few steps in processes of its own. Prints a Markdown
table, a row as each case ends; the reason for a case that failed goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LONG = ("model.preset=gpt2", "data.sequence_length=512", "training.global_batch_size=16")
WIDE = ("model.preset=llama-1b", "data.sequence_length=512", "training.global_batch_size=8")
SPEECH = ("model.preset=whisper-small", "data.window=30", "training.global_batch_size=16")
QUIET = (
    "training.steps=4",
    "training.compile=false",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "checkpoint.every_steps=null",
    "checkpoint.final=false",
    "logging.to=[]",
)


def strategy(name: str, *more: str) -> tuple[str, ...]:
    return (f"distributed.strategy={name}", *more)


ACCUMULATED = ("training.per_device_batch_size=2", "training.gradient_accumulation_steps=auto")
HYBRID = ("distributed.tensor=2", "distributed.shard=2")
FP32, AGAIN = "training.precision=fp32", "training.activation_checkpointing=full"

# name → (recipe, ranks, overrides)
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "gpt2, ddp on 2": ("gpt2", 2, (*LONG, *strategy("ddp"))),
    "gpt2, ddp on 4, accumulated": ("gpt2", 4, (*LONG, *ACCUMULATED, *strategy("ddp"))),
    "gpt2, fsdp on 2, fp32": ("gpt2", 2, (*LONG, FP32, *strategy("fsdp"))),
    "gpt2, fsdp on 4": ("gpt2", 4, (*LONG, *strategy("fsdp"))),
    "gpt2, zero1 on 2": ("gpt2", 2, (*LONG, *strategy("zero1"))),
    "gpt2, zero2 on 2, fp32": ("gpt2", 2, (*LONG, FP32, *strategy("zero2"))),
    "gpt2, zero3 on 2": ("gpt2", 2, (*LONG, *strategy("zero3"))),
    "llama-1b, zero2 on 2, accumulated": (
        "llama-1b",
        2,
        (*WIDE, *ACCUMULATED, *strategy("zero2")),
    ),
    "gpt2, tensor on 2": ("gpt2", 2, (*LONG, *strategy("tensor"))),
    "gpt2, pipeline on 2": ("gpt2", 2, (*LONG, *strategy("pipeline"))),
    "llama-1b, fsdp on 4": ("llama-1b", 4, (*WIDE, *strategy("fsdp"))),
    "llama-1b, fsdp on 2, checkpointed": ("llama-1b", 2, (*WIDE, AGAIN, *strategy("fsdp"))),
    "llama-1b, hsdp on 4": ("llama-1b", 4, (*WIDE, *strategy("hsdp", "distributed.replicate=2"))),
    "llama-1b, tensor on 4": ("llama-1b", 4, (*WIDE, *strategy("tensor"))),
    "llama-1b, pipeline on 4": ("llama-1b", 4, (*WIDE, *strategy("pipeline"))),
    "llama-1b, tensor 2 × fsdp 2": ("llama-1b", 4, (*WIDE, *strategy("hybrid", *HYBRID))),
    "whisper-small, fsdp on 2": ("whisper-micro", 2, (*SPEECH, *strategy("fsdp"))),
    "whisper-small, tensor on 2": ("whisper-micro", 2, (*SPEECH, *strategy("tensor"))),
}


def measure(name: str, folder: Path) -> tuple[float, float]:
    """GiB of the rank that needs most: measured and planned."""
    recipe, ranks, overrides = CASES[name]
    run = "".join(letter if letter.isalnum() else "-" for letter in name)
    words = [*overrides, *QUIET, f"--rehearse={ranks}", f"--run={run}"]
    command = [sys.executable, "-m", "muster", "train", recipe, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-600:])
    results = json.loads((folder / "runs" / run / "training_results.json").read_text())
    return results["measured"]["memory_gib"], results["planned"]["memory_gib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {'; '.join(CASES)}")
    cases = parser.parse_args().cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    print("| model, layout | GiB planned | measured | measured ÷ planned |")
    print("|---|---:|---:|---:|")
    for name in cases:
        try:
            with tempfile.TemporaryDirectory() as folder:
                measured, planned = measure(name, Path(folder))
        except (RuntimeError, subprocess.TimeoutExpired, OSError, KeyError) as error:
            print(f"| {name} | failed | | |", flush=True)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        row = f"| {name} | {planned:.2f} | {measured:.2f} | {measured / planned:.3f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
