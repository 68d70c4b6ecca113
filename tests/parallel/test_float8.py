"""`training.precision: fp8`: which layers, where it is refused, and what training computes with it.

Products are torchao's emulation here: values rounded as on a GPU, and multiplied in float32.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.errors import RecipeError
from muster.models.decoder import Decoder
from muster.models.presets import configure
from muster.models.whisper.model import Whisper
from muster.parallel import float8
from muster.parallel.apply import apply
from muster.parallel.conflicts import refuse_conflicts
from muster.parallel.engine import Engine
from muster.parallel.gradients import clip_divisor
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.training.checkpoint import Checkpoints
from muster.training.optimizer import make_optimizer
from muster.training.precision import resolve_precision
from parallel.models import LLAMA, LR, Maker, make_batch, make_functions, make_recipe, share

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TIME = 16
CONFIG = dataclasses.replace(LLAMA, layers=2, width=32, hidden=64, vocab=48, positions=TIME)
# float8 keeps 4 bits of a weight or an input, and 3 of a gradient; errors of many products average out.
LOSS, NORM = 5e-3, 5e-2


def decoder(preset: str, **fields: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(configure(preset, layers=1, **fields))  # type: ignore[arg-type]


def chosen(model: nn.Module, shards: int = 1) -> tuple[set[str], bool]:
    names, gathers = float8.choose(model, model.plan, shards)  # type: ignore[arg-type]
    return {name.removeprefix("blocks.0.") for name in names}, gathers


def test_large_matrices_of_the_blocks_are_converted_and_no_others():
    """k and v of 4 heads are small; the head, of 32000 × 2048, is no layer of a block."""
    feed_forward = {"feed_forward.gate", "feed_forward.up", "feed_forward.down"}
    attention = {"attention.q", "attention.o"}
    model = decoder("llama-1b")
    assert chosen(model) == (feed_forward | attention, False)
    assert chosen(model, shards=8) == (feed_forward | attention, True)
    assert chosen(model, shards=3) == (feed_forward | attention, False)  # of 2048 rows
    assert chosen(decoder("llama-1b", hidden=5640), shards=8) == (attention, True)  # 16 × 352.5
    assert chosen(decoder("llama-1b", hidden=1536))[0] == feed_forward | attention
    assert chosen(decoder("llama-1b", hidden=1520))[0] == attention


def test_adapters_stay_as_they_are():
    """Beside a layer with the names that peft gives them, however large."""
    model = decoder("llama-1b")
    feed_forward = model.blocks["0"].feed_forward
    with torch.device("meta"):
        adapter = nn.ModuleDict({"default": nn.Linear(2048, 8192, bias=False)})
    parts = {"base_layer": feed_forward.up, "lora_A": adapter}
    feed_forward.up = nn.ModuleDict(parts)  # type: ignore[assignment]
    names, _ = chosen(model)
    assert {name for name in names if ".up" in name} == {"feed_forward.up.base_layer"}


def test_a_model_that_cannot_gain_is_refused():
    with pytest.raises(
        RecipeError, match=r"training\.precision: fp8 would convert no layer .*bf16"
    ):
        chosen(decoder("gpt2"))
    with torch.device("meta"):
        whisper = Whisper(configure("whisper-large-v3", encoder_layers=1, decoder_layers=1))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"training\.precision: fp8 is for causal-lm: .*Whisper"):
        chosen(whisper)


@pytest.mark.parametrize(
    ("layout", "length", "words"),
    [
        (Layout(shard=2, zero=2), 64, "under ddp, fsdp and hsdp; this is"),
        (Layout(tensor=2), 64, "under ddp, fsdp and hsdp; this is"),
        (Layout(pipeline=2), 64, "under ddp, fsdp and hsdp; this is"),
        (Layout(), 100, r"data\.sequence_length: .* 100 is none; use 96, or"),
    ],
)
def test_what_float8_cannot_be_combined_with_is_refused_by_name(layout, length, words):
    with pytest.raises(RecipeError, match=words):
        refuse_conflicts(make_recipe(time=length, precision="fp8"), layout)
    refuse_conflicts(make_recipe(time=length, precision="bf16"), layout)
    refuse_conflicts(make_recipe(time=64, precision="fp8"), Layout(replicate=2, shard=2))


def test_devices_without_float8_are_refused_by_name(monkeypatch):
    with pytest.raises(RecipeError, match=r"training\.precision: fp8 .* a CPU; use bf16"):
        resolve_precision("fp8", CPU)
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RecipeError, match=r"NVIDIA A100 has no float8 .* 8\.0, .* use bf16"):
        resolve_precision("fp8", GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(RecipeError, match=r"needs torchao: pip install 'muster-train\[fp8\]'"):
        resolve_precision("fp8", GPU)
    monkeypatch.setattr(float8, "find_spec", lambda name: name)
    assert resolve_precision("fp8", GPU) == "bf16"


def engine_for(mesh: Mesh, strategy: str, kind: float8.Float8) -> Engine:
    recipe = make_recipe({"strategy": strategy}, time=TIME, precision="bf16")
    mesh = mesh.with_layout(layout_for(recipe.distributed, mesh.world))
    made = lambda named: make_optimizer(recipe.training, named)  # noqa: E731
    return apply(Maker(CONFIG), mesh, recipe, "bf16", made, float8=kind)


def steps(engine: Engine, mesh: Mesh, count: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each, on one batch that ranks share."""
    batch = make_batch(CONFIG, 4, time=TIME)
    mine = share(batch, mesh.rank, mesh.world)
    functions = dataclasses.replace(
        make_functions(batch.units), autocast=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    found = []
    for _ in range(count):
        (loss,) = engine.accumulate([mine], functions)
        norm = engine.grad_norm()
        engine.step(LR, clip_divisor(norm, 1.0, 1.0), norm.isfinite())
        engine.zero_grad()
        dist.all_reduce(loss)
        found.append((float(loss) / batch.units, float(norm)))
    return found


def courses(mesh: Mesh, folder: str) -> dict[str, Any]:
    """What the tests below check. In one function: a rank imports torchao in it, which takes seconds."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        plain, rounded = (engine_for(mesh, strategy, kind) for kind in ("none", "emulated"))
        found[strategy] = steps(plain, mesh, 2), steps(rounded, mesh, 2)
        found[f"{strategy} names"] = [list(e.state()["model"]) for e in (plain, rounded)]
    found["gathered"] = _gathered(rounded)
    found["on disk"] = {type(t.to_local()).__name__ for t in rounded.state()["model"].values()}
    found |= _resumed(mesh, Path(folder), plain, rounded)
    return found


def _gathered(engine: Engine) -> tuple[str, bool]:
    """The type of a gathered weight's numbers, and whether its scale was computed with the others', from
    the present values, as a power of two."""
    block = engine.parts[0].blocks["0"]  # type: ignore[union-attr, index]
    sharded = block.feed_forward.up.weight
    ahead, largest = sharded._local_tensor._precomputed_scale, sharded.full_tensor().abs().max()
    block.unshard()
    weight = block.feed_forward.up.weight
    dtype, scale = weight._data.dtype, weight._scale
    block.reshard()
    exact = torch.finfo(dtype).max / largest
    return str(dtype), ahead is scale and bool(scale == exact.log2().floor().exp2())


def _resumed(mesh: Mesh, folder: Path, plain: Engine, rounded: Engine) -> dict[str, Any]:
    """Losses after a step from checkpoints of each kind, in the engine that saved them and in the other."""
    found = {}
    for name, saving in (("bf16", plain), ("fp8", rounded)):
        checkpoints = Checkpoints(folder / name, mesh, {}, {}, keep=1, asynchronous=False)
        checkpoints.save(2, saving, {})
        there = steps(saving, mesh, 2)
        saved, _ = checkpoints.newest()
        assert saved is not None
        for kind in ("none", "emulated"):
            engine = engine_for(mesh, "fsdp", kind)
            checkpoints.load(saved, engine)
            found[f"{name} as {kind}"] = steps(engine, mesh, 2), there
    return found


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    if find_spec("torchao") is None:
        pytest.skip("needs torchao")
    first, second = ranks(2)(courses, str(tmp_path_factory.mktemp("float8")))
    assert first == second
    return first


def assert_near(pairs: tuple[list[tuple[float, float]], list[tuple[float, float]]]) -> None:
    for (loss, norm), (other, other_norm) in zip(*pairs, strict=True):
        assert loss == pytest.approx(other, rel=LOSS)
        assert norm == pytest.approx(other_norm, rel=NORM)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_float8_stays_near_bf16(found, strategy):
    plain, rounded = found[strategy]
    assert_near((plain, rounded))
    assert plain != rounded


def test_weights_keep_their_names_and_are_saved_as_plain_tensors(found):
    for strategy in ("ddp", "fsdp"):
        plain, rounded = found[f"{strategy} names"]
        assert plain == rounded
    assert found["on disk"] == {"Tensor"}


def test_fsdp_gathers_float8_with_scales_of_the_present_weights(found):
    assert found["gathered"] == ("torch.float8_e4m3fn", True)


@pytest.mark.parametrize("saved", ["bf16", "fp8"])
def test_a_run_goes_on_in_either_precision(found, saved):
    exactly, nearly = ("none", "emulated") if saved == "bf16" else ("emulated", "none")
    resumed, there = found[f"{saved} as {exactly}"]
    assert resumed == there
    assert_near(found[f"{saved} as {nearly}"])
