"""Cost of a model at any depth and micro-batch size, extrapolated from a few short recordings.

A stack of equal blocks is recorded with two and with three of them, for two micro-batch sizes. Cost
is linear in the number of blocks and in the number of samples. The model itself runs on fake
tensors: there are no per-architecture formulas.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from muster.models.plan import ParallelPlan
from muster.parallel import context
from muster.parallel.blocks import Checkpointing, checkpoint_activations, find_blocks
from muster.parallel.dtypes import DTYPES
from muster.parallel.layout import Layout
from muster.planner.compiled import Compiler
from muster.planner.fake_cuda import autocast, fake_cuda
from muster.planner.kernels import Call
from muster.planner.messages import Message
from muster.planner.meta import allocate
from muster.planner.op_cost import OpCost
from muster.planner.subject import DEEPEST, Subject, blocks_of, fake, truncate
from muster.planner.trace import MemoryPeak, Recorder, Trace, TracePoint
from muster.recipe.distributed import TensorOptions
from muster.torch_internals import FakeTensorMode

SHORT = DEEPEST - 1  # blocks of a stack in the shortest recording
FEW, MORE = 2, 4  # samples
KEPT = TracePoint("kept")  # between the forward and the backward pass

Depths = Mapping[str, int]  # blocks by stack
Traces = dict[str, Trace]  # with one more block in a stack, by its name; without, by ""


@dataclass(frozen=True)
class ExecutionMode:
    """The settings that change what one rank computes."""

    precision: str
    checkpointing: Checkpointing = "none"
    compiled: bool = False
    rounded_weights: bool = False  # FSDP and ZeRO cast weights to the lower precision
    tensor: int = 1
    context: int = 1


@dataclass(frozen=True)
class SplitAxes:
    """Process groups of what is split besides the weights' shards; None where a size is 1."""

    tensor: DeviceMesh | None = None
    context: Any = None


@dataclass(frozen=True)
class ModelCost:
    """One rank's forward and backward of one micro-batch."""

    ops: list[tuple[OpCost, TracePoint, float]]  # with its count
    messages: list[tuple[Message, TracePoint, float]]
    calls: Mapping[Call, float]  # what the host does
    block_calls: Mapping[Call, float]  # of that, in the forward passes of blocks
    peaks: dict[TracePoint, MemoryPeak]

    def of_blocks(self) -> ModelCost:
        """Without what comes before and after the stacks of blocks."""

        def inside(recorded: Any) -> list[Any]:
            return [one for one in recorded if one[1].position.startswith("in ")]

        return replace(self, ops=inside(self.ops), messages=inside(self.messages))

    def with_recomputation(self, checkpointing: str) -> ModelCost:
        """A recording without activation checkpointing as it is with it at least, without its memory: the
        backward pass repeats the forward pass of the blocks. Selective checkpointing keeps the products;
        compiled, what is left is fused into kernels of the backward pass."""
        launch: Call = "op" if "op" in self.block_calls else "kernel"
        forward = [one for one in self.ops if one[1].in_forward_of_block]
        products = [one for one in forward if one[0].kind != "memory"]
        again = products if checkpointing == "full" else []
        if launch == "op":
            again = again + [one for one in forward if one[0].kind == "memory"]
        calls = defaultdict(float, self.calls)
        calls[launch] += sum(count for *_, count in again)
        if checkpointing == "selective" and launch == "op":
            calls["cached op"] = 2 * self.block_calls["op"]
        return replace(self, ops=self.ops + again, calls=calls)

    @property
    def kept(self) -> float:
        return self.peaks[KEPT].activations


@dataclass
class Profile:
    """Recordings of a model in one execution mode."""

    depths: dict[str, int]  # of the shortest
    short: tuple[Trace, Trace]  # for FEW and for MORE samples
    longer: dict[str, tuple[Trace, Trace]]  # with one more block in a stack

    def _timelines(self, more: Depths, rows: int) -> dict[TracePoint, NDArray[np.float64]]:
        short = _timelines(self.short, rows)
        found = dict(short)
        for stack, count in more.items():
            longer = _timelines(self.longer[stack], rows)
            for point, base in short.items():
                added = longer.get(point, base)
                if added.shape == base.shape:
                    found[point] = found[point] + count * (added - base)
                else:
                    found[point] = found[point] + count * (added.max(axis=0) - base.max(axis=0))
        return found

    def workload(self, depths: Depths, rows: int) -> ModelCost:
        more = {stack: depths[stack] - self.depths[stack] for stack in self.longer}
        peaks = {
            point: MemoryPeak(*(float(v) for v in timeline.max(axis=0)))
            for point, timeline in self._timelines(more, rows).items()
        }
        ops = list(_interpolate([t.ops for t in self.short], rows, 1.0))
        messages = list(_interpolate([t.messages for t in self.short], rows, 1.0))
        calls = self._calls(more, lambda _: True)
        block_calls = self._calls(more, lambda point: point.in_forward_of_block)
        empty = {stack for stack, depth in depths.items() if not depth}  # of a pipeline stage
        ops, messages = (_without(found, empty) for found in (ops, messages))
        for stack, count in more.items():
            if stack not in empty:
                added = [_middle(t.ops, stack) for t in self.longer[stack]]
                ops += _interpolate(added, rows, count)
                sent = [_middle(t.messages, stack) for t in self.longer[stack]]
                messages += _interpolate(sent, rows, count)
        return ModelCost(ops, messages, calls, block_calls, peaks)

    def _calls(self, more: Depths, counted: Callable[[TracePoint], bool]) -> dict[Call, float]:
        """At the trace points that are `counted`."""
        found: Counter[Call] = Counter()

        def add(trace: Trace, times: int) -> None:
            for (point, call), count in trace.calls.items():
                if counted(point):
                    found[call] += times * count

        add(self.short[0], 1 - sum(more.values()))
        for stack, count in more.items():
            add(self.longer[stack][0], count)
        return dict(found)


def _without(recorded: list[Any], stacks: Collection[str]) -> list[Any]:
    """Without the operations of blocks of these stacks."""
    return [
        one
        for one in recorded
        if one[1].region not in stacks or not one[1].position.startswith("in ")
    ]


def _middle(recorded: Sequence[tuple[Any, TracePoint]], stack: str) -> list[tuple[Any, TracePoint]]:
    """The operations of one block that is neither first nor last."""
    return [(x, m) for x, m in recorded if m.region == stack and m.position.endswith("middle")]


def _timelines(traces: tuple[Trace, Trace], rows: int) -> dict[TracePoint, NDArray[np.float64]]:
    """[allocations, 2]: bytes allocated after each. Each allocation is linear in the samples, the peak is
    not: with more samples it may be at another allocation. Hence all are extrapolated."""
    step = (rows - FEW) / (MORE - FEW)
    found = {}
    for point, timeline in traces[0].timeline.items():
        few, more = np.array(timeline, float), np.array(traces[1].timeline.get(point, []), float)
        if few.shape != more.shape:  # control flow depends on the batch size
            few, more = few.max(axis=0, keepdims=True), more.max(axis=0, initial=0, keepdims=True)
        found[point] = few + step * (more - few)
    return found


def _interpolate(
    recorded: Sequence[Sequence[tuple[Any, TracePoint]]], rows: int, count: float
) -> Iterator[tuple[Any, TracePoint, float]]:
    """Each operation for `rows` samples, linear between the two recordings. Where these differ in their
    operations, the larger one is scaled."""
    few, more = recorded
    step = (rows - FEW) / (MORE - FEW)
    if [_name(x) for x, _ in few] == [_name(x) for x, _ in more]:
        for (a, point), (b, _) in zip(few, more, strict=True):
            yield _interpolated(a, b, step), point, count
    else:
        for x, point in more:
            yield _scaled(x, rows / MORE), point, count


def _name(recorded: Any) -> tuple[str, int]:
    if isinstance(recorded, Message):
        return recorded.kind, len(recorded.ranks)
    return recorded.name, len(recorded.shape)


def _scaled(recorded: Any, factor: float) -> Any:
    if isinstance(recorded, Message):
        return replace(recorded, bytes=round(recorded.bytes * factor))
    return replace(recorded, flops=recorded.flops * factor, bytes=recorded.bytes * factor)


def _interpolated(few: Any, more: Any, step: float) -> Any:
    def at(a: float, b: float) -> float:
        return a + step * (b - a)

    if isinstance(few, Message):
        return replace(few, bytes=round(at(few.bytes, more.bytes)))
    return replace(
        few,
        flops=at(few.flops, more.flops),
        bytes=at(few.bytes, more.bytes),
        shape=tuple(round(at(a, b)) for a, b in zip(few.shape, more.shape, strict=True)),
    )


def record(subject: Subject, mode: ExecutionMode, **settings: Any) -> Profile:
    return ProfileRecorder(subject, mode, **settings).profile()


@dataclass
class ProfileRecorder:
    """`axes`: the ranks that split each matrix or sequence, if `mode` has any. `compiler`: with the graphs
    of earlier recordings cached."""

    subject: Subject
    mode: ExecutionMode
    costliest: bool = True
    axes: SplitAxes = SplitAxes()
    options: TensorOptions = field(default_factory=TensorOptions)
    compiler: Compiler = field(default_factory=Compiler)

    def profile(self, more: Callable[[], Traces | None] = lambda: None) -> Profile:
        """`more`: the traces for MORE samples, where another process makes them."""
        few = self.traces(FEW)
        several = more() or self.traces(MORE)
        pairs = {name: (few[name], several[name]) for name in few}
        return Profile(self.shortest, pairs.pop(""), pairs)

    def traces(self, rows: int) -> Traces:
        growing = {
            n: self.shortest | {n: DEEPEST} for n, size in self.stacks.items() if size > SHORT
        }
        return {
            name: self.record(depths, rows)
            for name, depths in ({"": self.shortest} | growing).items()
        }

    @cached_property
    def stacks(self) -> dict[str, int]:
        blocks = blocks_of(self.subject.model, self.subject.plan.blocks)
        return {name: len(stack) for name, stack in blocks.items()}

    @cached_property
    def shortest(self) -> dict[str, int]:
        return {name: min(SHORT, size) for name, size in self.stacks.items()}

    def record(self, depths: Depths, rows: int) -> Trace:
        plan, mode = self.subject.plan, self.mode
        model = copy.deepcopy(self.subject.shallow)
        truncate(model, plan, depths)
        if mode.rounded_weights and plan.cast_weights and mode.precision in DTYPES:
            model.to(DTYPES[mode.precision])
        recorder = self.compiler.recorder = self._split(model)
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        batch = self.subject.batch(rows, costliest=self.costliest)
        with fake_mode:
            allocate(model)
            for p in (*model.parameters(), *model.buffers()):
                recorder.track(p, "weights")
            _mark_gradients(model, recorder)
            self._wrap(model, plan, recorder)
            _mark_blocks(blocks_of(model, plan.blocks), recorder)
            with recorder, fake_cuda(), self._loss_context():
                self._step(model, fake(batch, fake_mode), recorder)
        return recorder.trace

    def _split(self, model: nn.Module) -> Recorder:
        """Between tensor and context ranks, in place; returns a recorder for it."""
        if self.axes.context is not None:
            context.split(model, self._layout, 0, self.axes.context)
        if self.axes.tensor is None:
            return Recorder()
        from muster.parallel import tensor
        from muster.planner.dtensor_recorder import DTensorRecorder

        tensor.split(model, self.axes.tensor, self.subject.plan, self.options)
        return DTensorRecorder()

    def _wrap(self, model: nn.Module, plan: ParallelPlan, recorder: Recorder) -> None:
        blocks = find_blocks(model, plan.blocks, "model.preset")
        if not self.compiles:
            recorder.caches = self.mode.checkpointing == "selective"
            checkpoint_activations(blocks, self.mode.checkpointing)
            return
        for block in blocks:
            self.compiler.module(model, block, self.mode.checkpointing)
        for name in plan.compiled:
            self.compiler.module(model, model.get_submodule(name))

    def _loss_context(self) -> AbstractContextManager[Any]:
        if self.axes.tensor is None or not self.options.loss_parallel:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    @property
    def compiles(self) -> bool:
        return self.mode.compiled and self.axes == SplitAxes()

    @property
    def _layout(self) -> Layout:
        return Layout(tensor=self.mode.tensor, context=self.mode.context)

    def _step(self, model: nn.Module, batch: Any, recorder: Recorder) -> None:
        task = self.subject.task
        model.train()
        recorder.phase = "prepare"
        batch = context.share(task.prepare(batch), self._layout, 0)
        recorder.phase = "forward"
        with autocast(self.mode.precision):
            inputs = task.inputs(batch)
            output = model(*inputs.args, **inputs.shared)
            loss = task.loss(output, batch)
        del output
        kept = recorder.allocated["activations"]
        recorder.trace.timeline[KEPT] = [(kept, kept)]
        (loss * 1.0).backward()


def _mark_blocks(stacks: Mapping[str, Sequence[nn.Module]], recorder: Recorder) -> None:
    """Hooks that set the recorder's current block; in the backward pass, on the output's gradient."""
    for stack, blocks in stacks.items():
        for i, block in enumerate(blocks):
            position = "first" if i == 0 else "last" if i == len(blocks) - 1 else "middle"
            block.register_forward_pre_hook(_enter(recorder, stack, f"in {position}"))
            block.register_forward_hook(_exit(recorder, stack, position))


def _enter(recorder: Recorder, stack: str, position: str) -> Any:
    def hook(*_: Any) -> None:
        recorder.region, recorder.position = stack, position

    return hook


def _exit(recorder: Recorder, stack: str, position: str) -> Any:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        recorder.region, recorder.position = stack, f"after {position}"
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(_enter(recorder, stack, f"in {position}"))

    return hook


def _mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: recorder.track(p.grad, "gradients"))
