"""Validation loss with sequences that move from epoch to epoch, beside sequences that stay.

    python benchmarks/sequence_packing.py             # both texts, every data.sequence_packing
    python benchmarks/sequence_packing.py --seeds 3   # each with three seeds

The texts are short modules of the standard library of the Python that runs this: some to train on, in
many epochs, and others for validation. `modules` has one document per module, `lines` one per line.
Model, optimizer, steps, dropout and seeds are the same for every way to pack. Losses are in nats per
token (a byte, or the end of a document): the best of a run and its last, means over the seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
from pathlib import Path

import muster
from muster.data.corpus import PYTHON_SOURCE, Split, split_files

PACKINGS = ("fixed", "shifted", "shuffled")
LARGEST = 6000  # bytes of a module
COMMON = [
    "model.shape.layers=2",
    "model.shape.width=64",
    "model.dropout=0.1",
    "data.sequence_length=64",
    "training.lr=3.0e-3",
    "evaluation.every_steps=50",
    "checkpoint.every_steps=null",
    "checkpoint.final=false",
    "checkpoint.best=false",
    "logging.to=[]",
]


def texts(split: Split, size: int) -> list[str]:
    """Modules in the order of their hashes, until there are `size` bytes."""
    files = split_files(PYTHON_SOURCE, None, None, split, content="text")
    mine = [file for file in files if 500 < file.stat().st_size < LARGEST]
    mine.sort(key=lambda file: hashlib.sha256(file.name.encode()).hexdigest())
    found: list[str] = []
    for file in mine:
        if sum(len(text.encode()) for text in found) >= size:
            break
        found.append(file.read_text(encoding="utf-8"))
    return found


def write(folder: Path, kind: str, size: int) -> None:
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        documents = texts(split, size)
        if kind == "lines":
            documents = [line for text in documents for line in text.splitlines() if line.strip()]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        (folder / f"{split}.jsonl").write_text(rows)


def train(folder: Path, kind: str, packing: str, seed: int, steps: int) -> tuple[float, float, int]:
    """The best and the last validation loss, and the step of the best."""
    changes = [
        f"data.train={folder / 'text'}",
        f"data.sequence_packing={packing}",
        f"training.steps={steps}",
        f"seed={seed}",
        f"logging.dir={folder / 'runs'}",
    ]
    run = muster.train("gpt-micro", COMMON + changes, gpus=1, name=f"{kind}-{packing}-{seed}")
    run.wait()
    losses = [
        (float(event["scores"]["loss"]), int(event["step"]))
        for event in run.events()
        if event["event"] == "evaluation"
    ]
    best, step = min(losses)
    return best, losses[-1][0], step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--kilobytes", type=int, default=20, help="of text to train on")
    parser.add_argument("--texts", nargs="+", choices=("modules", "lines"))
    wanted = parser.parse_args()
    print("| documents | packing | best loss | at step | last loss |\n|---|---|---|---|---|")
    for kind in wanted.texts or ("modules", "lines"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:
            folder = Path(parent)
            (folder / "text").mkdir()
            write(folder / "text", kind, wanted.kilobytes * 1000)
            for packing in PACKINGS:
                made = [
                    train(folder, kind, packing, 42 + i, wanted.steps) for i in range(wanted.seeds)
                ]
                best, last, step = (statistics.mean(values) for values in zip(*made, strict=True))
                print(f"| {kind} | {packing} | {best:.3f} | {step:.0f} | {last:.3f} |", flush=True)


if __name__ == "__main__":
    main()
