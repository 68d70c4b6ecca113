"""Communication and memory of a rank in one step, by weights, gradients, buffers and activations."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from muster.data.loader import Batch
from muster.parallel import pipeline, state
from muster.parallel.default_plan import plan_of
from muster.parallel.dtypes import DTYPES
from muster.parallel.engine import StepFunctions, TorchEngine
from muster.planner.dtensor_recorder import DTensorRecorder
from muster.planner.messages import Message
from muster.planner.trace import Recorder, TracePoint, Wrap, patched
from muster.recipe.schema import Recipe
from muster.torch_internals import (
    _compute_bucket_assignment_by_size,
    _fsdp_param,
    _fsdp_param_group,
)

HOST, BUFFERS, GRADIENTS = "host", "buffers", "gradients"


class Sent(NamedTuple):
    """One kind of message; `ranks` is the size of its group, `bytes` this rank's input."""

    kind: str
    bytes: int
    ranks: int
    dtype: str
    phase: str  # forward, backward, optimizer; pipeline: between stages


class DeviceRecorder(DTensorRecorder):
    """Excludes tensors on the host from peaks."""

    def _allocate(self, part: str, size: int) -> None:
        host = self.allocated.pop(HOST, 0)
        if part == HOST:
            host += size
        else:
            super()._allocate(part, size)
        self.allocated[HOST] = host


class Buckets:
    """DDP's gradients become views of its buckets in the last micro-batch. Buckets are assigned in the
    order in which gradients were first ready."""

    def __init__(
        self,
        engine: TorchEngine,
        recorder: Recorder,
        recipe: Recipe,
        ranks: int,
        accumulation: int,
    ) -> None:
        self.options, self.ranks = recipe.distributed.ddp, ranks
        self.accumulation = accumulation
        self.trained = [p for part in engine.parts for p in part.parameters() if p.requires_grad]
        self.order: dict[nn.Parameter, Tensor] = {}
        for p in self.trained:
            view = torch.empty_like(p)
            recorder.track(view, GRADIENTS)
            p.register_post_accumulate_grad_hook(self._move_to(view))

    def _move_to(self, view: Tensor) -> Callable[[Tensor], None]:
        micro_batch = itertools.count(1)

        def move(p: Any) -> None:
            if next(micro_batch) % self.accumulation == 0:
                self.order[p] = p.grad = view

        return move

    def sent(self) -> Counter[Sent]:
        rebuilt = self.options.static_graph or not self.options.find_unused_parameters
        ordered = [
            torch.empty_like(p, device="meta") for p in (self.order if rebuilt else self.trained)
        ]
        limit = int(self.options.bucket_mb * 2**20)
        buckets, _ = _compute_bucket_assignment_by_size(ordered, [limit])
        low = DTYPES.get(self.options.compression)
        sent: Counter[Sent] = Counter()
        for bucket in buckets:
            dtype = low or ordered[bucket[0]].dtype
            size = sum(ordered[i].numel() for i in bucket) * dtype.itemsize
            sent[Sent("all_reduce", size, self.ranks, _name(dtype), "backward")] += 1
        if not rebuilt:  # the bitmap of used parameters
            sent[Sent("all_reduce", 4 * len(ordered), self.ranks, "int32", "backward")] += 1
        return sent


def step(
    engine: TorchEngine,
    batches: Sequence[Batch],
    functions: StepFunctions,
    recorder: Recorder,
) -> None:
    """An optimizer step without AdamW's update, which allocates and communicates nothing."""
    piped = isinstance(engine, pipeline.PipelineEngine)
    recorder.phase = "pipeline" if piped else "forward"
    engine.accumulate(batches, functions)
    recorder.phase, recorder.part = "optimizer", BUFFERS
    engine.grad_norm()
    recorder.part = "activations"


def track_static(engine: TorchEngine, recorder: Recorder, part: str | None = None) -> None:
    """Track weights, gradients and optimizer state by name, or all of them as `part`."""
    for module in engine.parts:
        if isinstance(module, FSDPModule):  # lazy initialisation moves the shards
            module._get_fsdp_state()._lazy_init()
    state.init_optimizer_state(engine.optimizer)
    for name, tensors in _static_tensors(engine).items():
        for tensor in tensors:
            recorder.track(tensor, part or name)


def static_bytes(engine: TorchEngine) -> dict[str, int]:
    return {
        name: sum(local(t).numel() * t.element_size() for t in tensors)
        for name, tensors in _static_tensors(engine).items()
    }


def count_messages(messages: Iterable[tuple[Message, TracePoint]]) -> Counter[Sent]:
    return Counter(
        Sent(m.kind, m.bytes, len(m.ranks), m.dtype, point.phase) for m, point in messages
    )


def _static_tensors(engine: TorchEngine) -> dict[str, list[Tensor]]:
    parameters = [p for part in engine.parts for p in part.parameters()]
    return {
        "weights": [*parameters, *(b for part in engine.parts for b in part.buffers())],
        GRADIENTS: [p.grad for p in parameters if p.grad is not None],
        "optimizer": [t for slots in engine.optimizer.state.values() for t in slots.values()],
    }


def local_blocks(part: nn.Module) -> list[nn.Module]:
    """By base class: FSDP replaces each block's class by a subclass."""
    names: tuple[str, ...] = plan_of(part).blocks
    return [m for m in part.modules() if any(c.__name__ in names for c in type(m).__mro__)]


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def recording(recorder: Recorder, engine: TorchEngine, resting: str = GRADIENTS) -> Iterator[None]:
    """Patch torch's FSDP and pipelining to inform the recorder: which allocations are buffers, when
    gathered weights are allocated and freed, the phase of a stage, and which tensors are gradients.
    Final gradients count as `resting`."""

    def mark(part: str) -> Callable[[Tensor], None]:
        def marked(p: Tensor) -> None:
            if p.grad is not None:
                recorder.track(p.grad, part)

        return marked

    def gathered(tensor: Tensor) -> None:
        recorder.release([tensor])
        recorder.track(tensor, BUFFERS)

    def unsharded(param: Any) -> None:
        p = param._unsharded_param
        if p.requires_grad and not p._post_accumulate_grad_hooks:  # the same parameter every time
            p.register_post_accumulate_grad_hook(mark(GRADIENTS))

    def accumulated(param: Any) -> None:
        if param.unsharded_accumulated_grad is not None:
            recorder.track(param.unsharded_accumulated_grad, GRADIENTS)

    buffers = _during(recorder, part=BUFFERS)
    backward = _during(recorder, phase="backward")
    group, param = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    changes: list[tuple[Any, str, Wrap]] = [
        (group, "unshard", buffers),
        (group, "wait_for_unshard", buffers),
        (group, "post_backward", buffers),
        (param, "init_unsharded_param", call_after(unsharded)),
        (param, "to_accumulated_grad_if_needed", call_after(accumulated)),
        (_fsdp_param, "alloc_storage", call_after(gathered)),
        (_fsdp_param_group, "alloc_storage", call_after(gathered)),
        (_fsdp_param, "free_storage", call_after(lambda tensor: recorder.release([tensor]))),
        (PipelineStage, "_setup_forward_recv_info", buffers),
        (PipelineStage, "_setup_backward_recv_info", buffers),
        (PipelineStage, "forward_one_chunk", _during(recorder, phase="forward")),
        (PipelineStage, "backward_one_chunk", backward),
        (PipelineStage, "backward_weight_one_chunk", backward),
        (PipelineStage, "perform_reduce_grad", backward),
    ]
    with ExitStack() as stack:
        for owner, name, wrap in changes:
            if hasattr(owner, name):  # torch's versions differ
                stack.enter_context(patched(owner, name, wrap))
        for part in engine.parts:
            for p in part.parameters():
                if p.requires_grad:
                    stack.callback(p.register_post_accumulate_grad_hook(mark(resting)).remove)
        yield


def call_after(after: Callable[[Any], None]) -> Wrap:
    """Call `after` with the first argument when the function returns."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Any, *args: Any, **kwargs: Any) -> Any:
            out = real(first, *args, **kwargs)
            after(first)
            return out

        return run

    return wrap


def _during(recorder: Recorder, **settings: str) -> Wrap:
    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = {name: getattr(recorder, name) for name in settings}
            recorder.__dict__.update(settings)
            try:
                return real(*args, **kwargs)
            finally:
                recorder.__dict__.update(before)

        return run

    return wrap
