"""The state of one rank's training."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

import torch

from muster.auto import AutoChoice
from muster.data.loader import Batch, Loader
from muster.observe.heartbeat import beat
from muster.observe.observer import Observer
from muster.observe.profile import Profile
from muster.parallel.context import share
from muster.parallel.engine import Engine, StepFunctions
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe
from muster.tasks.base import Task
from muster.training.buffers import Buffers
from muster.training.checkpoint import Checkpoints
from muster.training.evaluate import Evaluation
from muster.training.precision import LossScale, autocast
from muster.training.rewind import Rewind
from muster.training.selection import Selection
from muster.training.spikes import History

MAX_EVALUATION_BATCH = 32
AHEAD = 2  # micro-batches on a GPU that it has not begun with


@dataclass
class Job:
    """Everything one rank needs to train."""

    recipe: Recipe
    task: Task
    engine: Engine
    mesh: Mesh
    loader: Loader
    checkpoints: Checkpoints
    observer: Observer
    precision: str
    steps: int
    start: int = 0  # completed steps; also the position in the data
    bad_steps: int = 0  # in a row
    spikes: History = field(default_factory=History)
    rewinds: list[Rewind] = field(default_factory=list)
    mixed: bool = False  # whether ranks are on devices of different kinds, which round differently
    scale: LossScale = field(default_factory=LossScale)
    selection: Selection | None = None  # where evaluations choose a checkpoint
    owes_evaluation: bool = False  # it was due at `start`, where an earlier start was stopped
    validated: dict[int, Evaluation] = field(default_factory=dict)  # of the best and the last step
    profile: Profile = field(default_factory=Profile)
    choices: dict[str, AutoChoice] = field(default_factory=dict)
    comparisons: int = 0  # of replicas
    longest_comparison_s: float = 0.0
    current_ids: list[int] = field(default_factory=list)  # samples of the current micro-batch

    @property
    def evaluation_batch(self) -> int:
        """evaluation.batch_size; `auto` is that of a training micro-batch."""
        asked = self.recipe.evaluation.batch_size
        slots = self.loader.ranks * self.loader.accumulation
        per_device = math.ceil(self.recipe.training.global_batch_size / slots)
        return asked if isinstance(asked, int) else min(MAX_EVALUATION_BATCH, per_device)

    @property
    def ended_early(self) -> bool:
        """Whether `training.early_stopping` ended the run."""
        return self.selection is not None and self.selection.exhausted

    def leaves_out(self, step: int) -> bool:
        """Whether a rewind left out the batch of this step, counted from 0."""
        return any(rewind.leaves_out(step) for rewind in self.rewinds)

    @property
    def compiled(self) -> bool:
        return "compile" in self.choices and self.choices["compile"].used

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.engine.parts)

    @cached_property
    def functions(self) -> StepFunctions:
        """The task's functions for the engine."""
        return StepFunctions(
            prepare=self._prepare,
            inputs=self.task.inputs,
            loss=self.task.loss,
            autocast=lambda: autocast(self.precision, self.mesh.device),
        )

    def compared(self, seconds: float) -> None:
        self.comparisons += 1
        self.longest_comparison_s = max(self.longest_comparison_s, seconds)

    def _prepare(self, batch: Batch) -> Batch:
        beat("forward and backward")
        self.current_ids = batch.ids
        prepared = self.task.prepare(self._moved(batch))
        return share(prepared, self.mesh.layout, self.mesh.rank)

    def _moved(self, batch: Batch) -> Batch:
        """On the device. A GPU copies while it computes what was launched before, a few micro-batches ahead."""
        device = self.mesh.device
        if device.type != "cuda":
            return batch.to(device)
        if len(self._begun) == AHEAD:
            self._begun.popleft().synchronize()
        with torch.cuda.stream(self._copies):
            moved = batch.to(device)
        now = torch.cuda.current_stream(device)
        now.wait_stream(self._copies)
        for tensor in moved.tensors.values():
            tensor.record_stream(now)
        self._begun.append(now.record_event(torch.cuda.Event(blocking=True)))
        return moved

    @cached_property
    def _begun(self) -> deque[torch.cuda.Event]:
        """Recorded where the GPU begins with a micro-batch."""
        return deque()

    @cached_property
    def _copies(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.mesh.device)
