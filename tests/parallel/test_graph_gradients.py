"""Gradients that CUDA graphs write: as a backward pass leaves them, whatever is replayed and in which order.

A replay is a function here that writes the numbers of a backward pass to the tensors that a graph would write.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from muster.errors import MusterError
from muster.parallel.graphs import Gradients


class Model(nn.Module):
    """The second layer takes part where the batch is large, the third never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if len(x) > 4 else x


def backward(model: Model, x: Tensor) -> None:
    model(x).square().sum().backward()


class Graph:
    """A backward pass for `x`, captured."""

    def __init__(self, model: Model, gradients: Gradients, x: Tensor) -> None:
        self.model, self.gradients, self.x = model, gradients, x
        with gradients.capturing():
            backward(model, x)
            written = gradients.written()
        self.trained = gradients.keep(written)

    def replay(self) -> None:
        with self.gradients.adding(self.trained):
            loss = self.model(self.x).square().sum()
            fresh = torch.autograd.grad(loss, self.trained)
            for p, gradient in zip(self.trained, fresh, strict=True):
                self.gradients.static[p].copy_(gradient)


@pytest.mark.parametrize("replayed", list(product([True, False], repeat=3)))
@pytest.mark.parametrize("rows", [(4, 4, 4), (4, 8, 4), (8, 4, 8)])
def test_replays_and_backward_passes_add_up(rows, replayed):
    """Twice, since the tensors are the same in every step."""
    model, batches = Model(), [torch.randn(count, 3) for count in rows]
    gradients = Gradients(model.parameters())
    graphs = [Graph(model, gradients, x) for x in batches]
    for _ in range(2):
        model.zero_grad()
        for graph, again in zip(graphs, replayed, strict=True):
            (graph.replay() if again else backward(model, graph.x))
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        for x in batches:
            backward(model, x)
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        assert "first.bias" not in found
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_later_captures_write_to_the_tensors_of_the_first():
    """Not to memory of their own for every shape of a batch."""
    model, (first, second) = Model(), torch.randn(2, 4, 3)
    gradients = Gradients(model.parameters())
    Graph(model, gradients, first)
    static = dict(gradients.static)
    Graph(model, gradients, second)
    backward(model, second)
    assert gradients.static.keys() == static.keys()
    for p, ours in static.items():
        assert gradients.static[p] is ours
        assert torch.equal(ours, p.grad)  # type: ignore[arg-type]


def test_one_replay_writes_what_the_optimizer_reads():
    """Nothing is added or cleared: that costs 16 bytes for each parameter."""
    model = Model()
    gradients = Gradients(model.parameters())
    Graph(model, gradients, torch.randn(4, 3)).replay()
    assert model.first.weight.grad is gradients.static[model.first.weight]


def test_a_capture_leaves_the_gradients_that_there_are_also_one_that_fails():
    model, x = Model(), torch.randn(4, 3)
    backward(model, x)
    before = [p.grad for p in model.parameters()]
    gradients = Gradients(model.parameters())
    with suppress(RuntimeError), gradients.capturing():
        backward(model, x)
        gradients.written()
        raise RuntimeError
    assert not gradients.static
    Graph(model, gradients, x)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def test_replicas_need_the_gradients_of_all_parameters():
    """A zero would not do: an optimizer decays a weight that has one, and leaves alone a weight that has none."""
    model, x = Model(), torch.randn(8, 3)
    gradients = Gradients(model.parameters())
    Graph(model, gradients, x).replay()
    with pytest.raises(MusterError, match=r"cuda_graphs: .* shape \(3, 3\) has none"):
        list(gradients.every())
    model.third.requires_grad_(False)
    gradients = Gradients(model.parameters())
    Graph(model, gradients, x).replay()
    assert len(list(gradients.every())) == 3
