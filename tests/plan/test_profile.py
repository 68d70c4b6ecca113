"""Short recordings, scaled, say what recording the whole model says; and what really happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from muster.hardware import catalogue
from muster.parallel.blocks import checkpoint_activations
from muster.planner.compiled import Compiler, _allocate_outputs
from muster.planner.fake_cuda import fake_cuda
from muster.planner.fused_kernels import Summary
from muster.planner.kernels import Speeds, host_seconds
from muster.planner.profile import FEW, KEPT, MORE, ExecutionMode, ProfileRecorder, record
from muster.planner.subject import blocks_of
from muster.planner.trace import Recorder, Trace
from plan.subjects import GPT, LLAMA, subject

MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "whisper": ("whisper-micro", "data.window=3", "data.cache_gib=0.1"),
    "lmu": ("speech", "data.cache_gib=0.1"),
    "resnet": ("resnet-18", "data.image_size=64"),
}
MODES = {
    "plain": ExecutionMode("bf16"),
    "fp32": ExecutionMode("fp32"),
    "full": ExecutionMode("bf16", "full"),
    "selective": ExecutionMode("bf16", "selective"),
    "rounded": ExecutionMode("bf16", rounded_weights=True),
}


def depths_of(thing):
    return {name: len(b) for name, b in blocks_of(thing.model, thing.plan.blocks).items()}


def whole(thing, mode: ExecutionMode, rows: int):
    """A recording of all blocks at once."""
    deep = replace(thing)
    with torch.device("meta"):
        vars(deep)["shallow"] = thing.task.build_model()  # the cached property
    return ProfileRecorder(deep, mode).record(depths_of(thing), rows)


# Each pair with --full.
ORDINARY = {("gpt", "selective"), ("llama", "rounded")}


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        pytest.param(
            model,
            mode,
            id=f"{model}-{name}",
            marks=() if (model, name) in ORDINARY else pytest.mark.full,
        )
        for model in MODELS
        for name, mode in MODES.items()
    ],
)
def test_two_blocks_and_a_third_tell_of_all(model, mode):
    thing, rows = subject(*MODELS[model]), 5
    load = record(thing, mode).workload(depths_of(thing), rows)
    seen = whole(thing, mode, rows)
    flops = sum(cost.flops for cost, _ in seen.ops)
    assert sum(w.flops * n for w, _, n in load.ops) == pytest.approx(flops, rel=1e-9)
    traffic = sum(cost.bytes for cost, _ in seen.ops)
    assert sum(w.bytes * n for w, _, n in load.ops) == pytest.approx(traffic, rel=0.01)
    assert load.calls == in_all(seen)
    assert load.kept == pytest.approx(seen.peaks[KEPT].activations, rel=0.005)
    for measure in ("activations", "with_gradients"):
        highest = max(getattr(h, measure) for h in seen.peaks.values())
        told = max(getattr(h, measure) for h in load.peaks.values())
        assert told == pytest.approx(highest, rel=0.005)


def in_all(trace: Trace) -> dict[str, int]:
    calls: Counter[str] = Counter()
    for (_, call), count in trace.calls.items():
        calls[call] += count
    return dict(calls)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_is_highest_for_few_samples_is_not_what_is_for_many(mode):
    """Few short sequences: the embedding's gradient. Many: the logits."""
    thing, mode = subject("gpt2", "data.sequence_length=128"), ExecutionMode("bf16", mode)
    load = record(thing, mode).workload(depths_of(thing), 256)
    seen = whole(thing, mode, 256)
    highest = max(h.activations for h in seen.peaks.values())
    assert max(h.activations for h in load.peaks.values()) == pytest.approx(highest, rel=1e-3)


def test_multiplications_are_those_that_torch_counts():
    thing = subject(*GPT)
    load = record(thing, ExecutionMode("fp32")).workload(depths_of(thing), FEW)
    batch = thing.batch(FEW, costliest=True)
    model = thing.task.build_model()
    with FlopCounterMode(display=False) as counter:
        inputs = thing.task.inputs(batch)
        thing.task.loss(model(*inputs.args, **inputs.shared), batch).backward()
    counts = counter.get_flop_counts()["Global"]
    theirs = sum(n for op, n in counts.items() if "scaled_dot" not in str(op))
    ours = sum(w.flops * n for w, _, n in load.ops if w.kind == "matrix")
    padded = thing.task.config.vocab  # a GPU's rows of the head are filled up to 64
    extra = 3 * 2 * FEW * 64 * (-padded % 64) * thing.task.config.width
    assert ours == theirs + extra


def test_the_recorder_sees_what_real_tensors_take():
    """The same step on the CPU, with values and without: the same memory, to the byte."""
    thing = subject(*LLAMA)

    def step(model, batch) -> Recorder:
        recorder = Recorder()
        for p in model.parameters():
            recorder.track(p, "weights")
        with recorder:
            recorder.phase = "forward"
            inputs = thing.task.inputs(batch)
            thing.task.loss(model(*inputs.args, **inputs.shared), batch).backward()
        return recorder

    from torch._subclasses.fake_tensor import FakeTensorMode

    from muster.planner.subject import fake

    batch = thing.batch(MORE, costliest=True)
    real = step(thing.task.build_model(), batch)
    with torch.device("meta"):
        model = thing.task.build_model()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        without = step(model.to_empty(device="cpu"), fake(batch, mode))
    assert without.trace.peak == real.trace.peak
    assert len(without.trace.ops) == len(real.trace.ops)


@pytest.mark.full
def test_a_compiled_block_keeps_less_and_starts_fewer_kernels():
    thing = subject(*GPT)
    plain = record(thing, ExecutionMode("bf16")).workload(depths_of(thing), 8)
    compiled = record(thing, ExecutionMode("bf16", compiled=True)).workload(depths_of(thing), 8)
    assert compiled.kept < 0.9 * plain.kept
    assert sum(n for *_, n in compiled.ops) < 0.8 * sum(n for *_, n in plain.ops)
    products = [
        sum(w.flops * n for w, _, n in load.ops if w.kind == "matrix") for load in (plain, compiled)
    ]
    assert products[0] == pytest.approx(products[1], rel=1e-9)


@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["uncompiled", "compiled"],
)
def test_a_plain_recording_tells_what_checkpointing_takes_at_least(compiled):
    thing, speeds = subject(*GPT), Speeds.of(catalogue.find("h100"))
    plain = record(thing, ExecutionMode("bf16", compiled=compiled))
    for mode in ("selective", "full"):
        told = plain.workload(depths_of(thing), 8).with_recomputation(mode)
        real = record(thing, ExecutionMode("bf16", mode, compiled)).workload(depths_of(thing), 8)
        launching = [host_seconds(load.calls, speeds) for load in (told, real)]
        assert 0.75 * launching[1] < launching[0] <= launching[1]
        running = [
            sum(n * speeds.seconds(cost) for cost, _, n in load.ops) for load in (told, real)
        ]
        assert 0.8 * running[1] < running[0] <= 1.02 * running[1]


def test_checkpointing_nothing_takes_no_longer():
    """A model without blocks, which is not compiled either."""
    thing = subject("mnist")
    plain = record(thing, ExecutionMode("bf16")).workload(depths_of(thing), 8)
    assert plain.with_recomputation("full").ops == plain.ops


@pytest.mark.parametrize(
    "checkpointing",
    ["selective", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("none", "full"))],
)
def test_a_compiled_block_saves_what_torch_compile_does(checkpointing):
    """By the partitioner of torch's own compilers, in bytes."""
    told, real = one_block(), one_block()
    Compiler(Recorder()).module(told, told[0], checkpointing)
    checkpoint_activations(list(real), checkpointing)
    real[0].compile(backend="aot_eager_decomp_partition")
    assert saved_bytes(told) == saved_bytes(real) > 0


def test_what_compiling_keeps_is_not_recorded():
    """The first recording with a compiler, which compiles, is that of a later one."""
    thing, mode = subject(*GPT), ExecutionMode("bf16", compiled=True)
    compiler = Compiler()
    first, later = (record(thing, mode, compiler=compiler) for _ in range(2))
    assert first == later


def test_what_is_pointwise_is_computed_in_the_kernel_that_reads_it():
    """Not written before a product and read after it; a sum is."""

    def pointwise(x, w):
        return torch.sigmoid(x) * (x @ w)

    def reduced(x, w):
        return torch.sigmoid(x).sum(1, keepdim=True) * (x @ w)

    x, w = torch.empty(512, 256), torch.empty(256, 256)
    size = x.nbytes
    ((_, told),) = [Summary.of(make_fx(pointwise)(x, w)).costs]
    assert told.bytes == 3 * size, "x and the product, and the result"
    _, *told = Summary.of(make_fx(reduced)(x, w)).costs
    assert sum(cost.bytes for cost in told) == 3 * size + 2 * 512 * 4


def one_block() -> nn.Sequential:
    model = subject(*GPT).task.build_model()
    return nn.Sequential(model.blocks["0"])


def saved_bytes(model: nn.Sequential) -> int:
    """Kept from the forward to the backward pass, besides weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, 64, model[0].attention_norm.weight.numel(), requires_grad=True)
    model(x)  # compiles it
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(seen.values())


def test_only_micro_batches_of_equal_shapes_are_uniform():
    assert subject(*GPT).uniform
    assert subject(*MODELS["resnet"]).uniform
    assert not subject(*MODELS["lmu"]).uniform


def test_outputs_are_allocated_as_they_would_be_computed():
    """In the same layout, and as views of the same inputs and outputs."""

    def function(x, w):
        y = (x @ w).relu()
        return x, w.t(), y.transpose(0, 1), y.view(-1), y.split(2)[1], y.max(dim=0)[0], x * 2

    given = torch.ones(4, 3), torch.ones(3, 6)
    graph = make_fx(function, tracing_mode="fake")(*given)
    found = [
        [
            (t.shape, t.stride(), t.dtype, storages.index(t.untyped_storage().data_ptr()))
            for t in out
        ]
        for out in (graph(*given), _allocate_outputs(graph.graph, given))
        for storages in [[t.untyped_storage().data_ptr() for t in (*given, *out)]]
    ]
    assert found[0] == found[1]


@pytest.mark.full
def test_checkpointing_keeps_less_and_computes_more():
    thing = subject(*LLAMA)
    loads = {
        mode: record(thing, ExecutionMode("bf16", mode)).workload(depths_of(thing), 8)
        for mode in ("none", "selective", "full")
    }
    kept = [load.kept for load in loads.values()]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] < 0.5 * kept[0]
    flops = {m: sum(w.flops * n for w, _, n in load.ops) for m, load in loads.items()}
    assert flops["none"] == pytest.approx(flops["selective"], rel=1e-9)
    assert flops["full"] > 1.1 * flops["none"]


def test_planning_leaves_no_trace_in_torch():
    import torch.nn.functional as F

    before = {name: getattr(F, name) for name in ("layer_norm", "rms_norm", "ctc_loss", "softmax")}
    with pytest.raises(RuntimeError, match="on purpose"), fake_cuda():
        raise RuntimeError("on purpose")
    assert all(getattr(F, name) is function for name, function in before.items())
