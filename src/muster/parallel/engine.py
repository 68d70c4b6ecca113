"""What the loop needs of a strategy: micro-steps, a gradient norm, a step, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from muster.parallel.ddp import GradientClock
from muster.parallel.timing import Moment

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


class Engine(Protocol):
    """A model spread over ranks, and how to train it."""

    module: nn.Module  # call this in the loss
    bare: nn.Module  # the same weights without wrappers, for evaluation

    def micro_step(self, last: bool) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Tensor) -> None: ...
    def clip_(self, max_norm: float | None, scale: float = 1.0) -> float: ...
    def step(self, lr: float) -> None: ...
    def zero_grad(self) -> None: ...
    def ready(self) -> Moment | None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class TorchEngine:
    """Strategies that are plain torch: one module, one optimizer, gradients in `.grad`."""

    def __init__(
        self, module: nn.Module, bare: nn.Module, optimizer: Optimizer, clock: GradientClock | None
    ) -> None:
        self.module, self.bare, self.optimizer, self._clock = module, bare, optimizer, clock

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients stay at home until the last micro-step of an optimizer step."""
        if self._clock is None or last:
            return nullcontext()
        return self.module.no_sync()  # type: ignore[operator,no-any-return]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_(self, max_norm: float | None, scale: float = 1.0) -> float:
        """The norm of the whole gradient; clips in place. `scale` is what the loss was multiplied by."""
        grads = [p.grad for p in self.bare.parameters() if p.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_(grads, 1.0 / scale)
        norm = torch.nn.utils.get_total_norm(grads)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                [p for p in self.bare.parameters() if p.grad is not None], max_norm, norm
            )
        return float(norm)

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def ready(self) -> Moment | None:
        """When this rank's last gradients were computed, if others had to be waited for."""
        return self._clock.ready if self._clock else None

    def state(self) -> dict[str, Any]:
        """Weights and optimizer under names that do not depend on the layout."""
        model, optimizer = get_state_dict(self.bare, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.bare,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
