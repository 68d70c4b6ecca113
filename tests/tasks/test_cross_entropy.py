"""The Triton kernels of the loss against torch's own in float64: on a GPU, or with Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from muster.data.loader import IGNORE
from muster.models.gpu_kernels import planned_for_gpu
from muster.tasks.likelihood import cross_entropy, negative_log_likelihood

VOCAB, WIDTH = 5000, 5056  # two blocks of the kernels, and columns beyond the vocabulary

pytestmark = [
    pytest.mark.both,
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a GPU, or TRITON_INTERPRET=1 and Triton",
    ),
]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_torch_in_float64(dtype, smoothing):
    logits, targets = example(dtype)
    weights = torch.linspace(0.1, 2.0, len(targets), device=logits.device)
    expected, gradient = reference(logits, targets, weights, smoothing)

    logits.requires_grad_()
    losses, _ = cross_entropy(logits * 1, targets, VOCAB, smoothing)
    (losses * weights).sum().backward()

    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=rounding, atol=1e-6)


def test_the_gradient_takes_the_place_of_the_logits():
    logits, targets = example(torch.float32)
    logits.requires_grad_()
    copy, seen = logits * 1, []
    copy.register_hook(lambda grad: seen.append(grad.data_ptr()))
    losses, _ = cross_entropy(copy, targets, VOCAB, 0.0)
    losses.sum().backward()
    assert seen == [copy.data_ptr()]


@pytest.fixture
def likelihood():
    """Of logits as on a GPU."""
    with planned_for_gpu():
        yield negative_log_likelihood


def test_targets_need_not_lie_side_by_side(likelihood):
    logits, targets = example(torch.float32)
    apart = torch.stack([targets, torch.zeros_like(targets)], dim=1)[:, :1]
    expected, _ = reference(logits, targets, torch.ones_like(targets), 0.0)
    found = likelihood(logits[:, None], apart, VOCAB, "sum")
    torch.testing.assert_close(found.double(), expected.sum(), rtol=1e-6, atol=1e-5)


def test_a_target_that_is_no_column_makes_the_loss_not_a_number(likelihood):
    logits, targets = example(torch.float32)
    targets[0], targets[1] = VOCAB, -1
    losses = likelihood(logits[None], targets[None], VOCAB, "none")
    assert losses.isnan().tolist() == [True, True, *[False] * 5]


def test_no_rows_are_no_loss(likelihood):
    logits, targets = (tensor[:0] for tensor in example(torch.float32))
    assert likelihood(logits[None], targets[None], VOCAB, "sum") == 0


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One row does not count and is not finite; one begins with columns that cannot be chosen; columns
    beyond the vocabulary hold anything."""
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(7, WIDTH, generator=generator)
    targets = torch.randint(4900, VOCAB, (7,), generator=generator)
    logits[2], targets[2] = torch.nan, IGNORE
    logits[3, :4500] = -1e30
    logits[:, VOCAB:] = 1e4
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return logits.to(device, dtype), targets.to(device)


def reference(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, and the gradient of their weighted sum; a row that does not count has neither."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(
        exact[:, :VOCAB],
        targets,
        ignore_index=IGNORE,
        reduction="none",
        label_smoothing=smoothing,
    )
    (losses * weights).sum().backward()
    assert exact.grad is not None
    exact.grad[targets == IGNORE] = 0
    return losses.detach(), exact.grad
