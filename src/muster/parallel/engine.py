"""The interface of a strategy: gradients of a global batch, their norm, a step, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from muster.data.loader import Batch, Inputs
from muster.models.weights import Weights
from muster.parallel import state
from muster.parallel.ddp import GradientClock
from muster.parallel.gradients import global_norm, local_gradients
from muster.parallel.graphs import Graphs
from muster.parallel.layout import Layout
from muster.parallel.timestamps import DeviceTimestamp

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


@dataclass(frozen=True)
class StepFunctions:
    """What to compute for one micro-batch. `loss` is a sum; `scale` is what it is multiplied by."""

    prepare: Callable[[Batch], Batch]
    inputs: Callable[[Batch], Inputs]
    loss: Callable[[Any, Batch], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]
    scale: float = 1.0


class Builder(Protocol):
    """Builds the model: a task."""

    def build_model(self) -> nn.Module: ...
    def build_part(self, start: int, stop: int) -> nn.Module: ...
    def weights(self) -> Weights | None: ...


class Engine(Protocol):
    """A distributed model and its optimizer."""

    parts: list[nn.Module]  # what this rank holds of the model, without wrappers

    def accumulate(self, batches: Sequence[Batch], functions: StepFunctions) -> list[Tensor]:
        """Forward and backward of every micro-batch; gradients are reduced with the last. Returns
        the losses, or an empty list on a rank without the last stage."""
        ...

    def forward(self, inputs: Inputs) -> Any:
        """The model's full output; None on a rank without the last stage."""
        ...

    def clip_(self, max_norm: float | None, scale: float = 1.0) -> float: ...
    def step(self, lr: float) -> None: ...
    def zero_grad(self) -> None: ...
    def ready(self) -> DeviceTimestamp | None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class TorchEngine:
    """Strategies that are plain torch: one optimizer, gradients in `.grad`."""

    tied: Sequence[nn.Parameter] = ()  # parameters that a second stage of a pipeline holds too

    def __init__(
        self,
        module: nn.Module,
        parts: list[nn.Module],
        optimizer: Optimizer,
        layout: Layout,
        *,
        clock: GradientClock | None = None,
        split_loss: bool = False,
        graphs: Graphs | None = None,
        reduce_each: bool = False,
    ) -> None:
        self.module, self.parts, self.optimizer, self.layout = module, parts, optimizer, layout
        self._reduce_each = reduce_each
        self._clock, self._split_loss, self._graphs = clock, split_loss, graphs

    def accumulate(self, batches: Sequence[Batch], functions: StepFunctions) -> list[Tensor]:
        losses = []
        for i, batch in enumerate(batches):
            with self._micro_step(last=i == len(batches) - 1), self._loss_context():
                prepared = functions.prepare(batch)
                if self._graphs:
                    loss = self._graphs.run(
                        partial(self._compute, functions), prepared, functions.scale
                    )
                else:
                    loss = self._compute(functions, prepared, functions.scale)
            losses.append(full_tensor(loss))
        return losses

    def _compute(self, functions: StepFunctions, prepared: Batch, scale: float | Tensor) -> Tensor:
        with functions.autocast():
            inputs = functions.inputs(prepared)
            loss = functions.loss(self.module(*inputs.args, **inputs.shared), prepared)
        (loss * scale).backward()
        return loss.detach()

    def _micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced at the last micro-step of an optimizer step, or with `reduce_each` at
        every one, which saves the memory of unsharded ones."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last or self._reduce_each)
        elif isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def _loss_context(self) -> AbstractContextManager[Any]:
        return loss_parallel() if self._split_loss else nullcontext()

    def forward(self, inputs: Inputs) -> Any:
        return full_tensor(self.parts[0](*inputs.args, **inputs.shared))

    def clip_(self, max_norm: float | None, scale: float = 1.0) -> float:
        """The norm of the global gradient; clips in place. `scale` is what the loss was multiplied by."""
        parameters = (p for part in self.parts for p in part.parameters())
        groups = local_gradients(parameters, self.layout, self.tied)
        norm = global_norm(groups, self.layout) / scale
        factor = 1.0 / scale
        if max_norm is not None:
            factor *= min(1.0, max_norm / (norm + 1e-6))
        if factor != 1.0:
            for gradients in groups.values():
                torch._foreach_mul_(gradients, factor)
        return norm

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self._graphs is None)

    def ready(self) -> DeviceTimestamp | None:
        """When this rank's last gradients were computed, under DDP."""
        return self._clock.ready if self._clock else None

    def state(self) -> dict[str, Any]:
        return state.named_state(self.parts, self.optimizer)

    def load_state(self, loaded: dict[str, Any]) -> None:
        state.set_step(self.optimizer, loaded)


def full_tensor(output: Any) -> Any:
    """`DTensor.full_tensor()`; other values unchanged."""
    return output.full_tensor() if isinstance(output, DTensor) else output
