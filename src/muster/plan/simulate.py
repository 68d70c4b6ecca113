"""A fake cluster: the recipe's own program, built and run for one step as chosen ranks would.

Process groups are torch's fake ones, which carry nothing, and tensors have no values. Everything
else is real: the model, `parallel.apply`, the schedule, the messages, the memory that is held.
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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stages

from muster import errors
from muster.data.loader import Batch
from muster.errors import MusterError
from muster.models.plan import ParallelPlan
from muster.parallel import pipeline
from muster.parallel.apply import apply
from muster.parallel.blocks import checkpoint_activations
from muster.parallel.engine import TorchEngine, Work
from muster.parallel.fsdp import DTYPES
from muster.parallel.layout import AXES, Layout
from muster.parallel.mesh import Mesh
from muster.parallel.mixtures import refuse_mixtures
from muster.plan.compiled import Compiler
from muster.plan.disguise import as_on_gpu, autocast
from muster.plan.subject import Subject, fake
from muster.plan.trace import Trace
from muster.plan.watch import (
    GRADIENTS,
    HOST,
    Buckets,
    DeviceRecorder,
    Sent,
    blocks_held,
    changed,
    counted,
    hold,
    local,
    static_bytes,
    step,
    then,
    watched,
)
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.train.optimizer import make_optimizer

AT_A_TIME = 2  # ranks


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulated:
    """One step of one rank, after the first. Bytes throughout; `host` are those that rest beside
    the device, `process` what simulating took."""

    rank: int
    peak: int
    at_peak: dict[str, int]
    static: dict[str, int]  # the tensors themselves: weights, gradients, optimizer
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


def ranks_to_try(layout: Layout, plan: ParallelPlan, stages_per_rank: int = 1) -> list[int]:
    """The first rank, one that holds most layers and one of the last stage.

    Shards and pieces of a matrix are dealt out from the front, so the first rank of a stage has as
    much as any other of it; and the first stage has most micro-batches on their way.
    """
    if layout.pipeline * stages_per_rank > plan.layers or layout.pipeline == 1:
        return [0]  # too many stages are refused by whoever builds them
    cuts = pipeline.cut_evenly(pipeline.layer_costs(plan), layout.pipeline * stages_per_rank)
    layers = [
        sum(stop - start for start, stop in cuts[stage :: layout.pipeline])
        for stage in range(layout.pipeline)
    ]
    tried = {0, layers.index(max(layers)), layout.pipeline - 1}
    return [stage * layout.tensor * layout.data_ranks for stage in sorted(tried)]


def simulate(
    subject: Subject,
    layout: Layout,
    *,
    recipe: Recipe,
    precision: str,
    rank: int,
    rows: int,
    pieces: int = 1,
    accumulation: int = 1,
) -> Simulated:
    """One step of `rank`. `pieces` of `rows` samples flow through a pipeline, `accumulation` times.
    What cannot be built raises what it would raise on a cluster. Once in a process: torch remembers
    the shapes of the rank it first was."""
    batch = subject.batch(rows, costliest=True)
    return _Rank(subject.task, layout, recipe, precision, rank).play(batch, pieces * accumulation)


def simulate_all(
    subject: Subject,
    layout: Layout,
    *,
    recipe: Recipe,
    precision: str,
    rows: int,
    pieces: int = 1,
    accumulation: int = 1,
    ranks: Sequence[int] | None = None,
) -> list[Simulated]:
    """Each rank, or those worth trying, in a process of its own, which gives its memory back."""
    if ranks is None:
        each = pipeline.stages_per_rank(recipe.distributed.pipeline_options)
        ranks = ranks_to_try(layout, subject.plan, each)
    batch = subject.batch(rows, costliest=True)
    asked = (recipe, subject.task.assets, layout, precision, batch, pieces * accumulation)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_A_TIME, spawn, max_tasks_per_child=1) as pool:
        answers = [pool.submit(_alone, rank, *asked) for rank in ranks]
        try:
            return [
                _answered(rank, layout, answer.result())
                for rank, answer in zip(ranks, answers, strict=True)
            ]
        except BrokenProcessPool:
            raise MusterError(
                f"simulation of {layout}: a process was killed, most likely for want of host memory; "
                "free some, or simulate a smaller model.preset or fewer micro-batches"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _alone(rank: int, recipe: Recipe, assets: Any, layout: Layout, *rest: Any) -> Any:
    """In a new process. Errors travel as words: not every error of torch can be pickled."""
    torch.set_num_threads(1)
    precision, batch, count = rest
    try:
        task = build_task(recipe, assets)
        return _Rank(task, layout, recipe, precision, rank).play(batch, count)
    except Exception as error:
        return type(error).__name__, str(error)


def _answered(rank: int, layout: Layout, answer: Any) -> Simulated:
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
    layout: Layout
    recipe: Recipe
    precision: str
    rank: int

    def __post_init__(self) -> None:
        self.recorder = DeviceRecorder()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.notes: list[str] = []
        training, layout = self.recipe.training, self.layout
        self.replicas = layout.world if layout.plain else 1
        self.compiler: Compiler | None = None
        if training.compile and layout.tensor == 1:
            if training.activation_checkpointing == "selective":
                self.notes.append("compiled with selective checkpointing: recorded uncompiled")
            else:
                self.compiler = Compiler(self.recorder)
        elif training.compile:
            self.notes.append("compiled with tensor parallelism: recorded uncompiled")
        if training.cuda_graphs:
            self.notes.append("CUDA graphs: recorded without, whose pool of memory is not counted")

    def play(self, batch: Batch, count: int) -> Simulated:
        begin = time.perf_counter()
        self._refuse()
        dist.init_process_group("fake", rank=self.rank, world_size=self.layout.world)
        try:
            engine = self._build()
            resting = HOST if self._offloads else GRADIENTS
            with self.mode, as_on_gpu(), watched(self.recorder, engine, resting):
                return self._step(engine, fake(batch, self.mode), count, begin)
        finally:
            dist.destroy_process_group()

    def _refuse(self) -> None:
        if self.layout.zero:
            raise MusterError(
                f"simulation: {self.layout} is DeepSpeed's own and runs in real processes only; "
                "simulate distributed.strategy=fsdp, which shards the same"
            )
        if self.layout.pipeline > 1 and not hasattr(PipelineStage, "_recv_meta"):
            raise MusterError(
                f"simulation: pipelines on a fake cluster need torch 2.13, this is {torch.__version__}; "
                "upgrade torch, or simulate a layout with distributed.pipeline=1"
            )
        if self.layout.plain:
            refuse_mixtures(self.recipe, self.layout)

    def _build(self) -> TorchEngine:
        """Without DDP, whose reducer looks at values."""
        layout = Layout() if self.layout.plain else self.layout
        axes = None
        if not layout.plain:
            sizes = tuple(layout.sizes[axis] for axis in AXES)
            axes = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
        mesh = Mesh(self.rank if axes else 0, 0, layout, CPU, None, axes)
        engine = apply(
            _OnMeta(self.task),
            mesh,
            self.recipe,
            self.precision,
            lambda named: make_optimizer(self.recipe.training, named),
            self._fill,
        )
        assert isinstance(engine, TorchEngine)
        if self.recipe.training.compile:
            for part in engine.parts:
                self._compile(part)
        return engine

    def _fill(self, model: nn.Module, *_: Any) -> None:
        with self.mode:
            model.to_empty(device="cpu")

    def _compile(self, part: nn.Module) -> None:
        """In the compiler's stead. A block that forgets is one that forgets what it compiled."""
        plan: ParallelPlan = part.plan  # type: ignore[assignment]
        blocks = blocks_held(part)
        others = [module for name, module in part.named_modules() if name in plan.compiled]
        for module in (*blocks, *others):
            vars(module).pop("forward", None)
            if self.compiler is not None:
                self.compiler.module(part, module)
        checkpoint_activations(blocks, self.recipe.training.activation_checkpointing)

    def _step(self, engine: TorchEngine, batch: Batch, count: int, begin: float) -> Simulated:
        recorder, work = self.recorder, self._work()
        hold(engine, recorder, HOST if self._offloads else None)
        buckets = None
        with recorder, self._stream(engine, batch):
            if self.replicas > 1:
                buckets = Buckets(engine, recorder, self.recipe, self.replicas)
            if self.compiler is not None:  # it holds on to what it is first shown
                engine.accumulate([batch] * (count if self.layout.pipeline > 1 else 1), work)
                engine.zero_grad()
            recorder.trace = Trace()
            step(engine, [batch] * count, work, recorder, self.recipe.training.max_grad_norm)
        sent = counted(recorder.trace.messages)
        if buckets is not None:
            sent += buckets.sent()
            self.notes.append("DDP's buckets and their sums: counted, not run")
        if self._offloads:
            hold(engine, recorder, HOST)
            self.notes.append("shards on their way from the host: not counted")
        static = static_bytes(engine)
        return Simulated(
            self.rank,
            recorder.trace.peak,
            recorder.trace.at_peak,
            static,
            sum(static.values()) if self._offloads else 0,
            sent,
            sum(len(blocks_held(part)) for part in engine.parts),
            sum(local(p).numel() for part in engine.parts for p in part.parameters()),
            time.perf_counter() - begin,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            tuple(self.notes),
        )

    @property
    def _sharded(self) -> bool:
        return self.layout.data_ranks > 1 and not self.layout.plain

    @property
    def _offloads(self) -> bool:
        return self._sharded and self.recipe.distributed.fsdp.cpu_offload

    def _work(self) -> Work:
        task, compiler = self.task, self.compiler

        def loss(output: Any, batch: Batch) -> Tensor:
            if compiler is None:
                return task.loss(output, batch)

            def pure(output: Any, tensors: dict[str, Tensor]) -> Tensor:
                return task.loss(output, replace(batch, tensors=tensors))

            return compiler.call("loss", pure, output, batch.tensors)

        return Work(task.prepare, task.inputs, loss, lambda: autocast(self.precision))

    @contextmanager
    def _stream(self, engine: TorchEngine, batch: Batch) -> Iterator[None]:
        """Stages tell each other what they will send; here nobody is there to tell. It is the residual
        stream, [rows, time, width], which no stage changes."""
        if not isinstance(engine, pipeline.PipelineEngine):
            yield
            return
        rows, length = self.task.inputs(batch).args[0].shape
        rounds = self._sharded and engine.parts[0].plan.cast_weights  # type: ignore[union-attr]
        low = DTYPES.get(self.precision) if rounds else None
        x = torch.empty(
            rows, length // engine.pieces, engine.width, dtype=low or torch.float32, device="meta"
        )
        ahead = stages.extract_tensor_meta(x.clone().requires_grad_())
        back = stages.extract_tensor_meta(x)

        def receive(stage: PipelineStage, source: int) -> Any:
            if source < stage.stage_index:
                return stages._StageForwardMeta(forward_metas=(ahead,))
            return stages._StageBackwardMeta(backward_metas=(back,))

        def send(stage: PipelineStage, told: Any, target: int) -> None:
            (meta,) = told.forward_metas if target > stage.stage_index else told.backward_metas
            if (meta.shape, meta.dtype) != (x.shape, x.dtype):
                raise MusterError(
                    f"simulation: stage {stage.stage_index} sends {meta}, where the stream between "
                    f"stages was taken to be {ahead}; this model's pipeline cannot be simulated"
                )

        def forget(stage: PipelineStage) -> None:
            self.recorder.trace = Trace()

        with (
            changed(PipelineStage, "_recv_meta", lambda _: receive),
            changed(PipelineStage, "_send_meta", lambda _: send),
            changed(PipelineStage, "_post_metadata_inference_cleanup", then(forget)),
        ):
            yield


@dataclass(frozen=True)
class _OnMeta:
    """Builds what the task builds, always without memory."""

    task: Task

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return self.task.build_model()

    def build_part(self, start: int, stop: int) -> nn.Module:
        with torch.device("meta"):
            return self.task.build_part(start, stop)

    def weights(self) -> Any:
        return object()  # that there are some is enough: nobody reads them
