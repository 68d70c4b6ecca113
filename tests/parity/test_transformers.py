"""Families that transformers builds: every strategy gives the training curve of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_families
from muster.checks.parity import distance, short_recipe, training_curve
from muster.recipe.load import load

RANKS = 2
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tensor")
TENSOR = ("granite", "gemma3_text", "gpt_neox")  # whose plan muster can translate
ORDINARY = (("phi3", "fsdp"), ("gemma3_text", "tensor"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    parent = tmp_path_factory.mktemp("families")

    def folder(family: str) -> str:
        if not (parent / family).exists():
            hf_families.save(family, parent / family)
        return str(parent / family)

    return folder


def rows(
    mesh: Any, folder: str, corpus: str, wanted: list[tuple[str, list[str]]]
) -> list[Any] | None:
    """One after the other in one call."""
    made = []
    for number, (strategy, options) in enumerate(wanted):
        recipe = load(
            "llama-micro",
            short_recipe(
                [
                    "training.steps=3",
                    "training.global_batch_size=10",
                    "data.tokenizer.kind=bytes",
                    f"data.train={corpus}",
                    "data.sequence_length=24",
                    f"distributed.strategy={strategy}",
                    *options,
                ]
            ),
        )
        made.append(training_curve(recipe, mesh, Path(folder, f"{number}")))
    return made if mesh.first else None


def compare(ranks: Any, corpus: str, tmp_path: Path, wanted: list[tuple[str, list[str]]]) -> None:
    plain = [("ddp", options) for _, options in wanted]
    alone = ranks(1)(rows, str(tmp_path / "alone"), corpus, plain)[0]
    together = ranks(RANKS)(rows, str(tmp_path / "together"), corpus, wanted)[0]
    for (strategy, options), one, other in zip(wanted, alone, together, strict=True):
        found = distance(one, other)
        assert found.small, (strategy, options, found)


def test_strategies_agree_with_one_process(ranks, folders, small_corpus, tmp_path):
    wanted = [(s, [f"model.pretrained={folders(f)}"]) for f, s in ORDINARY]
    wanted.append(("fsdp", ["~model.preset", f"model.config={folders('gpt_neox')}"]))
    compare(ranks, small_corpus, tmp_path, wanted)


@pytest.mark.full
@pytest.mark.parametrize("family", [*hf_families.FAMILIES, *hf_families.MORE])
def test_every_strategy_agrees(family, ranks, folders, small_corpus, tmp_path):
    pretrained = [f"model.pretrained={folders(family)}"]
    wanted = [(s, pretrained) for s in STRATEGIES if s != "tensor" or family in TENSOR]
    more = ["training.activation_checkpointing=full", "data.isolate_documents=true"]
    wanted.append(("fsdp", [*pretrained, *more]))
    if "moe" not in family and family != "mixtral":
        targets = {"phi3": "qkv_proj", "gpt_neox": "query_key_value"}.get(family, "q")
        wanted.append(("fsdp", [*pretrained, f"model.lora={{rank: 4, targets: [{targets}]}}"]))
    compare(ranks, small_corpus, tmp_path, wanted)
