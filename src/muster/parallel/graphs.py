"""CUDA graphs: the work of a micro-batch, recorded once per shape and then started as one.

A small model keeps a GPU waiting for the program that feeds it: whisper-small is 2,500 kernels a
step. A recording is replayed with one call. It reads its batch from tensors of its own, and adds to
gradients that stay where they are; all else lies in one pool, since only one recording runs at a
time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from muster.data.loader import Batch
from muster.errors import MusterError

MOST = 96  # recordings; each holds a batch and some megabytes of launches

log = logging.getLogger(__name__)

Compute = Callable[[Batch, Tensor], Tensor]  # batch, scale → loss, gradients added to


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    scale: Tensor
    loss: Tensor

    def replay(self, batch: Batch, scale: Tensor) -> Tensor:
        for name, tensor in self.batch.tensors.items():
            tensor.copy_(batch[name])
        self.scale.copy_(scale)
        self.graph.replay()
        return self.loss.clone()


class Graphs:
    """A shape is computed as ever when it first comes, which also compiles what it needs, recorded
    when it comes again, and replayed from then on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # the default stream cannot be recorded
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: set[object] = set()
        self.recordings: dict[object, Recording] = {}

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
        if shape not in self.recordings:
            if shape not in self.seen or len(self.recordings) == MOST:
                self.seen.add(shape)
                return compute(batch, scale)
            self.recordings[shape] = self._record(compute, batch, scale)
            if len(self.recordings) == MOST:
                log.warning("%d batch shapes are recorded; others are computed as ever", MOST)
        return self.recordings[shape].replay(batch, scale)

    def _record(self, compute: Compute, batch: Batch, scale: Tensor) -> Recording:
        tensors = {k: t.clone() for k, t in batch.tensors.items()}
        batch = Batch(ids=[], tensors=tensors, units=0, filled=0, cells=0)  # no one batch's
        scale, graph = scale.clone(), torch.cuda.CUDAGraph()
        try:
            # Threads that load data go on pinning memory meanwhile; only this one must not wait.
            with torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                loss = compute(batch, scale)
        except torch.OutOfMemoryError as error:
            raise MusterError(
                "training.cuda_graphs: no memory is left for a recording, which keeps its own beside "
                "what other work takes; lower training.per_device_batch_size, or set it to false"
            ) from error
        except RuntimeError as error:
            raise MusterError(
                "training.cuda_graphs: this model's work cannot be recorded, since it waits for the "
                f"GPU midway; set it to false ({str(error).splitlines()[0]})"
            ) from error
        return Recording(graph, batch, scale, loss)
