"""What a model costs at any depth and micro-batch, from a few short recordings of it.

A stack of equal blocks is recorded with two and with three of them, for two micro-batches. What the
third adds, every further one adds; what the larger micro-batch adds, every further sample adds. All
of it is the real model on fake tensors: no formula knows an architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from muster.models.plan import ParallelPlan
from muster.parallel import tensor
from muster.parallel.blocks import checkpoint_activations, find_blocks
from muster.parallel.fsdp import DTYPES
from muster.plan.compiled import Compiler
from muster.plan.disguise import as_on_gpu, autocast
from muster.plan.messages import Message
from muster.plan.subject import Subject, blocks_of, fake
from muster.plan.trace import Height, Moment, Recorder, Trace
from muster.plan.work import Work
from muster.recipe.distributed import TensorOptions

SHORT = 2  # blocks of a stack in the shortest recording
FEW, MORE = 2, 4  # samples
KEPT = Moment("kept")  # between the forward and the backward pass

Depths = Mapping[str, int]  # blocks by stack


@dataclass(frozen=True)
class Way:
    """How the model is run, as far as one rank's own work depends on it."""

    precision: str
    checkpointing: str = "none"
    compiled: bool = False
    rounded_weights: bool = False  # FSDP and ZeRO compute with weights of the lower precision
    tensor: int = 1


@dataclass(frozen=True)
class Load:
    """One rank's forward and backward of one micro-batch."""

    work: list[tuple[Work, Moment, float]]  # and how often
    messages: list[tuple[Message, Moment, float]]
    calls: float  # operations that Python starts
    heights: dict[Moment, Height]

    def of_blocks(self) -> Load:
        """Without what comes before and after the stacks of blocks."""

        def inside(noted: Any) -> list[Any]:
            return [one for one in noted if one[1].place.startswith("in ")]

        return replace(self, work=inside(self.work), messages=inside(self.messages))

    @property
    def kept(self) -> float:
        return self.heights[KEPT].activations


@dataclass
class Profile:
    """Recordings of one way to run a model."""

    depths: dict[str, int]  # of the shortest
    short: tuple[Trace, Trace]  # for FEW and for MORE samples
    longer: dict[str, tuple[Trace, Trace]]  # with one more block in a stack

    def _points(self, more: Depths, rows: int) -> dict[Moment, NDArray[np.float64]]:
        short = _points(self.short, rows)
        found = dict(short)
        for stack, count in more.items():
            longer = _points(self.longer[stack], rows)
            for moment, base in short.items():
                added = longer.get(moment, base)
                if added.shape == base.shape:
                    found[moment] = found[moment] + count * (added - base)
                else:
                    found[moment] = found[moment] + count * (added.max(axis=0) - base.max(axis=0))
        return found

    def load(self, depths: Depths, rows: int) -> Load:
        more = {stack: depths[stack] - self.depths[stack] for stack in self.longer}
        heights = {
            moment: Height(*(float(v) for v in points.max(axis=0)))
            for moment, points in self._points(more, rows).items()
        }
        work = list(_between([t.work for t in self.short], rows, 1.0))
        messages = list(_between([t.messages for t in self.short], rows, 1.0))
        calls = float(self.short[0].calls.total())
        for stack, count in more.items():
            added = [_middle(t.work, stack) for t in self.longer[stack]]
            work += _between(added, rows, count)
            sent = [_middle(t.messages, stack) for t in self.longer[stack]]
            messages += _between(sent, rows, count)
            calls += count * (self.longer[stack][0].calls.total() - self.short[0].calls.total())
        return Load(work, messages, calls, heights)


def _middle(noted: Sequence[tuple[Any, Moment]], stack: str) -> list[tuple[Any, Moment]]:
    """What one block in the midst of a stack does."""
    return [(x, m) for x, m in noted if m.region == stack and m.place.endswith("middle")]


def _points(traces: tuple[Trace, Trace], rows: int) -> dict[Moment, NDArray[np.float64]]:
    """[tensors made, 2]: what is held after each. Every tensor grows on a line of its own, so it is the
    lines that are followed, and not the highest points, which other tensors may make for more samples."""
    step = (rows - FEW) / (MORE - FEW)
    found = {}
    for moment, points in traces[0].points.items():
        few, more = np.array(points, float), np.array(traces[1].points.get(moment, []), float)
        if few.shape != more.shape:  # the program took another way
            few, more = few.max(axis=0, keepdims=True), more.max(axis=0, initial=0, keepdims=True)
        found[moment] = few + step * (more - few)
    return found


def _between(
    noted: Sequence[Sequence[tuple[Any, Moment]]], rows: int, count: float
) -> Iterator[tuple[Any, Moment, float]]:
    """Each piece of work as it is for `rows` samples, its sizes on a line through the two recorded.
    Where the program took another way for more samples, that way is stretched."""
    few, more = noted
    step = (rows - FEW) / (MORE - FEW)
    if [_name(x) for x, _ in few] == [_name(x) for x, _ in more]:
        for (a, moment), (b, _) in zip(few, more, strict=True):
            yield _on_line(a, b, step), moment, count
    else:
        for x, moment in more:
            yield _stretched(x, rows / MORE), moment, count


def _name(noted: Any) -> tuple[str, int]:
    if isinstance(noted, Message):
        return noted.kind, len(noted.ranks)
    return noted.name, len(noted.shape)


def _stretched(noted: Any, factor: float) -> Any:
    if isinstance(noted, Message):
        return replace(noted, bytes=round(noted.bytes * factor))
    return replace(noted, flops=noted.flops * factor, bytes=noted.bytes * factor)


def _on_line(few: Any, more: Any, step: float) -> Any:
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


def record(
    subject: Subject,
    way: Way,
    *,
    costliest: bool = True,
    axis: DeviceMesh | None = None,
    options: TensorOptions | None = None,
    compiler: Compiler | None = None,
) -> Profile:
    """`axis`: the ranks that split each matrix, where `way.tensor` says that some do. `compiler`: one
    that has compiled some of this model's blocks before."""
    stacks = {name: len(b) for name, b in blocks_of(subject.model, subject.plan.blocks).items()}
    short = {name: min(SHORT, size) for name, size in stacks.items()}
    growing = [name for name, size in stacks.items() if size > SHORT]
    camera = _Camera(subject, way, costliest, axis, options, compiler or Compiler())
    pairs = {
        name: (camera.take(depths, FEW), camera.take(depths, MORE))
        for name, depths in [("", short), *((n, short | {n: SHORT + 1}) for n in growing)]
    }
    return Profile(short, pairs.pop(""), pairs)


@dataclass
class _Camera:
    subject: Subject
    way: Way
    costliest: bool
    axis: DeviceMesh | None
    options: TensorOptions | None
    compiler: Compiler

    @cached_property
    def template(self) -> nn.Module:
        """No deeper than any recording."""
        with torch.device("meta"):
            model = self.subject.task.build_model()
        stacks = blocks_of(model, self.subject.plan.blocks)
        cut_short(model, self.subject.plan, dict.fromkeys(stacks, SHORT + 1))
        return model

    def take(self, depths: Depths, rows: int) -> Trace:
        """Whoever compiles holds on to what it was first shown, so a first look does not count."""
        known = len(self.compiler.made)
        trace = self._take(depths, rows)
        return trace if len(self.compiler.made) == known else self._take(depths, rows)

    def _take(self, depths: Depths, rows: int) -> Trace:
        plan, way = self.subject.plan, self.way
        model = copy.deepcopy(self.template)
        cut_short(model, plan, depths)
        if way.rounded_weights and plan.cast_weights and way.precision in DTYPES:
            model.to(DTYPES[way.precision])
        if self.axis is not None:
            tensor.split(model, self.axis, plan, self.options or TensorOptions())
        recorder = self.compiler.recorder = Recorder()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        batch = self.subject.batch(rows, costliest=self.costliest)
        with mode:
            model.to_empty(device="cpu")
            for p in (*model.parameters(), *model.buffers()):
                recorder.hold(p, "weights")
            _mark_gradients(model, recorder)
            self._wrap(model, plan, recorder)
            _mark_blocks(blocks_of(model, plan.blocks), recorder)
            with recorder, as_on_gpu(), self._loss_context():
                self._step(model, fake(batch, mode), recorder)
        return recorder.trace

    def _wrap(self, model: nn.Module, plan: ParallelPlan, recorder: Recorder) -> None:
        """A compiled block that forgets is one that forgets what it compiled."""
        blocks = find_blocks(model, plan.blocks, "model.preset")
        if self.compiles:
            for module in (*blocks, *(m for n, m in model.named_modules() if n in plan.compiled)):
                self.compiler.module(model, module)
        checkpoint_activations(blocks, self.way.checkpointing)  # type: ignore[arg-type]

    def _loss_context(self) -> AbstractContextManager[Any]:
        split = self.axis is not None and (self.options or TensorOptions()).loss_parallel
        return loss_parallel() if split else nullcontext()

    @property
    def compiles(self) -> bool:
        return self.way.compiled and self.axis is None and self.way.checkpointing != "selective"

    def _step(self, model: nn.Module, batch: Any, recorder: Recorder) -> None:
        task = self.subject.task
        model.train()
        recorder.phase = "prepare"
        batch = task.prepare(batch)
        recorder.phase = "forward"
        with autocast(self.way.precision):
            inputs = task.inputs(batch)
            output = model(*inputs.args, **inputs.shared)
            if self.compiles:
                loss = self.compiler.call(
                    "loss",
                    lambda o, t: task.loss(o, replace(batch, tensors=t)),
                    output,
                    batch.tensors,
                )
            else:
                loss = task.loss(output, batch)
        del output
        kept = recorder.held["activations"]
        recorder.trace.points[KEPT] = [(kept, kept)]
        (loss * 1.0).backward()


def cut_short(model: nn.Module, plan: ParallelPlan, depths: Depths) -> None:
    """In place: the first so many blocks of each stack."""
    for name in blocks_of(model, plan.blocks):
        stack: Any = model.get_submodule(name)
        for key in list(stack._modules)[depths[name] :]:
            del stack._modules[key]


def _mark_blocks(stacks: Mapping[str, Sequence[nn.Module]], recorder: Recorder) -> None:
    """Tell the recorder which block is at work; a backward pass tells by its gradient's arrival."""
    for stack, blocks in stacks.items():
        for i, block in enumerate(blocks):
            place = "first" if i == 0 else "last" if i == len(blocks) - 1 else "middle"
            block.register_forward_pre_hook(_at(recorder, stack, f"in {place}"))
            block.register_forward_hook(_leaving(recorder, stack, place))


def _at(recorder: Recorder, stack: str, place: str) -> Any:
    def enter(*_: Any) -> None:
        recorder.region, recorder.place = stack, place

    return enter


def _leaving(recorder: Recorder, stack: str, place: str) -> Any:
    def leave(_: nn.Module, args: Any, output: Any) -> None:
        recorder.region, recorder.place = stack, f"after {place}"
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(_at(recorder, stack, f"in {place}"))

    return leave


def _mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: recorder.hold(p.grad, "gradients"))
