"""SGD, Adafactor, Muon and 8-bit AdamW against torch's and torchao's own, whole and in shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muster.errors import RecipeError
from muster.parallel.engine import NamedParameters, full_tensor
from muster.parallel.optimizers.adafactor import Adafactor
from muster.recipe.training import Training
from muster.training.optimizer import make_optimizer
from parallel.models import GPT, course, make_batch, make_engine, micro_batches, single

DECAY, LR = 0.1, 1e-2
NAMES = ("sgd", "adafactor", "muon", "adamw-8bit")


@pytest.fixture(params=NAMES)
def name(request) -> str:
    if request.param == "adamw-8bit":
        pytest.importorskip("torchao")
    return request.param


def parameters() -> NamedParameters:
    """A matrix large enough for 8-bit blocks, one that is not, a stack of matrices, and a vector."""
    drawn = torch.Generator().manual_seed(0)
    shapes = {"large": (64, 128), "small": (5, 7), "stack": (3, 4, 6), "vector": (9,)}
    made = NamedParameters(
        (name, nn.Parameter(torch.randn(shape, generator=drawn))) for name, shape in shapes.items()
    )
    made.hidden = frozenset({"large", "small"})
    return made


def mine(name: str, named: NamedParameters) -> Any:
    training = Training(steps=1, optimizer=name, lr=LR, weight_decay=DECAY)
    return make_optimizer(training, named)


def reference(name: str, named: NamedParameters) -> list[Any]:
    matrices = [p for _, p in named if p.ndim > 1]
    vectors = [p for _, p in named if p.ndim == 1]
    hidden = [p for n, p in named if n in named.hidden]
    rest = [p for p in matrices if not any(p is h for h in hidden)]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adamw = {"lr": LR, "betas": (0.9, 0.98), "eps": 1e-8}
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=LR, momentum=0.9)]
    if name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=LR, foreach=False)]
    if name == "adamw-8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(groups, **adamw)]
    muon = {"momentum": 0.95, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    others = [{"params": rest, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.Muon(hidden, lr=LR, **muon), torch.optim.AdamW(others, **adamw)]


def gradients(named: NamedParameters, step: int) -> None:
    drawn = torch.Generator().manual_seed(1 + step)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=drawn)


def test_steps_are_those_of_the_library(name, monkeypatch):
    if name == "adamw-8bit":  # it would compile
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    if name == "muon":  # on CPUs ours computes in float32
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    ours, theirs = parameters(), parameters()
    optimizer, others = mine(name, ours), reference(name, theirs)
    for step in range(4):
        gradients(ours, step)
        gradients(theirs, step)
        for _, p in ours:
            p.grad *= 8.0
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        optimizer.step()
        for other in others:
            other.step()
    for (key, p), (_, q) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


def everything(optimizer: Any, named: NamedParameters) -> list[Tensor]:
    state = [t for _, p in named for t in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*(p for _, p in named), *state)]


@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_step_changes_neither_weights_nor_state(name, first):
    named = parameters()
    optimizer = mine(name, named)
    if not first:
        gradients(named, 0)
        optimizer.step()
        before = everything(optimizer, named)
    weights = [p.detach().clone() for _, p in named]
    gradients(named, 1)
    named[0][1].grad[3, 5] = torch.inf
    named[-1][1].grad[2] = torch.nan
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    optimizer.step()
    assert all(torch.equal(a, p) for a, (_, p) in zip(weights, named, strict=True))
    if first:  # the next step is as if it were the first
        fresh = parameters()
        other = mine(name, fresh)
        optimizer.grad_scale = optimizer.found_inf = None
        for steps, members in ((optimizer, named), (other, fresh)):
            gradients(members, 2)
            steps.step()
        pairs = zip(everything(optimizer, named), everything(other, fresh), strict=True)
    else:
        pairs = zip(before, everything(optimizer, named), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def train(mesh, optimizer: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(mesh, GPT, options, optimizer=optimizer)
    batch = make_batch(GPT, 8)
    norms = course(engine, micro_batches(mesh, options, batch, 2), batch.units, steps=4)
    whole = {n: full_tensor(t).clone() for n, t in engine.state()["model"].items()}
    if mesh.world > 1 and options.get("strategy") == "pipeline":
        for theirs in mesh.gather(whole):
            whole |= theirs
    return norms, whole


def alone(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    engine, batch = single(GPT, optimizer=optimizer), make_batch(GPT, 8)
    norms = course(engine, [batch], batch.units, steps=4)
    return norms, {n: t.clone() for n, t in engine.state()["model"].items()}


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert set(one) == set(other)
    apart = sum(float((one[n] - other[n]).square().sum()) for n in one)
    return (apart / sum(float(t.square().sum()) for t in one.values())) ** 0.5


LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "tensor"},
    "pipeline": {"strategy": "pipeline"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "hsdp": {"strategy": "hsdp", "replicate": 2},
    "tensor × fsdp": {"strategy": "hybrid", "tensor": 2},
    "offload": {"strategy": "fsdp", "fsdp": {"cpu_offload": True}},
}
FOUR = ("hsdp", "tensor × fsdp")
ORDINARY = {
    ("fsdp", "muon"),
    ("fsdp", "adafactor"),
    ("fsdp", "sgd"),
    ("fsdp", "adamw-8bit"),
}


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        pytest.param(x, o, marks=() if (x, o) in ORDINARY else pytest.mark.full)
        for x in LAYOUTS
        for o in NAMES
        if (o == "sgd" or "zero" not in x) and (x, o) != ("offload", "adamw-8bit")
    ],
)
def test_a_layout_gives_the_steps_of_one_process(ranks, layout, optimizer):
    pytest.importorskip("deepspeed" if "zero" in layout else "torch")
    if optimizer == "adamw-8bit":
        pytest.importorskip("torchao")
    norms, weights = alone(optimizer)
    world = 4 if layout in FOUR else 2
    for found, theirs in ranks(world)(train, optimizer, LAYOUTS[layout]):
        assert found == pytest.approx(norms, rel=1e-5)
        assert far(weights, theirs) < 1e-5


def train_wrongly(mesh, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    from muster.parallel.optimizers import adafactor

    right, adafactor.sum_over_ranks = adafactor.sum_over_ranks, lambda reductions: list(reductions)
    try:
        return train(mesh, "adafactor", options)
    finally:
        adafactor.sum_over_ranks = right


ODD = {
    "one row": (1, 6),
    "three rows": (3, 5),
    "one column": (6, 1),
    "stack": (2, 4, 6),
    "large": (64, 512),
}


def odd_parameters(mesh) -> NamedParameters:
    """On four ranks some have no row of these, and one has the only row."""
    drawn = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=drawn) for name, shape in ODD.items()}
    if mesh is None:
        made = NamedParameters((name, nn.Parameter(t)) for name, t in whole.items())
    else:
        axis = init_device_mesh("cpu", (mesh.world,))
        made = NamedParameters(
            (name, nn.Parameter(distribute_tensor(t, axis, [Shard(0)])))
            for name, t in whole.items()
        )
    made.hidden = frozenset(name for name, shape in ODD.items() if len(shape) == 2)
    return made


def odd_steps(mesh, optimizer: str) -> dict[str, Tensor]:
    named = odd_parameters(mesh)
    stepping = mine(optimizer, named)
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        for _, p in named:
            gradient = torch.randn(p.shape, generator=drawn)
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if mesh else gradient
        stepping.step()
    return {name: full_tensor(p).detach().clone() for name, p in named}


def test_ranks_without_a_row_of_a_matrix_step_as_one_process(ranks, name):
    alone = odd_steps(None, name)
    for found in ranks(4)(odd_steps, name):
        assert far(alone, found) < 1e-5


def test_means_over_shards_alone_are_noticed(ranks):
    weights = alone("adafactor")[1]
    assert far(weights, ranks(2)(train_wrongly, LAYOUTS["fsdp"])[0][1]) > 1e-4


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw-8bit"])
def test_zero_refuses_what_needs_matrices(ranks, optimizer):
    with pytest.raises(Exception, match=rf"training.optimizer: {optimizer} needs matrices"):
        ranks(2)(train, optimizer, {"strategy": "zero2"})


def test_without_torchao_the_message_has_the_command(monkeypatch):
    monkeypatch.setattr("muster.parallel.optimizers.facts.find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"pip install 'muster-train\[adamw-8bit\]'"):
        mine("adamw-8bit", parameters())


def test_adafactor_keeps_a_number_per_row_and_column():
    optimizer = Adafactor([{"params": [p := nn.Parameter(torch.zeros(7, 5))]}], lr=1.0)
    assert {n: tuple(t.shape) for n, t in optimizer.saved_state(p).items()} == {}
    p.grad = torch.ones(7, 5)
    optimizer.step()
    kept = {n: tuple(t.shape) for n, t in optimizer.saved_state(p).items()}
    assert kept == {"row_var": (7, 1), "col_var": (1, 5)}
