"""`training.precision: fp8` on a GPU that has float8 products, beside bf16."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from muster.hardware.catalogue import FLOAT8_CAPABILITY
from muster.observe.results import read_lines
from muster.training.loop import train
from training import make_job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
STEPS = 30
SIZES = [f"training.steps={STEPS}", "training.global_batch_size=8", "data.sequence_length=512"]
SIZES += ["training.lr=3e-4", "training.warmup_steps=10", "evaluation.final=false"]
FP8, BF16 = "training.precision=fp8", "training.precision=bf16"
FEW_PER_CENT = 0.03
LAST = 10  # steps that are compared: rounding moves single steps of the steep beginning by 10 %


@pytest.fixture(autouse=True)
def _has_float8():
    if find_spec("torchao") is None:
        pytest.skip("needs torchao")
    if torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("needs a GPU with float8 products")


def course(mesh, folder: str, recipe: str, options: list[str]) -> tuple[list[float], list[str]]:
    """Losses of all steps in `folder`, and the types of a block's gathered weights."""
    job = make_job(mesh, folder, [*SIZES, *options], recipe)
    train(job)
    job.observer.close()
    block = job.engine.parts[0].blocks["0"]  # type: ignore[union-attr, index]
    kinds = []
    if hasattr(block, "unshard"):
        block.unshard()
        kinds = [type(p).__name__ for p in block.parameters()]
        block.reshard()
    mesh.barrier()
    return [line["loss"] for line in read_lines(job.observer.folder / "metrics.jsonl")], kinds


def assert_near(losses: list[float], expected: list[float]) -> None:
    """Once the loss falls slowly, and both learn."""
    late, wanted = (sum(course[-LAST:]) / LAST for course in (losses, expected))
    assert late == pytest.approx(wanted, rel=FEW_PER_CENT)
    assert losses[-1] < 0.9 * losses[0]


def test_one_gpu_learns_as_in_bf16(ranks, tmp_path, record_property):
    options = ["checkpoint.final=false", "training.compile=true"]
    ((expected, _),) = ranks(1)(course, str(tmp_path / "bf16"), "llama-1b", [*options, BF16])
    ((losses, _),) = ranks(1)(course, str(tmp_path / "fp8"), "llama-1b", [*options, FP8])
    farthest = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    record_property(
        "row", f"| llama-1b | 1 | {losses[-1]:.3f} | {expected[-1]:.3f} | {farthest:.4f}"
    )
    assert_near(losses, expected)


def test_two_ranks_gather_float8_and_their_run_goes_on_in_bf16(ranks, tmp_path, record_property):
    """Under FSDP: half of the steps, a checkpoint, and the other half in the other precision."""
    fsdp = ["distributed.strategy=fsdp", "training.schedule=constant", "model.shape.layers=2"]
    expected, _ = ranks(2)(course, str(tmp_path / "bf16"), "llama-1b", [*fsdp, BF16])[0]
    half = f"training.steps={STEPS // 2}"
    losses, kinds = ranks(2)(course, str(tmp_path / "fp8"), "llama-1b", [*fsdp, FP8, half])[0]
    assert "Float8TrainingTensor" in kinds
    assert len(losses) == STEPS // 2
    losses, kinds = ranks(2)(course, str(tmp_path / "fp8"), "llama-1b", [*fsdp, BF16])[0]
    assert "Float8TrainingTensor" not in kinds
    farthest = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    record_property(
        "row",
        f"| llama-1b, 2 layers | fsdp 2 | {losses[-1]:.3f} | {expected[-1]:.3f} | {farthest:.4f}",
    )
    assert_near(losses, expected)
