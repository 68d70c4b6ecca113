from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from muster.models.lmu import LMUMemory, choose_form, discretise, legendre

FORMS = ["recurrent", "toeplitz", "chunked", "fft"]
QUICK_FORMS = FORMS[1:]
OPTIONS = {
    "fixed": {},
    "trainable": {"trainable_theta": True},
    "feedback": {"feedback": True},
    "both-ways": {"bidirectional": True},
    "all-at-once": {"bidirectional": True, "feedback": True, "trainable_theta": True},
}


def memory(form: str, channels: int, order: int, theta: float, **options: bool) -> LMUMemory:
    made = LMUMemory(channels, order, theta, form=form, **options).double()
    made.reset_parameters()  # log θ to the last digit
    if made.e_m is not None:  # zero would hide it
        with torch.no_grad():
            made.e_m.copy_(torch.linspace(-0.02, 0.03, order))
    return made


def by_hand(u: Tensor, order: int, theta: float, e_m: Tensor | None = None) -> Tensor:
    """The definition, one channel and one step at a time, in float64."""
    a, b = discretise(*legendre(order), theta)
    m = torch.zeros(*u.shape, order, dtype=torch.float64)
    for clip in range(u.shape[0]):
        for channel in range(u.shape[2]):
            state = torch.zeros(order, dtype=torch.float64)
            for t in range(u.shape[1]):
                drive = u[clip, t, channel].double()
                if e_m is not None:
                    drive = drive + e_m.double() @ state
                state = a @ state + b * drive
                m[clip, t, channel] = state
    return m


def test_the_first_entries_of_the_delay_network_are_those_of_the_paper():
    a, b = legendre(3)
    assert a.tolist() == [[-1, -1, -1], [3, -3, -3], [-5, 5, -5]]
    assert b.tolist() == [1, -3, 5]


@pytest.mark.parametrize(("order", "theta"), [(4, 10.0), (16, 48.0), (64, 1000.0)])
def test_discretisation_is_the_zero_order_hold_of_scipy(order: int, theta: float):
    from scipy.signal import cont2discrete  # slow to import

    a, b = legendre(order)
    ours = discretise(a, b, theta)
    system = ((a / theta).numpy(), (b / theta)[:, None].numpy())
    held, drive, *_ = cont2discrete((*system, torch.eye(order).numpy(), 0), dt=1.0, method="zoh")
    torch.testing.assert_close(ours[0], torch.from_numpy(held), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours[1], torch.from_numpy(drive[:, 0]), rtol=0, atol=1e-12)


def test_the_memory_plays_a_slow_sine_back_theta_steps_later():
    order, theta, period = 12, 50, 80.0
    u = torch.sin(2 * torch.pi * torch.arange(300, dtype=torch.float64) / period)
    m = LMUMemory(1, order, theta)(u[None, :, None])[0, :, 0]
    delayed = m.sum(-1)  # P_n(1) = 1 for every n: the far end of the window
    torch.testing.assert_close(delayed[150:], u[150 - theta : -theta], rtol=0, atol=0.05)
    now = m @ torch.tensor([(-1.0) ** n for n in range(order)], dtype=torch.float64)
    torch.testing.assert_close(now[150:], u[150:], rtol=0, atol=0.05)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("time", "channels", "order"), [(1, 2, 3), (37, 2, 5), (70, 4, 6)])
def test_every_form_equals_the_recurrence_by_hand(
    time: int, channels: int, order: int, options: dict[str, bool]
):
    u = torch.randn(2, time, channels, dtype=torch.float64)
    e_m = torch.linspace(-0.02, 0.03, order) if "feedback" in options else None
    expected = by_hand(u, order, 20.0, e_m)
    if "bidirectional" in options:
        half = channels // 2
        back = by_hand(u[..., half:].flip(1), order, 20.0, e_m).flip(1)
        expected = torch.cat([expected[:, :, :half], back], dim=2)
    for form in FORMS:
        made = memory(form, channels, order, 20.0, **options)
        torch.testing.assert_close(made(u), expected, rtol=0, atol=1e-7, msg=form)
        wide = made.float()(u.float())
        torch.testing.assert_close(wide.double(), expected, rtol=0, atol=1e-5, msg=form)


@pytest.mark.guides
@pytest.mark.parametrize("form", QUICK_FORMS)
def test_float32_forms_stay_within_1e_5_of_the_recurrence_at_the_guides_size(form: str):
    u = torch.randn(1, 500, 1)
    exact = LMUMemory(1, 256, 1000.0, form="recurrent")(u.double())
    got = LMUMemory(1, 256, 1000.0, form=form)(u)
    assert (got - exact).abs().max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_mixing_equals_a_linear_map_of_the_memory(form: str, options: dict[str, bool]):
    for channels in (2,) if "bidirectional" in options else (1, 2):
        made = memory(form, channels, 6, 20.0, **options)
        u = torch.randn(2, 70, channels, dtype=torch.float64)
        weight = torch.randn(5, channels * 6, dtype=torch.float64)
        expected = F.linear(made(u).flatten(-2), weight)
        torch.testing.assert_close(made.mix(u, weight), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_are_exact(form: str, options: dict[str, bool]):
    made = memory(form, 2, 3, 5.0, **options)
    u = torch.randn(2, 19, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    both, parameters = Both(made), dict(Both(made).named_parameters())

    def run(u: Tensor, weight: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        state = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(both, state, (u, weight))

    assert torch.autograd.gradcheck(run, (u, weight, *parameters.values()), fast_mode=True)


class Both(torch.nn.Module):
    """The memory, and what `mix` makes of it."""

    def __init__(self, m: LMUMemory) -> None:
        super().__init__()
        self.m = m

    def forward(self, u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.m(u), self.m.mix(u, weight)


def test_the_gradient_of_a_mixed_single_channel_is_exact():
    made = memory("fft", 1, 4, 7.0, feedback=True)
    u = torch.randn(2, 21, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(u: Tensor, weight: Tensor, e_m: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(Both(made), {"m.e_m": e_m}, (u, weight))

    assert torch.autograd.gradcheck(run, (u, weight, made.e_m))


@pytest.mark.parametrize("form", FORMS)
def test_the_memory_is_causal(form: str):
    made = LMUMemory(2, 6, 20.0, form=form)
    u = torch.randn(1, 100, 2, dtype=torch.float64)
    later = u.clone()
    later[:, 60:] += 100.0
    torch.testing.assert_close(made(u)[:, :60], made(later)[:, :60], rtol=0, atol=1e-10)
    assert (made(u)[:, 60] - made(later)[:, 60]).abs().max() > 1


def test_stepping_equals_the_whole_sequence():
    made = memory("auto", 3, 8, 30.0, feedback=True).float()
    u = torch.randn(2, 90, 3)
    state = made.initial_state(2)
    stepped = []
    for t in range(90):
        state = made.step(u[:, t], state)
        stepped.append(state)
    torch.testing.assert_close(torch.stack(stepped, 1), made(u), rtol=0, atol=1e-5)


def test_a_memory_that_looks_ahead_refuses_to_step():
    made = LMUMemory(2, 4, 10.0, bidirectional=True)
    with pytest.raises(ValueError, match="looks ahead"):
        made.step(torch.zeros(1, 2), made.initial_state(1))


@pytest.mark.parametrize("form", FORMS)
def test_under_bfloat16_the_error_stays_that_of_one_rounding(form: str):
    """A recurrence kept in bfloat16 would drift by more than a tenth."""
    made = LMUMemory(2, 16, 48.0, form=form)
    u = torch.randn(2, 400, 2)
    exact = made(u.double())
    with torch.autocast("cpu", torch.bfloat16):
        low = made(u.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low - exact).norm() / exact.norm() < 0.006


def test_the_transforms_run_in_float32_whatever_autocast_says():
    made, u = LMUMemory(1, 80, 100.0, form="fft"), torch.randn(1, 200, 1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = made(u)
    torch.testing.assert_close(inside, made(u), rtol=0, atol=0)


def test_what_evaluation_made_in_inference_mode_serves_training():
    for form in QUICK_FORMS:
        made = LMUMemory(2, 7, 33.0, form=form)
        with torch.inference_mode():
            made(torch.randn(1, 80, 2))
        u = torch.randn(1, 80, 2, requires_grad=True)
        made(u).sum().backward()
        assert u.grad is not None


def test_a_copy_on_the_meta_device_is_whole_again_after_a_reset():
    with torch.device("meta"):
        made = LMUMemory(2, 8, 20.0, trainable_theta=True)
    made.to_empty(device="cpu")
    made.reset_parameters()
    u = torch.randn(1, 30, 2)
    torch.testing.assert_close(made(u), LMUMemory(2, 8, 20.0)(u), rtol=0, atol=1e-5)


def test_a_learned_window_moves_when_trained():
    made = LMUMemory(1, 6, 20.0, trainable_theta=True)
    u = torch.randn(4, 60, 1)
    target = LMUMemory(1, 6, 30.0)(u)
    before = copy.deepcopy(made)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        F.mse_loss(made(u), target).backward()
        optimizer.step()
    assert before.log_theta.exp().item() == pytest.approx(20.0)
    assert made.log_theta.exp().item() == pytest.approx(30.0, rel=0.05)


def test_short_sequences_take_one_product_and_large_orders_the_transforms():
    assert choose_form("cpu", 50, 32, 8) == "toeplitz"
    assert choose_form("cpu", 400, 32, 16) == "chunked"
    assert choose_form("cpu", 500, 1, 256) == "fft"
    assert choose_form("cpu", 2000, 1, 256) == "chunked"
    assert LMUMemory(1, 128, 1000.0)._form(torch.zeros(1, 500, 1)) == "chunked"
    assert LMUMemory(1, 128, 1000.0, feedback=True)._form(torch.zeros(1, 500, 1)) == "fft"


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="fft"):
        LMUMemory(1, 4, 10.0, form="quick")  # type: ignore[arg-type]
