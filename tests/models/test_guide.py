from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muster.models import build
from muster.models.lmu import discretise, legendre
from muster.models.lmu_attention import LMULayer


def cell_by_hand(lmu: LMULayer, x: Tensor) -> Tensor:
    """The cell as the guide writes it, h_{t-1} read as x_{t-1}, one step at a time."""
    order, theta = lmu.memory.order, lmu.memory.theta
    a, b = discretise(*legendre(order), theta)
    m, before, out = x.new_zeros(len(x), order), torch.zeros_like(x[:, 0]), []
    for now in x.unbind(1):
        u = now @ lmu.e_x + before @ lmu.e_h + m @ lmu.memory.e_m
        m = m @ a.T + u[:, None] * b
        out.append(torch.tanh(now @ lmu.w_x.T + before @ lmu.w_h.T + m @ lmu.w_m.T))
        before = now
    return torch.stack(out, 1)


def trained(lmu: LMULayer) -> LMULayer:
    torch.nn.init.normal_(lmu.memory.e_m, std=0.02)  # zero at first, which would hide it
    return lmu


def test_the_model_has_exactly_the_guides_parameters():
    model = build("lmu-guide", 29)
    assert sum(p.numel() for p in model.parameters()) == 7_156_253
    assert sum(p.numel() for p in model.blocks[0].attention.parameters()) == 1_050_624
    assert sum(p.numel() for p in model.blocks[0].lmu.parameters()) == 722_432
    assert sum(p.numel() for p in model.head.parameters()) == 14_877


@pytest.mark.parametrize("form", ["recurrent", "toeplitz", "chunked", "fft", "auto"])
def test_every_form_of_the_cell_equals_the_cell_by_hand(form: str):
    lmu = trained(LMULayer(10, 24, 50.0, form)).double()
    x = torch.randn(2, 90, 10, dtype=torch.float64)
    torch.testing.assert_close(lmu(x), cell_by_hand(lmu, x), rtol=0, atol=1e-7)


def test_the_cells_gradients_are_those_of_the_step_by_step_form():
    x = torch.randn(2, 80, 10, dtype=torch.float64)
    lmu = trained(LMULayer(10, 70, 100.0, "recurrent")).double()
    gradients = {}
    for form in ("recurrent", "auto"):
        lmu.memory.form = form
        lmu.zero_grad()
        lmu(x).square().sum().backward()
        gradients[form] = {n: p.grad.clone() for n, p in lmu.named_parameters() if p.requires_grad}
    assert set(gradients["auto"]) == {"memory.e_m", "e_x", "e_h", "w_x", "w_h", "w_m"}
    for name, gradient in gradients["auto"].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, gradients["recurrent"][name])


def test_the_delay_network_is_held_frozen_and_starts_as_the_paper_says():
    lmu = LMULayer(8, 6, 20.0)
    assert not lmu.a.requires_grad
    assert not lmu.b.requires_grad
    assert lmu.a.double().equal(legendre(6)[0])
    assert lmu.memory.e_m.eq(0).all()


def test_the_whole_model_gives_the_same_logits_step_by_step():
    features, lengths = torch.randn(2, 120, 80), torch.tensor([120, 71])
    quick = build("lmu-guide", 29, blocks=1)
    slow = build("lmu-guide", 29, blocks=1, form="recurrent")
    slow.load_state_dict(quick.state_dict())
    for a, b in zip(quick(features, lengths), slow(features, lengths), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
