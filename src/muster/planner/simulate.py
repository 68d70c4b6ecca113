"""A fake cluster: the recipe's program, built and run for one step as selected ranks.

Process groups use torch's fake backend and tensors are fake. Everything else is real: the model,
`parallel.apply`, the schedule, the collectives, the allocations.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stages

from muster import errors
from muster.data.loader import Batch
from muster.errors import MusterError
from muster.models.plan import ParallelPlan
from muster.observe.progress import Report, silent
from muster.parallel import pipeline
from muster.parallel.apply import apply
from muster.parallel.blocks import checkpoint_activations
from muster.parallel.conflicts import refuse_conflicts
from muster.parallel.context import share
from muster.parallel.default_plan import plan_of
from muster.parallel.dtypes import DTYPES
from muster.parallel.engine import StepFunctions, TorchEngine
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh, make_axes
from muster.parallel.stages import cut_evenly, stages_per_rank
from muster.planner.collector import collector_paused
from muster.planner.compiled import Compiler
from muster.planner.fake_cuda import autocast, fake_cuda
from muster.planner.meta import allocate, on_meta
from muster.planner.rank_recorder import (
    GRADIENTS,
    HOST,
    Buckets,
    DeviceRecorder,
    Sent,
    call_after,
    count_messages,
    local,
    local_blocks,
    recording,
    static_bytes,
    step,
    track_static,
)
from muster.planner.subject import Subject, fake
from muster.planner.trace import Trace, patched
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.torch_internals import FakeTensorMode
from muster.training.optimizer import make_optimizer

PROCESSES = 2  # at a time, one per rank


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulated:
    """One step of one rank, after the first. Bytes throughout; `host` are those offloaded to
    CPU memory, `process` the memory of the simulation."""

    rank: int
    peak: int
    at_peak: dict[str, int]
    static: dict[str, int]  # weights, gradients, optimizer
    host: int
    sent: Counter[Sent]
    layers: int
    parameters: int  # that this rank holds
    seconds: float
    process: int
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """How many messages of each kind, and their bytes."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for sent, times in self.sent.items():
            count[sent.kind] += times
            size[sent.kind] += times * sent.bytes
        return {kind: (count[kind], size[kind]) for kind in count}

    def as_dict(self) -> dict[str, Any]:
        sent = [s._asdict() | {"times": times} for s, times in self.sent.most_common()]
        return asdict(replace(self, sent=Counter())) | {"sent": sent}


def representative_ranks(layout: Layout, plan: ParallelPlan, each: int = 1) -> list[int]:
    """The first rank, one that holds most layers and one of the last stage.

    Shards are chunked as by torch.chunk, so no rank of a stage holds more than its first; and the first
    stage has most micro-batches in flight.
    """
    if layout.pipeline * each > plan.layers or layout.pipeline == 1:
        return [0]  # too many stages are refused when they are built
    cuts = cut_evenly(plan.costs, layout.pipeline * each)
    layers = [
        sum(stop - start for start, stop in cuts[stage :: layout.pipeline])
        for stage in range(layout.pipeline)
    ]
    chosen = {0, layers.index(max(layers)), layout.pipeline - 1}
    each_stage = layout.world // layout.pipeline
    return [stage * each_stage for stage in sorted(chosen)]


def simulate(
    subject: Subject,
    layout: Layout,
    *,
    recipe: Recipe,
    precision: str,
    rank: int,
    rows: int,
    microbatches: int = 1,
    accumulation: int = 1,
) -> Simulated:
    """One step of `rank`: `accumulation` × `microbatches` micro-batches of `rows` samples. What cannot be
    built raises the same error as on a cluster. Once per process: torch caches the first rank's
    shapes."""
    batch = subject.batch(rows, costliest=True)
    simulated = _Rank(subject.task, subject.plan, layout, recipe, precision, rank)
    return simulated.run(batch, microbatches * accumulation)


def simulate_all(
    subject: Subject,
    layout: Layout,
    *,
    recipe: Recipe,
    precision: str,
    rows: int,
    microbatches: int = 1,
    accumulation: int = 1,
    ranks: Sequence[int] | None = None,
    tell: Report = silent,
) -> list[Simulated]:
    """Each rank, or the representative ones, in a process of its own, which frees its memory."""
    if ranks is None:
        each = stages_per_rank(recipe.distributed.pipeline_options)
        ranks = representative_ranks(layout, subject.plan, each)
    batch = subject.batch(rows, costliest=True)
    count = microbatches * accumulation
    args = (recipe, subject.task.assets, subject.plan, layout, precision, batch, count)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn, max_tasks_per_child=1) as pool:
        answers = [pool.submit(_run_in_process, rank, *args) for rank in ranks]
        try:
            found: list[Simulated] = []
            for rank, answer in zip(ranks, answers, strict=True):
                tell(len(found), len(ranks))
                found.append(_unwrap(rank, layout, answer.result()))
            return found
        except BrokenProcessPool:
            raise MusterError(
                f"simulation of {layout}: a process was killed, most likely out of host memory; "
                "free some, or simulate a smaller model.preset or fewer micro-batches"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run_in_process(
    rank: int, recipe: Recipe, assets: Any, plan: ParallelPlan, layout: Layout, *rest: Any
) -> Any:
    """In a new process. Errors are returned as text: some of torch's cannot be pickled."""
    torch.set_num_threads(1)
    precision, batch, count = rest
    try:
        with collector_paused():
            task = build_task(recipe, assets)
            return _Rank(task, plan, layout, recipe, precision, rank).run(batch, count)
    except Exception as error:
        return type(error).__name__, str(error)


def _unwrap(rank: int, layout: Layout, answer: Any) -> Simulated:
    if isinstance(answer, Simulated):
        return answer
    name, words = answer
    kind = getattr(errors, name, None)
    if kind is None:
        raise MusterError(f"simulation of {layout}: rank {rank} fails with {name}: {words}")
    raise kind(words)


@dataclass
class _Rank:
    """One rank of the fake cluster."""

    task: Task
    plan: ParallelPlan
    layout: Layout
    recipe: Recipe
    precision: str
    rank: int

    def __post_init__(self) -> None:
        self.recorder = DeviceRecorder()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.notes: list[str] = []
        training, layout = self.recipe.training, self.layout
        self.replicas = layout.world if layout.only_replicas else 1
        self.compiler: Compiler | None = None
        if training.compile is True and layout.tensor == 1:
            self.compiler = Compiler(self.recorder)
        elif training.compile is True:
            self.notes.append("compiled with tensor parallelism: recorded uncompiled")
        if training.cuda_graphs is True:
            self.notes.append("CUDA graphs: recorded without; their memory pool is not counted")

    def run(self, batch: Batch, count: int) -> Simulated:
        begin = time.perf_counter()
        self._check_supported()
        dist.init_process_group("fake", rank=self.rank, world_size=self.layout.world)
        try:
            engine = self._build()
            resting = HOST if self._offloads else GRADIENTS
            with self.mode, fake_cuda(), recording(self.recorder, engine, resting):
                return self._step(engine, fake(batch, self.mode), count, begin)
        finally:
            dist.destroy_process_group()

    def _check_supported(self) -> None:
        if self.layout.zero:
            raise MusterError(
                f"simulation: {self.layout} runs in DeepSpeed, which needs real processes; "
                "simulate distributed.strategy=fsdp, which shards the same"
            )
        if self.layout.ddp:
            raise MusterError(
                f"simulation: {self.layout} needs DDP's reducer, which needs real tensors; simulate "
                "distributed.strategy=fsdp, or without distributed.context"
            )
        if self.layout.pipeline > 1 and not hasattr(PipelineStage, "_recv_meta"):
            raise MusterError(
                f"simulation: pipelines on a fake cluster need torch 2.13, this is {torch.__version__}; "
                "upgrade torch, or simulate a layout with distributed.pipeline=1"
            )
        if self.layout.pipeline > 1 and self.plan.embeds:
            raise MusterError(
                f"simulation: {self.layout} sends two tensors between the stages of an encoder and a "
                "decoder, which the fake cluster does not; leave out --simulate, or simulate a layout "
                "with distributed.pipeline=1"
            )
        if self.layout.only_replicas:
            refuse_conflicts(self.recipe, self.layout)

    def _build(self) -> TorchEngine:
        """Without DDP, whose reducer needs real tensors."""
        layout = Layout() if self.layout.only_replicas else self.layout
        axes, context = make_axes(layout, "cpu")
        mesh = Mesh(self.rank if axes else 0, 0, layout, CPU, None, axes, context=context)
        engine = apply(
            _OnMeta(self.task),
            mesh,
            self.recipe,
            self.precision,
            lambda named: make_optimizer(self.recipe.training, named),
            self._fill,
        )
        assert isinstance(engine, TorchEngine)
        if self.recipe.training.compile is True:
            for part in engine.parts:
                self._compile(part)
        return engine

    def _fill(self, model: nn.Module, *_: Any) -> None:
        with self.mode:
            allocate(model)

    def _compile(self, part: nn.Module) -> None:
        """Replaces torch.compile."""
        plan = plan_of(part)
        blocks, checkpointing = local_blocks(part), self.recipe.training.activation_checkpointing
        others = [module for name, module in part.named_modules() if name in plan.compiled]
        for module in (*blocks, *others):
            vars(module).pop("forward", None)
        if self.compiler is None:
            checkpoint_activations(blocks, checkpointing)
            return
        for block in blocks:
            self.compiler.module(part, block, checkpointing)
        for module in others:
            self.compiler.module(part, module)

    def _step(self, engine: TorchEngine, batch: Batch, count: int, begin: float) -> Simulated:
        recorder, functions = self.recorder, self._step_functions()
        track_static(engine, recorder, HOST if self._offloads else None)
        buckets = None
        with recorder, self._patched_metadata(engine, batch):
            if self.compiler is not None:  # tracing keeps tensors alive
                engine.accumulate([batch] * (count if self.layout.pipeline > 1 else 1), functions)
                engine.zero_grad()
            if self.replicas > 1:
                buckets = Buckets(engine, recorder, self.recipe, self.replicas, count)
            recorder.trace = Trace()
            step(engine, [batch] * count, functions, recorder)
        sent = count_messages(recorder.trace.messages)
        if buckets is not None:
            sent += buckets.sent()
            self.notes.append("DDP's buckets and their all-reduces: counted, not run")
        if self._offloads:
            track_static(engine, recorder, HOST)
            self.notes.append("shards being copied from the host: not counted")
        static = static_bytes(engine)
        return Simulated(
            self.rank,
            recorder.trace.peak,
            recorder.trace.at_peak,
            static,
            sum(static.values()) if self._offloads else 0,
            sent,
            sum(len(local_blocks(part)) for part in engine.parts),
            sum(local(p).numel() for part in engine.parts for p in part.parameters()),
            time.perf_counter() - begin,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            tuple(self.notes),
        )

    @property
    def _sharded(self) -> bool:
        return self.layout.sharded

    @property
    def _offloads(self) -> bool:
        return self._sharded and self.recipe.distributed.fsdp.cpu_offload

    def _step_functions(self) -> StepFunctions:
        task = self.task

        def prepare(batch: Batch) -> Batch:
            return share(task.prepare(batch), self.layout, self.rank)

        return StepFunctions(prepare, task.inputs, task.loss, lambda: autocast(self.precision))

    @contextmanager
    def _patched_metadata(self, engine: TorchEngine, batch: Batch) -> Iterator[None]:
        """Replaces the exchange of tensor metadata between stages, which needs the other ranks. Every stage
        sends the residual stream, [rows, time, width]."""
        if not isinstance(engine, pipeline.PipelineEngine):
            yield
            return
        rows, length = self.task.inputs(batch).args[0].shape
        rounds = self._sharded and plan_of(engine.parts[0]).cast_weights
        low = DTYPES.get(self.precision) if rounds else None
        x = torch.empty(
            rows,
            length // engine.sequence_shards,
            engine.width,
            dtype=low or torch.float32,
            device="meta",
        )
        ahead = stages.extract_tensor_meta(x.clone().requires_grad_())
        back = stages.extract_tensor_meta(x)

        def receive(stage: PipelineStage, source: int) -> Any:
            if source < stage.stage_index:
                return stages._StageForwardMeta(forward_metas=(ahead,))
            return stages._StageBackwardMeta(backward_metas=(back,))

        def send(stage: PipelineStage, metas: Any, target: int) -> None:
            (meta,) = metas.forward_metas if target > stage.stage_index else metas.backward_metas
            if (meta.shape, meta.dtype) != (x.shape, x.dtype):
                raise MusterError(
                    f"simulation: stage {stage.stage_index} sends {meta}, expected "
                    f"{ahead}; this model's pipeline cannot be simulated"
                )

        def reset_trace(stage: PipelineStage) -> None:
            self.recorder.trace = Trace()

        with (
            patched(PipelineStage, "_recv_meta", lambda _: receive),
            patched(PipelineStage, "_send_meta", lambda _: send),
            patched(PipelineStage, "_post_metadata_inference_cleanup", call_after(reset_trace)),
        ):
            yield


@dataclass(frozen=True)
class _OnMeta:
    """Builds the task's model on the meta device."""

    task: Task

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.task.blocks

    def build_model(self) -> nn.Module:
        with on_meta():
            return self.task.build_model()

    def build_part(self, start: int, stop: int) -> nn.Module:
        with on_meta():
            return self.task.build_part(start, stop)

    def weights(self) -> Any:
        return object()  # not read
