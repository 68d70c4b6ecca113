"""Records a program with DTensors: of each, what this rank has of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.planner.trace import Recorder, patched
from muster.torch_internals import ShardingPropagator


class DTensorRecorder(Recorder):
    """Apart from `Recorder`, because importing DTensor takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """DTensor derives an operation's output from whole tensors, which no rank has."""

        def without_recording(propagate: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                with self.unrecorded():
                    return propagate(*args)

            return run

        name = "_propagate_tensor_meta_non_cached"
        self._patches.enter_context(patched(ShardingPropagator, name, without_recording))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._patches:
            super().__exit__(*error)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as operations on local tensors
        return super().__torch_dispatch__(op, types, args, kwargs)

    def track(self, tensor: Tensor, part: str | None = None) -> None:
        super().track(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, part)
