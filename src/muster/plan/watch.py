"""What a rank sends and holds in a step, told apart: weights, gradients, buffers, activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from muster.data.loader import Batch
from muster.parallel import pipeline, state
from muster.parallel.engine import TorchEngine, Work
from muster.parallel.fsdp import DTYPES
from muster.plan.messages import Message
from muster.plan.trace import Moment, Recorder
from muster.recipe.schema import Recipe

HOST, BUFFERS, GRADIENTS = "host", "buffers", "gradients"


class Sent(NamedTuple):
    """One kind of message; `ranks` is how many take part, `bytes` what this rank puts in."""

    kind: str
    bytes: int
    ranks: int
    dtype: str
    phase: str  # forward, backward, optimizer; pipeline: between stages


class DeviceRecorder(Recorder):
    """The device alone: what rests on the host is known, and not in its way."""

    def _grow(self, part: str, size: int) -> None:
        away = self.held.pop(HOST, 0)
        if part == HOST:
            away += size
        else:
            super()._grow(part, size)
        self.held[HOST] = away


class Buckets:
    """DDP's gradients lie in buckets, from one step to the next. Which share a bucket is decided by
    the order in which they were first computed."""

    def __init__(self, engine: TorchEngine, recorder: Recorder, recipe: Recipe, ranks: int) -> None:
        self.options, self.ranks = recipe.distributed.ddp, ranks
        self.trained = [p for part in engine.parts for p in part.parameters() if p.requires_grad]
        self.order: dict[nn.Parameter, Tensor] = {}
        for p in self.trained:
            place = torch.empty_like(p)
            recorder.hold(place, GRADIENTS)
            p.register_post_accumulate_grad_hook(self._moves_to(place))

    def _moves_to(self, place: Tensor) -> Callable[[Tensor], None]:
        def move(p: Any) -> None:
            self.order[p] = p.grad = place

        return move

    def sent(self) -> Counter[Sent]:
        rebuilt = self.options.static_graph or not self.options.find_unused_parameters
        ordered = [
            torch.empty_like(p, device="meta") for p in (self.order if rebuilt else self.trained)
        ]
        limit = int(self.options.bucket_mb * 2**20)
        buckets, _ = dist._compute_bucket_assignment_by_size(ordered, [limit])  # type: ignore[attr-defined]
        low = DTYPES.get(self.options.compression)
        sent: Counter[Sent] = Counter()
        for bucket in buckets:
            dtype = low or ordered[bucket[0]].dtype
            size = sum(ordered[i].numel() for i in bucket) * dtype.itemsize
            sent[Sent("all_reduce", size, self.ranks, _name(dtype), "backward")] += 1
        if not rebuilt:  # which parameters someone used
            sent[Sent("all_reduce", 4 * len(ordered), self.ranks, "int32", "backward")] += 1
        return sent


def step(
    engine: TorchEngine,
    batches: Sequence[Batch],
    work: Work,
    recorder: Recorder,
    max_norm: float | None,
) -> None:
    """All of an optimizer step that takes memory or sends anything: AdamW works in place."""
    piped = isinstance(engine, pipeline.PipelineEngine)
    recorder.phase = "pipeline" if piped else "forward"
    engine.accumulate(batches, work)
    recorder.phase, recorder.part = "optimizer", BUFFERS
    engine.clip_(max_norm)
    recorder.part = "activations"


def hold(engine: TorchEngine, recorder: Recorder, part: str | None = None) -> None:
    """What a rank has from its first step on, under its own names, or all of it as `part`."""
    for module in engine.parts:
        if isinstance(module, FSDPModule):  # it moves its shards when it is first used
            module._get_fsdp_state()._lazy_init()
    state.begin(engine.optimizer)
    for name, tensors in _held(engine).items():
        for tensor in tensors:
            recorder.hold(tensor, part or name)


def static_bytes(engine: TorchEngine) -> dict[str, int]:
    return {
        name: sum(local(t).numel() * t.element_size() for t in tensors)
        for name, tensors in _held(engine).items()
    }


def counted(messages: Iterable[tuple[Message, Moment]]) -> Counter[Sent]:
    return Counter(
        Sent(m.kind, m.bytes, len(m.ranks), m.dtype, moment.phase) for m, moment in messages
    )


def _held(engine: TorchEngine) -> dict[str, list[Tensor]]:
    parameters = [p for part in engine.parts for p in part.parameters()]
    return {
        "weights": [*parameters, *(b for part in engine.parts for b in part.buffers())],
        GRADIENTS: [p.grad for p in parameters if p.grad is not None],
        "optimizer": [t for held in engine.optimizer.state.values() for t in held.values()],
    }


def blocks_held(part: nn.Module) -> list[nn.Module]:
    """FSDP makes each block's class a subclass of its own."""
    names: tuple[str, ...] = part.plan.blocks  # type: ignore[union-attr,assignment]
    return [m for m in part.modules() if any(c.__name__ in names for c in type(m).__mro__)]


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def watched(recorder: Recorder, engine: TorchEngine, resting: str = GRADIENTS) -> Iterator[None]:
    """Tell the recorder what only torch's FSDP and pipelines know: which memory is a buffer, when a
    gathered weight comes and goes, which pass a stage is in; and what is a gradient, whose last form
    is part of `resting`."""

    def mark(part: str) -> Callable[[Tensor], None]:
        def marked(p: Tensor) -> None:
            if p.grad is not None:
                recorder.hold(p.grad, part)

        return marked

    def gathered(tensor: Tensor) -> None:
        recorder.let_go([tensor])
        recorder.hold(tensor, BUFFERS)

    def whole(held: Any) -> None:
        p = held._unsharded_param
        if p.requires_grad and not p._post_accumulate_grad_hooks:  # the same one every time
            p.register_post_accumulate_grad_hook(mark(GRADIENTS))

    def widened(held: Any) -> None:
        if held.unsharded_accumulated_grad is not None:
            recorder.hold(held.unsharded_accumulated_grad, GRADIENTS)

    buffers = _during(recorder, part=BUFFERS)
    backward = _during(recorder, phase="backward")
    group, held = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    changes: list[tuple[Any, str, Wrap]] = [
        (group, "unshard", buffers),
        (group, "wait_for_unshard", buffers),
        (group, "post_backward", buffers),
        (held, "init_unsharded_param", then(whole)),
        (held, "to_accumulated_grad_if_needed", then(widened)),
        (_fsdp_param, "alloc_storage", then(gathered)),
        (_fsdp_param_group, "alloc_storage", then(gathered)),
        (_fsdp_param, "free_storage", then(lambda tensor: recorder.let_go([tensor]))),
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
                stack.enter_context(changed(owner, name, wrap))
        for part in engine.parts:
            for p in part.parameters():
                if p.requires_grad:
                    stack.callback(p.register_post_accumulate_grad_hook(mark(resting)).remove)
        yield


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def then(after: Callable[[Any], None]) -> Wrap:
    """Call `after` with the first argument when it is done."""

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
            vars(recorder).update(settings)
            try:
                return real(*args, **kwargs)
            finally:
                vars(recorder).update(before)

        return run

    return wrap


@contextmanager
def changed(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, wrap(real))
    try:
        yield
    finally:
        setattr(owner, name, real)
