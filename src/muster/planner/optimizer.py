"""What an optimizer keeps in memory, and how long its step takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.parallel.optimizers.facts import BLOCK, NEWTON_SCHULZ_STEPS, quantizes
from muster.planner.shards import FLOAT, REST, LocalParameter, Stage, cut
from muster.recipe.training import Training

# Bytes of state per element, at least: muon's matrices have one average, other parameters two.
LEAST = {"adamw": 8, "sgd": 4, "adafactor": 0, "muon": 4, "adamw-8bit": 2}
# Bytes that a step moves per element. AdamW reads four numbers and writes three; the norm reads, clipping
# does both. The others divide in a pass of their own. Adafactor's and muon's passes are not fused.
MOVED = {"adamw": 40, "sgd": 36, "adafactor": 76, "muon": 68, "adamw-8bit": 40}


@dataclass(frozen=True)
class OptimizerChoice:
    """The recipe's optimizer, as far as memory and time depend on it."""

    name: str = "adamw"
    momentum: bool = True

    @classmethod
    def of(cls, training: Training) -> OptimizerChoice:
        return cls(training.optimizer, training.optimizer != "sgd" or training.used_momentum > 0)

    @property
    def least_bytes(self) -> int:
        """Per element; exact for adamw and sgd."""
        return LEAST[self.name] if self.momentum else 0

    @property
    def moved_bytes(self) -> int:
        return MOVED[self.name]

    def state_bytes(self, stage: Stage, shards: int, shard: int) -> int:
        """Of one of `shards` FSDP shards of what a pipeline rank holds."""
        if self.name in ("adamw", "sgd"):
            return self.least_bytes * stage.shards(shards, shard, trained=True)
        return sum(self._bytes(p, shards, shard) for p in stage.parameters if p.trained)

    def _bytes(self, p: LocalParameter, shards: int, shard: int) -> int:
        first, *others = p.shape or (1,)
        mine = (cut(first, shards, shard), *others)
        numel = math.prod(mine)
        if self.name == "adafactor":
            if len(mine) < 2:
                return FLOAT * numel
            *batch, rows, columns = mine
            if len(mine) == 2:  # the means of columns are whole on every rank
                return FLOAT * (rows + columns)
            return FLOAT * math.prod(batch) * (rows + columns)
        if self.name == "muon":
            return FLOAT * numel if is_hidden(p) else 2 * FLOAT * numel
        return 2 * numel + 2 * FLOAT * (numel // BLOCK) if quantizes(numel) else 2 * FLOAT * numel

    def flops(self, stage: Stage) -> float:
        """In bfloat16, of every rank: muon orthogonalizes whole matrices (of a tensor rank: its part of
        them, times the ranks, which is left out)."""
        if self.name != "muon":
            return 0.0
        total = 0.0
        for p in stage.parameters:
            if p.trained and is_hidden(p):
                small, large = sorted(p.shape)
                total += NEWTON_SCHULZ_STEPS * (4 * small**2 * large + 2 * small**3)
        return total


def is_hidden(p: LocalParameter) -> bool:
    """Whether muon updates it: a matrix in a block."""
    return p.group != REST and len(p.shape) == 2


ADAMW = OptimizerChoice()
