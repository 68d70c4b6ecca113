"""One training step of the 7M recognisers against the same model walking through time.

    python benchmarks/speech_step.py                  # on a GPU if there is one

A whole step: log-mel, SpecAugment, forward, CTC, backward, clipping, AdamW, on real batches of the
embedded corpus. "step by step" is `lmu-guide` with its LMU run frame by frame, as the guide's code
does it. Clips per second appear only for a GPU, where its name gives them meaning.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from muster import models
from muster.data.batches import BatchPlan
from muster.recipe.load import load
from muster.tasks.speech_ctc import SpeechCTC
from muster.training.optimizer import make_optimizer
from muster.training.precision import autocast, resolve_precision

PRESETS = {"lmu-7m": {}, "lmu-guide": {}, "step by step": {"form": "recurrent"}}


def seconds_per_step(name: str, options: dict[str, str], batch: int, steps: int) -> float:
    """The median step after three of warm-up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = load("speech-7m", [f"training.global_batch_size={batch}"])
    task = SpeechCTC(recipe)
    source = task.source("train")
    assert source is not None
    plan = BatchPlan(source.lengths, batch, recipe.seed)
    preset = "lmu-guide" if options else name
    model = models.build(preset, vocab=task.vocabulary.size, **options).to(device)
    optimizer = make_optimizer(recipe.training, model.named_parameters())
    precision = resolve_precision("auto", device)
    batches = [task.collate([source.load(i) for i in plan.batch(s)], 0) for s in range(steps + 3)]
    times = []
    for ready in batches:
        _wait(device)
        start = time.perf_counter()
        prepared = task.prepare(ready.to(device))
        with autocast(precision, device):
            loss = task.loss(model, prepared) / prepared.units
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    found = {
        name: seconds_per_step(name, options, args.batch, args.steps)
        for name, options in PRESETS.items()
    }
    slow = found["step by step"]
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), f"batch {args.batch}")
    for name, taken in found.items():
        rate = f"   {args.batch / taken:8.0f} clips/s" if torch.cuda.is_available() else ""
        print(f"{name:14}{slow / taken:8.1f} × step by step{rate}")


if __name__ == "__main__":
    main()
