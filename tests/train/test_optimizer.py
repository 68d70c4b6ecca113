from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from muster.recipe.training import Training
from muster.training.optimizer import learning_rate, make_optimizer, peak_lr
from muster.training.precision import LossScale, resolve_precision, shared_precision


def training(**changes: object) -> Training:
    return Training.model_validate({"steps": 100, "lr": 1.0, "warmup_steps": 10, **changes})


def test_warm_up_rises_in_equal_steps_to_the_peak():
    rates = [learning_rate(training(), step, 100) for step in range(11)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("schedule", "halfway"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)]
)
def test_schedules_at_half_time_and_at_the_end(schedule, halfway):
    options = training(schedule=schedule, final_lr_ratio=0.0)
    assert learning_rate(options, 55, 100) == pytest.approx(halfway)
    assert learning_rate(options, 100, 100) == pytest.approx(1.0 if schedule == "constant" else 0.0)


def test_the_schedule_ends_at_its_final_ratio():
    assert learning_rate(training(final_lr_ratio=0.1), 100, 100) == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_and_ends_in_a_straight_line():
    options = training(schedule="wsd", decay_steps=20, final_lr_ratio=0.1)
    rates = [learning_rate(options, step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10:81] == pytest.approx([1.0] * 71)
    assert rates[90] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_wsd_decays_in_the_last_tenth_by_default():
    rates = [learning_rate(training(schedule="wsd"), step, 100) for step in (90, 95, 100)]
    assert rates == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decay_steps": 5}, "schedule=cosine has no such part"),
        ({"schedule": "wsd", "decay_steps": 95}, "train for 105 steps"),
        ({"momentum": 0.9}, "optimizer=adamw does not use"),
        ({"optimizer": "sgd", "betas": (0.9, 0.95)}, "betas is set, which optimizer=sgd"),
        ({"optimizer": "adafactor", "eps": 1e-6}, "eps is set, which optimizer=adafactor"),
    ],
)
def test_keys_without_effect_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        training(**changes)


def test_a_saved_recipe_of_any_optimizer_is_accepted_again():
    for name in ("adamw", "sgd", "adafactor", "muon", "adamw-8bit"):
        assert Training.model_validate(training(optimizer=name).model_dump()).optimizer == name


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)]
)
def test_lr_scaling_follows_the_global_batch_as_the_guide_has_it(scaling, expected):
    options = training(lr=1e-3, lr_scaling=scaling, global_batch_size=64, reference_batch_size=16)
    assert peak_lr(options) == pytest.approx(expected)


def test_weight_decay_spares_vectors():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(training(weight_decay=0.5), model.named_parameters())
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.dim() >= 2} == {0.5}
    assert {decay[id(p)] for p in model.parameters() if p.dim() < 2} == {0.0}


def test_the_loss_scale_halves_on_overflow_and_grows_after_good_steps():
    scale = LossScale(8.0, dynamic=True, grow_every=2)
    assert scale.update(finite=False)
    assert scale.value == 4.0
    assert not scale.update(finite=True)
    assert not scale.update(finite=True)
    assert scale.value == 8.0


def test_an_overflow_at_scale_one_is_a_bad_step():
    assert not LossScale(1.0, dynamic=True).update(finite=False)


def test_scaling_by_a_power_of_two_and_back_changes_no_gradient():
    weight = torch.randn(4, requires_grad=True)
    (weight.square().sum() * 2.0**16).backward()
    scaled = weight.grad / 2.0**16
    weight.grad = None
    weight.square().sum().backward()
    assert torch.equal(scaled, weight.grad)
    assert math.isfinite(float(scaled.sum()))


GPU = torch.device("cuda", 0)


def has_bf16(patch: pytest.MonkeyPatch, really: bool) -> None:
    """What torch says of an A100, or of a V100 or T4, which emulate it."""
    patch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or really,
    )


@pytest.mark.parametrize(("really", "precision"), [(True, "bf16"), (False, "fp32")])
def test_auto_takes_no_bf16_that_is_only_emulated(monkeypatch, really, precision):
    has_bf16(monkeypatch, really)
    assert resolve_precision("auto", GPU) == precision
    assert resolve_precision("bf16", GPU) == "bf16"
    assert resolve_precision("auto", torch.device("cpu")) == "fp32"


def precision_on(mesh, really: list[bool]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        has_bf16(patch, really[mesh.rank])
        return shared_precision("auto", replace(mesh, device=GPU))


def test_ranks_on_different_gpus_compute_in_the_same_precision(ranks):
    assert ranks(2)(precision_on, [True, False]) == ["fp32", "fp32"]
    assert ranks(2)(precision_on, [True, True]) == ["bf16", "bf16"]
