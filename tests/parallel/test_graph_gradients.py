"""Gradients that CUDA graphs write: as a backward pass leaves them, whatever is replayed and in which order.

A replay is a function here that writes the numbers of a backward pass to the tensors that a graph would write.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from muster.parallel.graphs import Gradients


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def backward(linear: nn.Linear, x: torch.Tensor) -> None:
    linear(x).square().sum().backward()


def captured(linear: nn.Linear, gradients: Gradients, x: torch.Tensor) -> None:
    with gradients.capturing():
        backward(linear, x)
        gradients.keep()


def replay(linear: nn.Linear, gradients: Gradients, x: torch.Tensor) -> None:
    with gradients.adding():
        fresh = torch.autograd.grad(linear(x).square().sum(), list(gradients.static))
        for static, gradient in zip(gradients.static.values(), fresh, strict=True):
            static.copy_(gradient)


@pytest.mark.parametrize("replayed", list(product([True, False], repeat=3)))
def test_replays_and_backward_passes_add_up(replayed):
    """Twice, since the tensors are the same in every step."""
    linear, batches = model(), torch.randn(3, 4, 3)
    gradients = Gradients(list(linear.parameters()))
    captured(linear, gradients, batches[0])
    captured(linear, gradients, batches[1])
    for _ in range(2):
        linear.zero_grad()
        for x, again in zip(batches, replayed, strict=True):
            (replay(linear, gradients, x) if again else backward(linear, x))
        found = [p.grad.clone() for p in linear.parameters()]  # type: ignore[union-attr]
        linear.zero_grad()
        for x in batches:
            backward(linear, x)
        for ours, p in zip(found, linear.parameters(), strict=True):
            assert torch.equal(ours, p.grad)  # type: ignore[arg-type]


def test_later_captures_write_to_the_tensors_of_the_first():
    """Not to memory of their own for every shape of a batch."""
    linear, (first, second) = model(), torch.randn(2, 4, 3)
    gradients = Gradients(list(linear.parameters()))
    captured(linear, gradients, first)
    static = list(gradients.static.values())
    captured(linear, gradients, second)
    backward(linear, second)
    for p, ours in zip(linear.parameters(), static, strict=True):
        assert gradients.static[p] is ours
        assert torch.equal(ours, p.grad)  # type: ignore[arg-type]


def test_one_replay_writes_what_the_optimizer_reads():
    """Nothing is added or cleared: that costs 12 bytes for each parameter."""
    linear, x = model(), torch.randn(4, 3)
    gradients = Gradients(list(linear.parameters()))
    captured(linear, gradients, x)
    replay(linear, gradients, x)
    for p in linear.parameters():
        assert p.grad is gradients.static[p]


def test_a_capture_leaves_the_gradients_that_there_are():
    linear, x = model(), torch.randn(4, 3)
    backward(linear, x)
    before = [p.grad for p in linear.parameters()]
    gradients = Gradients(list(linear.parameters()))
    captured(linear, gradients, x)
    assert all(p.grad is g for p, g in zip(linear.parameters(), before, strict=True))


def test_frozen_weights_have_none():
    linear, x = model(), torch.randn(4, 3)
    linear.bias.requires_grad_(False)
    gradients = Gradients([p for p in linear.parameters() if p.requires_grad])
    captured(linear, gradients, x)
    replay(linear, gradients, x)
    assert linear.bias.grad is None
    assert linear.weight.grad is not None
