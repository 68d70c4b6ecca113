"""The interface of a strategy: gradients of a global batch, their norm, a step, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from muster.parallel.float8 import update_scales
from muster.parallel.gradients import global_norm, local_gradients
from muster.parallel.graphs import Graphs
from muster.parallel.mesh import Mesh
from muster.parallel.replicas import Held, held
from muster.parallel.timestamps import DeviceTimestamp


class NamedParameters(list[tuple[str, nn.Parameter]]):
    """A model's parameters by name; `hidden` are the names of the matrices in its blocks."""

    hidden: frozenset[str] = frozenset()


MakeOptimizer = Callable[[NamedParameters], Optimizer]


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

    @property
    def blocks(self) -> tuple[str, ...]:
        """Classes of repeated layers of a model that has no parallel plan."""
        ...

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

    def grad_norm(self, scale: float = 1.0) -> Tensor:
        """The norm of the global gradient, a scalar on the device. `scale` is what the loss was
        multiplied by."""
        ...

    def step(self, lr: float, divisor: Tensor | None = None, finite: Tensor | None = None) -> None:
        """Update the weights by the gradients over `divisor`; not where `finite` is false."""
        ...

    def zero_grad(self) -> None: ...
    def ready(self) -> DeviceTimestamp | None: ...
    def held(self) -> Iterable[Held]:
        """What this rank holds and others do too: weights and the optimizer's state."""
        ...

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
        mesh: Mesh,
        *,
        clock: GradientClock | None = None,
        split_loss: bool = False,
        reduce_each: bool = False,
        gathers_float8: bool = False,
    ) -> None:
        self.module, self.parts, self.optimizer, self.mesh = module, parts, optimizer, mesh
        self.graphs: Graphs | None = None
        self._reduce_each, self._gathers_float8 = reduce_each, gathers_float8
        self._clock, self._split_loss = clock, split_loss
        self._weights_changed()

    def replay(self, graphs: Graphs) -> None:
        """Micro-batches are captured from now on. DDP's module goes: its reducer keeps the parameters'
        AccumulateGrad nodes, which stay on the stream that they were made on and cannot be captured on another."""
        self.graphs, self.module = graphs, self.parts[0]

    def accumulate(self, batches: Sequence[Batch], functions: StepFunctions) -> list[Tensor]:
        if self.graphs is not None:
            return self._replay(batches, functions, self.graphs)
        losses = []
        for i, batch in enumerate(batches):
            with self._micro_step(last=i == len(batches) - 1), self._loss_context():
                prepared = functions.prepare(batch)
                loss = self._compute(self.module, functions, prepared, functions.scale)
            losses.append(full_tensor(loss))
        return losses

    def _replay(
        self, batches: Sequence[Batch], functions: StepFunctions, graphs: Graphs
    ) -> list[Tensor]:
        """A captured graph contains no collective: DDP's replicas sum their gradients after the last
        micro-batch."""
        compute = partial(self._compute, self.parts[0], functions)
        losses = [graphs.run(compute, functions.prepare(b), functions.scale) for b in batches]
        if self._clock is not None:
            self._clock.sum_now(graphs.gradients.every())
        return losses

    def _compute(
        self, module: nn.Module, functions: StepFunctions, prepared: Batch, scale: float | Tensor
    ) -> Tensor:
        with functions.autocast():
            inputs = functions.inputs(prepared)
            loss = functions.loss(module(*inputs.args, **inputs.shared), prepared)
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

    def grad_norm(self, scale: float = 1.0) -> Tensor:
        parameters = (p for part in self.parts for p in part.parameters())
        groups = local_gradients(parameters, self.mesh.layout, self.tied)
        return global_norm(groups, self.mesh.layout, self.mesh.device) / scale

    def step(self, lr: float, divisor: Tensor | None = None, finite: Tensor | None = None) -> None:
        """AdamW's fused kernel, and muster.parallel.optimizers, divide the gradients and skip the update on
        the device: the host does not wait for either tensor."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        optimizer: Any = self.optimizer
        device = optimizer.param_groups[0]["params"][0].device  # the host, if FSDP offloads
        optimizer.grad_scale = None if divisor is None else divisor.float().to(device)
        optimizer.found_inf = None if finite is None else (~finite).float().to(device)
        optimizer.step()
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self._gathers_float8:
            update_scales(self.parts)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def ready(self) -> DeviceTimestamp | None:
        """When this rank's last gradients were computed, under DDP."""
        return self._clock.ready if self._clock else None

    def held(self) -> Iterable[Held]:
        self._reshard()
        return held(self.parts, self.optimizer, self.mesh, self.tied)

    def state(self) -> dict[str, Any]:
        self._reshard()
        return state.named_state(self.parts, self.optimizer)

    def _reshard(self) -> None:
        """The root stays gathered after an evaluation, which no backward pass follows: the gathered
        parameters are others than the optimizer's."""
        for module in (m for part in self.parts for m in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def load_state(self, loaded: dict[str, Any]) -> None:
        state.load_optimizer(self.parts, self.optimizer, loaded)
        self._weights_changed()


def full_tensor(output: Any) -> Any:
    """`DTensor.full_tensor()`; other values unchanged."""
    return output.full_tensor() if isinstance(output, DTensor) else output
