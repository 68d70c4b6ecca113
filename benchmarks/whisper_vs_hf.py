"""Clips per second of muster's Whisper beside Hugging Face's Seq2SeqTrainer, in one run.

    python benchmarks/whisper_vs_hf.py --preset whisper-small --batch 16 --workers 4
    python benchmarks/whisper_vs_hf.py --preset whisper-small --batch 64 --seconds 27 30

Four sides, each in a process of its own: the Trainer as its documentation sets it up, the Trainer
tuned (SDPA, fused AdamW, workers, torch.compile, labels padded so that it need not compile again),
muster in a 30 s window, muster in buckets. Same fresh weights, same parquet file of made-up clips,
same global batch, precision and optimizer. The Trainer's features are made by
WhisperFeatureExtractor in its data workers, muster's on the device. Steps before `--warmup`
(compilation, allocation) are not counted; the clock is read with the device idle. Absolute figures
appear only for a GPU, whose name gives them meaning. Needs accelerate.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

RATE = 16000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDES = ("trainer", "trainer, tuned", "muster, 30 s", "muster, buckets")


class Enough(Exception):
    """The last step is timed; what a loop does after it (saving) is not wanted."""


class Clock:
    """Times the steps after `warmup`, and within them the waits for data."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.first, self.last = warmup, warmup + steps
        self.began = self.seconds = self.waited = self.audio_s = 0.0
        self.filled = self.cells = 0
        self.counting = False

    def tick(self, step: int) -> None:
        if step not in (self.first, self.last):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.counting = step == self.first
        if self.counting:
            self.began = now
        else:
            self.seconds = now - self.began
            raise Enough

    def saw(self, waited: float, filled: int, cells: int) -> None:
        """One batch: seconds it was waited for, samples of sound in it, samples with padding."""
        if self.counting:
            self.waited += waited
            self.filled += filled
            self.cells += cells


def write_clips(path: Path, count: int, low: float, high: float) -> None:
    """Clips of coloured noise as FLAC, between `low` and `high` seconds, with words at 2.5 a second."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import soundfile

    rng = np.random.default_rng(0)
    clips, texts = [], []
    for seconds in rng.uniform(low, high, count):
        noise = np.convolve(rng.normal(0, 0.1, round(seconds * RATE)), np.ones(8) / 8, "same")
        file = io.BytesIO()
        soundfile.write(file, noise, RATE, format="FLAC")
        clips.append({"bytes": file.getvalue(), "path": None})
        texts.append(" ".join(rng.choice(WORDS, max(1, round(2.5 * seconds)))))
    pq.write_table(pa.table({"audio": clips, "text": texts}), path, row_group_size=64)


def make_recipe(args: argparse.Namespace, folder: Path) -> Any:
    from muster import models
    from muster.recipe.load import load

    config: Any = models.configure(args.preset)
    text = f"""
task: speech-seq2seq
model: {{preset: {args.preset}, vocab_size: {config.vocab}}}
data:
  train: {args.corpus}
  window: {"bucket" if args.only == "muster, buckets" else 30}
  spec_augment: {"{}" if args.augment else "null"}
  workers: {args.workers}
  cache_gib: 0
  shuffle: full
training:
  steps: {args.warmup + args.steps}
  global_batch_size: {args.batch}
  per_device_batch_size: {args.batch}
  precision: bf16
  compile: {str(not args.eager).lower()}
  cuda_graphs: {str(not args.no_graphs).lower()}
  lr: 1.0e-5
  max_grad_norm: 1.0
checkpoint: {{every_steps: null}}
evaluation: {{every_steps: null, final: false}}
logging: {{dir: {folder}, to: []}}
"""
    (folder / "recipe.yaml").write_text(text)
    return load(str(folder / "recipe.yaml"), [])


def time_muster(recipe: Any, clock: Clock, folder: Path, args: argparse.Namespace) -> None:
    from muster import run_directory
    from muster.parallel import mesh as meshes
    from muster.parallel.layout import Layout
    from muster.training.loop import train
    from muster.worker.prepare import prepare

    mesh = meshes.join(0, 0, Layout(), "auto", 600.0)
    job = prepare(recipe, mesh, run_directory.create(folder, "benchmark", {}))
    observe = job.observer.step

    def step(record: Any, mesh: Any) -> None:
        observe(record, mesh)
        clock.saw(record.data_wait_s, record.filled, record.cells)
        clock.tick(record.step)

    job.observer.step = step  # type: ignore[method-assign]
    with suppress(Enough):
        train(job)
    job.observer.close()
    meshes.leave()


class Clips(torch.utils.data.Dataset[Any]):
    """The same parquet, decoded and made into features as the Trainer's users do it."""

    def __init__(self, task: Any, extractor: Any) -> None:
        self.task, self.extractor, self.source = task, extractor, task.source("train")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.source.load(index)
        features = self.extractor(sample.samples, sampling_rate=RATE).input_features[0]
        ids = [*self.task.prompt[1:], *self.task.tokens.encode(sample.text), self.task.tokens.end]
        return {"input_features": features, "labels": ids, "filled": len(sample.samples)}


def collate(rows: list[dict[str, Any]], multiple: int = 1) -> dict[str, Any]:
    longest = max(len(row["labels"]) for row in rows)
    longest += -longest % multiple
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        labels[i, : len(row["labels"])] = torch.tensor(row["labels"])
    features = torch.from_numpy(np.stack([row["input_features"] for row in rows]))
    return {
        "input_features": features,
        "labels": labels,
        "filled": torch.tensor([row["filled"] for row in rows]),
    }


def time_trainer(recipe: Any, clock: Clock, folder: Path, args: argparse.Namespace) -> None:
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    from muster.models.whisper.folder import write_config
    from muster.tasks.speech_seq2seq import TOKEN_MULTIPLE, SpeechSeq2Seq

    class Ticking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.tick(state.global_step)

    class Timed(Seq2SeqTrainer):
        def get_batch_samples(self, epoch_iterator: Iterator[Any], *rest: Any) -> Any:
            began = time.perf_counter()
            batches, items = super().get_batch_samples(epoch_iterator, *rest)
            waited = time.perf_counter() - began
            for batch in batches:
                filled = batch.pop("filled")
                clock.saw(waited, int(filled.sum()), 30 * RATE * len(filled))
                waited = 0.0
            return batches, items

    task = SpeechSeq2Seq(recipe)
    tuned = args.only == "trainer, tuned"
    config = WhisperConfig(
        **write_config(task.config, "float32")
        | {"decoder_start_token_id": task.tokens.start, "pad_token_id": task.tokens.end}
        | {"bos_token_id": task.tokens.end, "eos_token_id": task.tokens.end}
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(recipe.seed)
    model = WhisperForConditionalGeneration(config)
    options: dict[str, Any] = {"gradient_checkpointing": True} if not tuned else {}
    if tuned:
        options = {
            "torch_compile": not args.eager,
            "dataloader_num_workers": args.workers,
            "dataloader_pin_memory": True,
            "dataloader_persistent_workers": True,
        }
    trainer = Timed(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=args.batch,
            max_steps=args.warmup + args.steps,
            learning_rate=recipe.training.lr,
            weight_decay=recipe.training.weight_decay,
            adam_beta2=recipe.training.betas[1],
            max_grad_norm=1.0,
            bf16=True,
            optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            **options,
        ),
        train_dataset=Clips(task, WhisperFeatureExtractor(task.config.mels)),
        data_collator=partial(collate, multiple=TOKEN_MULTIPLE if tuned else 1),
        callbacks=[Ticking()],
    )
    with suppress(Enough):
        trainer.train()


def measure(args: argparse.Namespace) -> None:
    """One side, in this process; the last line printed is what was found."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(args.warmup, args.steps)
        side = time_muster if args.only.startswith("muster") else time_trainer
        side(make_recipe(args, Path(folder)), clock, Path(folder), args)
    gpu = torch.cuda.is_available()
    found = {
        "clips_per_s": args.batch * args.steps / clock.seconds,
        "audio_s_per_s": clock.filled / RATE / clock.seconds,
        "data_wait_share": clock.waited / clock.seconds,
        "padding_share": 1 - clock.filled / clock.cells,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
    }
    print(json.dumps(found), flush=True)


def run_side(name: str, corpus: Path, device: str) -> dict[str, Any]:
    environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--corpus", str(corpus)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "train.parquet"
        write_clips(corpus, args.clips, *args.seconds)
        found = {name: run_side(name, corpus, args.device) for name in args.sides}
    best = max(
        (f["clips_per_s"] for n, f in found.items() if n.startswith("trainer")), default=None
    )
    gpu = args.device == "cuda"
    where = torch.cuda.get_device_name() if gpu else "CPU"
    low, high = args.seconds
    lines = [
        f"{args.preset}, batch {args.batch}, clips of {low:g} to {high:g} s, {args.workers} workers, "
        f"bf16{'' if args.eager else ', compiled'} ({where}, torch {torch.__version__})",
        "",
        "| | × best Trainer | waiting for data | padding |"
        + (" clips/s | audio s/s | peak memory |" if gpu else ""),
        "|---|---|---|---|" + ("---|---|---|" if gpu else ""),
    ]
    for name, side in found.items():
        ratio = f"{side['clips_per_s'] / best:.2f}" if best else "-"
        line = f"| {name} | {ratio} | {side['data_wait_share']:.1%} | {side['padding_share']:.0%} |"
        if gpu:
            line += f" {side['clips_per_s']:.0f} | {side['audio_s_per_s']:,.0f} |"
            line += f" {side['memory_gib']:.1f} GiB |"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="whisper-small", help="a Whisper of muster's")
    parser.add_argument("--batch", type=int, default=16, help="clips per optimizer step")
    parser.add_argument("--seconds", type=float, nargs=2, default=(2, 15), metavar=("LOW", "HIGH"))
    parser.add_argument("--clips", type=int, default=1024, help="made up for the corpus")
    parser.add_argument("--workers", type=int, default=4, help="data workers")
    parser.add_argument("--steps", type=int, default=40, help="steps that count")
    parser.add_argument(
        "--warmup", type=int, default=20, help="steps before those; buckets take 4×"
    )
    parser.add_argument("--augment", action="store_true", help="muster with SpecAugment")
    parser.add_argument("--no-graphs", action="store_true", help="muster without CUDA graphs")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        if args.only == SIDES[-1]:  # every window is compiled for and recorded on its own
            args.warmup *= 4
        measure(args)
        return
    table = compare(args)
    print(table)
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        with args.write.open("a") as file:
            file.write(f"{table}\n\n")


if __name__ == "__main__":
    main()
