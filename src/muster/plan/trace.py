"""Recording what a program does: each operation's work, each message, how memory rises and falls.

The recorder sees every operation that torch carries out below autograd. Under fake tensors nothing
is computed and nothing allocated, so a step of a 70-billion-parameter model is recorded on a laptop.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muster.plan.messages import Message, message_of, sends
from muster.plan.work import Work, measure

BLOCK = 512  # a CUDA allocation is a multiple of so many bytes
NOWHERE = ""


@dataclass(frozen=True)
class Moment:
    """What was being done, and where: `region` is one of a model's stacks of blocks."""

    phase: str
    region: str = NOWHERE
    place: str = NOWHERE  # in, or after, the first, a middle or the last block of it


@dataclass(frozen=True)
class Height:
    """Bytes at the highest point of a moment: without gradients, and with those there already."""

    activations: float
    together: float


@dataclass
class Trace:
    """One rank's step."""

    work: list[tuple[Work, Moment]] = field(default_factory=list)
    messages: list[tuple[Message, Moment]] = field(default_factory=list)
    calls: Counter[Moment] = field(default_factory=Counter)  # operations that Python started
    points: dict[Moment, list[tuple[int, int]]] = field(default_factory=dict)  # see Height
    peak: int = 0  # bytes of everything
    at_peak: dict[str, int] = field(default_factory=dict)  # by part, at that time

    @property
    def heights(self) -> dict[Moment, Height]:
        return {
            moment: Height(max(a for a, _ in points), max(t for _, t in points))
            for moment, points in self.points.items()
        }


class Recorder(TorchDispatchMode):
    """Fills a `Trace`. `part` names what is allocated from now on; `phase`, `region` and `place` say
    what is being done."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.part, self.phase, self.region, self.place = "activations", "build", NOWHERE, NOWHERE
        self.held: Counter[str] = Counter()  # bytes by part
        self._seen: dict[int, tuple[Any, int, str]] = {}  # storage → (weak reference, bytes, part)
        self._fused = False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will come again, as the operations it is made of
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _some_value(args[0])
        out = op(*args, **kwargs)
        if not self._fused:
            outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            for tensor in outputs:
                self.hold(tensor)
            self._note(op, (*args, *kwargs.values()), outputs)
        return out

    def _note(self, op: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        moment = self.now
        self.trace.calls[moment] += 1
        if sends(op):
            if (message := message_of(op, args)) is not None:
                self.trace.messages.append((message, moment))
        elif (work := measure(op, args, outputs)) is not None:
            self.trace.work.append((work, moment))

    @property
    def now(self) -> Moment:
        """Backward passes run within the engine's own call, and so tell of themselves."""
        backward = torch._C._current_graph_task_id() != -1
        return Moment("backward" if backward else self.phase, self.region, self.place)

    def hold(self, tensor: Tensor, part: str | None = None) -> None:
        """Count a tensor's memory until torch lets go of it. What is counted already stays so, but
        for a part given now."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            reference, size, before = self._seen[key]
            if part is not None and part != before:
                self.held[before] -= size
                self.held[part] += size
                self._seen[key] = (reference, size, part)
            return
        size = rounded(storage.nbytes())
        part = part or self.part
        self._seen[key] = (weakref.ref(storage, lambda _: self._free(key)), size, part)
        self._grow(part, size)

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """A compiled program gives up what it was handed before it returns."""
        for tensor in tensors:
            self._free(tensor.untyped_storage()._cdata)

    def passing(self, size: int) -> None:
        """Memory that a compiled program takes and gives back."""
        self._grow(self.part, size)
        self.held[self.part] -= size

    def _grow(self, part: str, size: int) -> None:
        self.held[part] += size
        total = self.held.total()
        if total > self.trace.peak:
            self.trace.peak = total
            self.trace.at_peak = {name: held for name, held in self.held.items() if held}
        active = self.held["activations"]
        points = self.trace.points.setdefault(self.now, [])
        points.append((active, active + self.held["gradients"]))

    def _free(self, key: int) -> None:
        if key in self._seen:
            _, size, part = self._seen.pop(key)
            self.held[part] -= size

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What happens in here is one compiled program, whose work is added by its maker."""
        before, self._fused = self._fused, True
        try:
            yield
        finally:
            self._fused = before


def rounded(size: float) -> int:
    return math.ceil(size / BLOCK) * BLOCK


def _some_value(scalar: Tensor) -> float | int | bool:
    """A number that the program wants to see of a tensor that has none."""
    if scalar.dtype == torch.bool:
        return True
    return 1.0 if scalar.is_floating_point() else 0
