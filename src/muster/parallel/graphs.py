"""CUDA graphs: the kernels of a micro-batch, captured once per shape and then replayed.

Launch overhead dominates small models: whisper-small is 2,500 kernels a step. A graph is replayed
with one call. It reads its batch from static tensors and writes its gradients to static ones; graphs
share these and one memory pool, since only one runs at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muster.data.loader import Batch
from muster.errors import MusterError

GRAPH_MEMORY = 0.45  # of the GPU, without graphs: they keep more activations and gradients
MAX_GRAPHS = 96  # each holds a batch and some megabytes of kernel launches

log = logging.getLogger(__name__)

Compute = Callable[[Batch, Tensor], Tensor]  # batch, scale → loss; accumulates gradients


@dataclass(frozen=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    scale: Tensor
    loss: Tensor
    trained: tuple[nn.Parameter, ...]  # that it gives gradients

    def replay(self, batch: Batch, scale: Tensor) -> Tensor:
        for name, tensor in self.batch.tensors.items():
            tensor.copy_(batch[name])
        self.scale.copy_(scale)
        self.graph.replay()
        return self.loss.clone()


class Gradients:
    """What all graphs write their gradients to: the tensors that a parameter's first captured backward pass made,
    to which later captures copy theirs. A replay overwrites them, so those of a micro-batch before are copied."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.static: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A backward pass in here makes new gradients."""
        before = [p.grad for p in self.parameters]
        self._set(None for _ in before)
        try:
            yield
        finally:
            self._set(before)

    def written(self) -> dict[nn.Parameter, Tensor]:
        """At the end of a captured backward pass: the gradients it made, copied to where others are already."""
        made = {p: p.grad for p in self.parameters if p.grad is not None}
        if again := [p for p in made if p in self.static]:
            torch._foreach_copy_([self.static[p] for p in again], [made[p] for p in again])
        return made

    def keep(self, written: dict[nn.Parameter, Tensor]) -> tuple[nn.Parameter, ...]:
        """After the capture has succeeded. Returns the parameters."""
        self.static = written | self.static
        return tuple(written)

    @contextmanager
    def adding(self, trained: Iterable[nn.Parameter]) -> Iterator[None]:
        """A replay in here gives `trained` gradients, which add to those that there are."""
        static = {p: self.static[p] for p in trained}
        before = {
            p: p.grad.clone() if p.grad is gradient else p.grad
            for p, gradient in static.items()
            if p.grad is not None
        }
        yield
        for p, gradient in static.items():
            p.grad = before.get(p, gradient)
        if before:
            torch._foreach_add_(list(before.values()), [static[p] for p in before])

    def every(self) -> Iterator[Tensor]:
        """Of all parameters, as ranks sum them."""
        for p in self.parameters:
            if p.grad is None:
                raise MusterError(
                    "training.cuda_graphs: several ranks need a gradient of every weight in every step, and a "
                    f"weight of shape {tuple(p.shape)} has none in this one; set it to false"
                )
            yield p.grad

    def _set(self, gradients: Iterable[Tensor | None]) -> None:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient


class Graphs:
    """A shape runs eagerly the first time, which is its warm-up, is captured the second time and replayed
    from then on. Where a capture fails, `failed` is told why, and shapes go on eagerly; without it, the
    error is raised. Gradients add to those that `parameters` have, as in a backward pass."""

    def __init__(
        self,
        device: torch.device,
        parameters: Iterable[nn.Parameter],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        self.device, self.failed = device, failed
        self.gradients = Gradients(parameters)
        self.stream = torch.cuda.Stream(device)  # the default stream cannot be captured
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: set[object] = set()
        self.captured: dict[object, CapturedGraph] = {}
        self.closed = False  # no further shape is captured

    def run(self, compute: Compute, batch: Batch, scale: float) -> Tensor:
        """The loss of `compute`, whose batch may be of any shape."""
        shape = tuple((k, t.shape, t.dtype) for k, t in sorted(batch.tensors.items()))
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            factor = torch.full((), scale, device=self.device)
            loss = self._run(compute, batch, factor, shape)
        outer.wait_stream(self.stream)
        return loss

    def _run(self, compute: Compute, batch: Batch, scale: Tensor, shape: object) -> Tensor:
        if shape in self.seen and shape not in self.captured and not self.closed:
            self._capture(compute, batch, scale, shape)
        self.seen.add(shape)
        if (captured := self.captured.get(shape)) is None:
            return compute(batch, scale)
        with self.gradients.adding(captured.trained):
            return captured.replay(batch, scale)

    def _capture(self, compute: Compute, batch: Batch, scale: Tensor, shape: object) -> None:
        try:
            self.captured[shape] = self._captured(compute, batch, scale)
        except MusterError as error:
            if self.failed is None:
                raise
            self.closed = True
            self._end_capture()
            log.warning("%s; the run goes on without", error)
            self.failed(str(error))
        if len(self.captured) == MAX_GRAPHS:
            self.closed = True
            log.warning("%d batch shapes are captured; others run eagerly", MAX_GRAPHS)

    def _end_capture(self) -> None:
        """A capture that failed leaves the random generator of the GPU in it; a small one that succeeds takes
        it out."""
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
            torch.zeros(1, device=self.device)

    def _captured(self, compute: Compute, batch: Batch, scale: Tensor) -> CapturedGraph:
        tensors = {k: t.clone() for k, t in batch.tensors.items()}
        batch = Batch(ids=[], tensors=tensors, units=0, filled=0, cells=0)  # static
        scale, graph = scale.clone(), torch.cuda.CUDAGraph()
        try:
            # Data loader threads may pin memory during the capture: only this thread is checked.
            with (
                self.gradients.capturing(),
                torch.cuda.graph(graph, self.pool, self.stream, "thread_local"),
            ):
                loss = compute(batch, scale)
                written = self.gradients.written()
        except torch.OutOfMemoryError as error:
            raise MusterError(
                "training.cuda_graphs: out of memory during capture: graphs have a memory pool of "
                "their own; lower training.per_device_batch_size, or set it to false"
            ) from error
        except RuntimeError as error:
            raise MusterError(
                "training.cuda_graphs: this model cannot be captured, since it synchronizes with "
                f"the GPU within a step; set it to false ({str(error).splitlines()[0]})"
            ) from error
        return CapturedGraph(graph, batch, scale, loss, self.gradients.keep(written))
