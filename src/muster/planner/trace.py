"""Records a program: the cost of each operation, each collective, and memory over time.

The recorder is a TorchDispatchMode, so it sees every operation below autograd. With fake tensors
nothing is computed or allocated: a 70-billion-parameter model is recorded on a laptop.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muster.planner.kernels import Call
from muster.planner.messages import Message, collective_of, is_collective
from muster.planner.op_cost import OpCost, measure
from muster.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    _current_graph_task_id,
    tree_leaves,
)

BLOCK = 512  # bytes: CUDA allocations are rounded up to it
NOWHERE = ""
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def patched(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, wrap(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


@dataclass(frozen=True)
class TracePoint:
    """Phase of the step and position in the model: `region` is the name of a stack of blocks."""

    phase: str
    region: str = NOWHERE
    position: str = NOWHERE  # in, or after, the first, a middle or the last block of it

    @property
    def in_forward_of_block(self) -> bool:
        return self.phase == "forward" and self.position.startswith("in ")


@dataclass(frozen=True)
class MemoryPeak:
    """Peak bytes at a trace point, without and with gradients."""

    activations: float
    with_gradients: float


@dataclass
class Trace:
    """One rank's step."""

    ops: list[tuple[OpCost, TracePoint]] = field(default_factory=list)
    messages: list[tuple[Message, TracePoint]] = field(default_factory=list)
    calls: Counter[tuple[TracePoint, Call]] = field(default_factory=Counter)  # what the host does
    timeline: dict[TracePoint, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # as in MemoryPeak
    peak: int = 0  # bytes of everything
    at_peak: dict[str, int] = field(default_factory=dict)  # by part

    @property
    def peaks(self) -> dict[TracePoint, MemoryPeak]:
        return {
            point: MemoryPeak(max(a for a, _ in timeline), max(t for _, t in timeline))
            for point, timeline in self.timeline.items()
        }


class Recorder(TorchDispatchMode):
    """Fills a `Trace`. `part` is counted for new allocations; `phase`, `region` and `position` give the
    current trace point."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.part, self.phase, self.region, self.position = "activations", "build", NOWHERE, NOWHERE
        self.allocated: Counter[str] = Counter()  # bytes by part
        # storage → (weak reference, bytes, part)
        self._tracked: dict[int, tuple[Any, int, str]] = {}
        self._unrecorded = False
        self.caches = False  # blocks run under selective checkpointing, uncompiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while it is active; to skip Dynamo would take a tenth of all time."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _placeholder_value(args[0])
        if op is torch.ops.prim.device.default and _plain_fake(args[0]):
            return args[0].fake_device  # no operation; autograd asks thousands of times
        out = op(*args, **kwargs)
        if not self._unrecorded:
            outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            for tensor in outputs:
                self.track(tensor)
            self._record(op, (*args, *kwargs.values()), outputs)
        return out

    def _record(self, op: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        point = self.current_point
        self.trace.calls[point, "op"] += 1
        if self.caches and point.in_forward_of_block:
            self.trace.calls[point, "cached op"] += 2  # the second time in the backward pass
        if is_collective(op):
            if (message := collective_of(op, args)) is not None:
                self.trace.messages.append((message, point))
        elif (cost := measure(op, args, outputs)) is not None:
            self.trace.ops.append((cost, point))

    @property
    def current_point(self) -> TracePoint:
        """The backward pass is detected by autograd's graph task."""
        backward = _current_graph_task_id() != -1
        return TracePoint("backward" if backward else self.phase, self.region, self.position)

    def track(self, tensor: Tensor, part: str | None = None) -> None:
        """Count a tensor's storage until it is freed. One that is counted already changes its part
        only if `part` is given."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._tracked:
            reference, size, before = self._tracked[key]
            if part is not None and part != before:
                self.allocated[before] -= size
                self.allocated[part] += size
                self._tracked[key] = (reference, size, part)
            return
        size = rounded(storage.nbytes())
        part = part or self.part
        self._tracked[key] = (weakref.ref(storage, lambda _: self._free(key)), size, part)
        self._allocate(part, size)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Free the inputs that a compiled graph frees before it returns."""
        for tensor in tensors:
            self._free(tensor.untyped_storage()._cdata)

    def track_temporary(self, size: int) -> None:
        """Memory that a compiled graph allocates and frees."""
        self._allocate(self.part, size)
        self.allocated[self.part] -= size

    def _allocate(self, part: str, size: int) -> None:
        self.allocated[part] += size
        total = self.allocated.total()
        if total > self.trace.peak:
            self.trace.peak = total
            self.trace.at_peak = {name: size for name, size in self.allocated.items() if size}
        active = self.allocated["activations"]
        timeline = self.trace.timeline.setdefault(self.current_point, [])
        timeline.append((active, active + self.allocated["gradients"]))

    def _free(self, key: int) -> None:
        if key in self._tracked:
            _, size, part = self._tracked.pop(key)
            self.allocated[part] -= size

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Operations in here are not recorded; the compiler records those of a compiled graph itself."""
        before, self._unrecorded = self._unrecorded, True
        try:
            yield
        finally:
            self._unrecorded = before


def rounded(size: float) -> int:
    return math.ceil(size / BLOCK) * BLOCK


def _plain_fake(tensor: Tensor) -> bool:
    """Within a kernel, a fake tensor's device is `meta`."""
    return isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation


def _placeholder_value(scalar: Tensor) -> float | int | bool:
    """The result of `item()` on a fake tensor."""
    if scalar.dtype == torch.bool:
        return True
    return 1.0 if scalar.is_floating_point() else 0
