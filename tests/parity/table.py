"""Models and data of the parity table, small and uneven on purpose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import few_clips
from muster import models
from muster.checks.parity import TrainingCurve, short_recipe, training_curve
from muster.models.configs import DecoderConfig, WhisperConfig
from muster.parallel.mesh import Mesh
from muster.recipe.load import load

# Three layers do not divide by 2 stages, 67 hidden units not by 2 or 4 ranks, 257 symbols (the bytes
# and the end of a document) not by anything; 18 sequences not by 4 ranks × 4 micro-batches.
models.PRESETS["gpt-uneven"] = DecoderConfig(
    257, layers=3, width=32, heads=4, hidden=67, positions=32
)
models.PRESETS["llama-uneven"] = DecoderConfig(
    257,
    layers=3,
    width=32,
    heads=8,
    kv_heads=4,
    hidden=67,
    positions=32,
    position="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    tied=False,
)
# Blocks that compiled code can read where DeepSpeed packs them.
models.PRESETS["gpt-aligned-uneven"] = dataclasses.replace(models.PRESETS["gpt-uneven"], hidden=64)
models.PRESETS["gpt-wide"] = dataclasses.replace(
    models.PRESETS["gpt-uneven"], width=64, hidden=160, head_size=0
)
models.PRESETS["window-uneven"] = dataclasses.replace(models.PRESETS["llama-uneven"], window=7)
# 3 heads, 5 layers; for tensor ranks 4 heads, for eight stages 9 layers.
models.PRESETS["whisper-uneven"] = WhisperConfig(
    vocab=0,
    width=30,
    encoder_layers=2,
    encoder_heads=3,
    encoder_hidden=67,
    decoder_layers=3,
    decoder_heads=3,
    decoder_hidden=67,
)
models.PRESETS["whisper-heads-uneven"] = dataclasses.replace(
    models.PRESETS["whisper-uneven"], width=36, encoder_heads=4, decoder_heads=4
)
models.PRESETS["whisper-deep-uneven"] = dataclasses.replace(
    models.PRESETS["whisper-uneven"], encoder_layers=4, decoder_layers=5
)
for name in ("gpt", "llama"):  # for four and eight stages
    for depth, layers in (("deep", 5), ("deepest", 9)):
        models.PRESETS[f"{name}-{depth}-uneven"] = dataclasses.replace(
            models.PRESETS[f"{name}-uneven"], layers=layers
        )
models.PRESETS["lmu-norm-uneven"] = dataclasses.replace(models.PRESETS["lmu-micro"], norm="batch")
RECIPES = {
    "window": "llama-micro",
    "gpt-deep": "gpt-micro",
    "gpt-deepest": "gpt-micro",
    "llama-deep": "llama-micro",
    "llama-deepest": "llama-micro",
    "gpt": "gpt-micro",
    "gpt-aligned": "gpt-micro",
    "llama": "llama-micro",
    "lmu": "speech",
    "lmu-norm": "speech",
    "whisper": "whisper-micro",
    "whisper-heads": "whisper-micro",
    "whisper-deep": "whisper-micro",
}
SHAPED = {  # the same sizes as the presets above, by keys
    "gpt": "gpt2-micro model.shape={layers:3,width:32,heads:4,hidden:67,positions:32}",
    "llama": "llama-micro model.shape={layers:3,width:32,heads:8,hidden:67,positions:32}",
    "whisper": "whisper-micro model.shape={layers:2,decoder_layers:3,width:30,heads:3,hidden:67}",
}
BATCH = 18
STEPS = "training.steps=3"


def model_of(name: str) -> list[str]:
    return f"model.preset={SHAPED.get(name, f'{name}-uneven')}".split()


def overrides_for(model: str, corpus: str) -> list[str]:
    if model.startswith("lmu"):
        norm = ["model.preset=lmu-norm-uneven", "distributed.sync_batchnorm=true"]
        return [
            STEPS,
            *(norm if model == "lmu-norm" else ()),
            f"data.train={few_clips.folder()}",
            "evaluation.decoder=greedy",
            "evaluation.ngram=null",
            "evaluation.known_words=false",
            f"training.global_batch_size={BATCH}",
            "training.lr=3e-4",
        ]
    if model.startswith("whisper"):
        return [
            STEPS,
            *model_of(model),
            f"data.train={few_clips.folder()}",
            "training.global_batch_size=18",
            "training.lr=3e-4",
        ]
    return [
        STEPS,
        *model_of(model),
        f"data.train={corpus}",
        "data.sequence_length=24",
        f"training.global_batch_size={BATCH}",
    ]


def train_row(
    mesh: Mesh, folder: str, model: str, corpus: str, options: list[str], accumulation: int
) -> TrainingCurve | None:
    recipe = load(
        RECIPES[model],
        short_recipe(
            [
                *overrides_for(model, corpus),
                f"training.gradient_accumulation_steps={accumulation}",
                *options,
            ]
        ),
    )
    made = training_curve(recipe, mesh, Path(folder))
    return made if mesh.first else None
