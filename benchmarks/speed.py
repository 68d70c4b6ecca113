"""Training speed on this GPU: muster with its defaults beside its peers, both sides in one run.

    python benchmarks/speed.py                    # every row; --write FILE keeps the table
    python benchmarks/speed.py gpt2 llama-1b      # some of them

Every side is a process of its own. muster's is one rank in its own training loop, with nothing set that
concerns speed unless the row says so; for Whisper the data workers are as many as the peers'. The peers
are the scripts in benchmarks/peers: Hugging Face's Trainer with bf16, fused AdamW and torch.compile, and a
bare compiled loop without any framework. The first steps (compilation, allocation) are not counted. Needs an
NVIDIA GPU, transformers and accelerate.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
RATE = 16000
CLIPS = 1280
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz ")
QUIET = (
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "checkpoint.every_steps=null",
    "checkpoint.final=false",
    "logging.to=[]",
)


@dataclass(frozen=True)
class Row:
    """A workload. A side is a recipe with overrides, or a peer's script with its arguments."""

    title: str
    unit: str
    per_step: int  # units in an optimizer step
    muster: dict[str, tuple[str, ...]]
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps: int = 40
    warm_up: int = 15  # steps that are not counted: compilation, allocation


def lm(preset: str, batch: int, length: int, *more: str) -> tuple[str, ...]:
    """As many steps as make `auto` choose as in a real run."""
    recipe = "llama-1b" if preset.startswith("llama") else "gpt2"
    return (
        recipe,
        f"model.preset={preset}",
        f"data.sequence_length={length}",
        f"training.global_batch_size={batch}",
        "training.steps=20000",
        *more,
    )


def whisper(*more: str) -> tuple[str, ...]:
    return (
        "whisper-micro",
        "model.preset=whisper-small",
        "model.vocab_size=51865",
        "data.train=CLIPS",
        "data.validation=null",
        "data.test=null",
        "data.workers=14",
        "data.cache_gib=0",
        "training.global_batch_size=64",
        "training.lr=1e-5",
        "training.steps=20000",
        *more,
    )


SMALL = ("model.shape.layers=6", "model.shape.width=384")
EAGER = ("training.compile=false", "training.cuda_graphs=false")
ROWS = {
    "gpt2": Row(
        "GPT-2 124M, 32 × 1024",
        "tokens",
        32 * 1024,
        {"muster": lm("gpt2", 32, 1024)},
        {
            "Trainer, compiled": ("hf_lm.py", "--model", "gpt2", "--batch", "32", "--seq", "1024"),
            "bare compiled loop": ("bare_lm.py",),
        },
    ),
    "llama-1b": Row(
        "Llama 1.1B, 8 × 2048",
        "tokens",
        8 * 2048,
        {
            "muster": lm("llama-1b", 8, 2048),
            "muster, fp8": lm("llama-1b", 8, 2048, "training.precision=fp8"),
        },
        {"Trainer, compiled": ("hf_lm.py", "--model", "llama-1b", "--batch", "8", "--seq", "2048")},
        steps=25,
    ),
    "whisper": Row(
        "whisper-small, 64 clips of 2–15 s, 14 workers",
        "clips",
        64,
        {
            "muster, 30 s windows": whisper("data.window=30"),
            "muster, buckets": whisper("data.window=bucket"),
        },
        {
            "Trainer, compiled": ("hf_whisper.py",),
            "bare compiled loop, 30 s": ("bare_whisper.py", "--seconds", "30"),
        },
        warm_up=80,  # buckets: each length is compiled when it comes first, and captured the second time
    ),
    "small": Row(
        "GPT-2-shaped, 6 layers of 384, 64 × 256",
        "samples",
        64,
        {
            "muster": lm("gpt2", 64, 256, *SMALL),
            "muster, without graphs": lm("gpt2", 64, 256, *SMALL, "training.cuda_graphs=false"),
        },
        steps=150,
    ),
    "medium": Row(
        "gpt2-medium, 12 × 768, selective checkpointing",
        "steps",
        1,
        {
            "muster": lm("gpt2-medium", 12, 768, "training.activation_checkpointing=selective"),
            "muster, uncompiled": lm(
                "gpt2-medium", 12, 768, "training.activation_checkpointing=selective", *EAGER
            ),
        },
    ),
}


def write_clips(path: Path) -> None:
    """Clips of noise as FLAC, of 2 to 15 seconds, with 10 to 59 tokens of text each, as the peers have."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import soundfile

    rng = np.random.default_rng(0)
    clips, texts = [], []
    for seconds in rng.uniform(2, 15, CLIPS):
        file = io.BytesIO()
        noise = rng.standard_normal(round(seconds * RATE), np.float32) * 0.1
        soundfile.write(file, noise, RATE, format="FLAC")
        clips.append({"bytes": file.getvalue(), "path": None})
        texts.append("".join(rng.choice(LETTERS, rng.integers(10, 60))))
    pq.write_table(pa.table({"audio": clips, "text": texts}), path, row_group_size=64)


def run_muster(row: Row, side: str, clips: str) -> dict[str, Any]:
    """In this process, as one rank: its steps after the first few, from its own metrics."""
    import torch

    from muster import run_directory
    from muster.launch.cluster import RankInfo
    from muster.observe.results import read_lines
    from muster.recipe.load import load
    from muster.training.loop import train
    from muster.worker.main import connect_ranks
    from muster.worker.prepare import prepare

    recipe, *overrides = (word.replace("CLIPS", clips) for word in row.muster[side])
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(recipe, [*overrides, *QUIET])
        mesh, run, loaded = connect_ranks(
            loaded, RankInfo(), run_directory.create(Path(folder), "x", {})
        )
        job = prepare(loaded, mesh, run)
        job.steps = row.warm_up + row.steps
        train(job)
        job.observer.close()
        lines = read_lines(run.path / "metrics.jsonl")
        events = read_lines(run.path / "events.jsonl")
    late = [line for line in lines if line["step"] > row.warm_up]
    choices = next(event for event in events if event["event"] == "choices")
    seconds = sum(line["step_time_s"] for line in late)
    return {
        "per_s": len(late) * row.per_step / seconds,
        "median_ms": 1e3 * statistics.median(line["step_time_s"] for line in late),
        "data_wait": sum(line["data_wait_s"] for line in late) / seconds,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": choices["time"] - time.time() + time.perf_counter() - begin,
        "choices": {k: choices[k] for k in ("compile", "cuda_graphs") if k in choices},
        "losses": [lines[0]["loss"], lines[-1]["loss"]],
    }


def start(words: list[str]) -> dict[str, Any]:
    """The last line printed is what was found."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": (done.stdout + done.stderr)[-1500:]}
    return found


def compare(name: str, clips: str) -> list[str]:
    """Lines of the table, printed as each side ends."""
    row, lines, reference = ROWS[name], [], None
    sides = {title: [str(PEERS / words[0]), *words[1:]] for title, words in row.peers.items()}
    common = ["--clips", clips]
    sides |= {title: [__file__, name, "--side", title, *common] for title in row.muster}
    for title, words in sides.items():
        found = start(words)
        if "failed" in found:
            print(f"{row.title}: {title} failed:\n{found['failed']}", file=sys.stderr, flush=True)
            continue
        reference = reference or found["per_s"]
        wait = f"{found['data_wait']:.1%}" if "data_wait" in found else ""
        lines.append(
            f"| {row.title} | {title} | {found['per_s']:,.{0 if found['per_s'] > 100 else 1}f} {row.unit}/s "
            f"| {found['per_s'] / reference:.2f} | {wait} | {found['memory_gib']:.1f} GiB |"
        )
        print(lines[-1], flush=True)
        print(json.dumps({"row": name, "side": title, **found}), file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all by default"
    )
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--clips", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"no row is named {', '.join(sorted(unknown))}; they are {', '.join(ROWS)}")
    if args.side:
        print(json.dumps(run_muster(ROWS[args.rows[0]], args.side, args.clips)))
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here, which every row needs")
    rows = args.rows or list(ROWS)
    table = [
        f"{torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores, torch {torch.__version__}",
        "",
        "| work | side | speed | × the first | waiting for data | memory |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(table), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder) / "clips.parquet"
        if "whisper" in rows:
            write_clips(clips)
        for name in rows:
            table += compare(name, str(clips))
            if args.write:
                args.write.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
