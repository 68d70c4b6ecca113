"""The best step of a run by one score on its validation data, and when to end early.

The rule sees one evaluation after the other. Its state is in every checkpoint, so that a run that is
resumed keeps the best that it had, and waits no longer than one that was never interrupted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.errors import RecipeError
from muster.observe.scores import MAIN, main_score
from muster.recipe.schema import Recipe
from muster.recipe.training import EarlyStopping
from muster.tasks.base import Task
from muster.workloads import Better

log = logging.getLogger(__name__)
STATE = ("metric", "keeps", "best_step", "best", "reference", "stale", "step", "score")


@dataclass
class Selection:
    metric: str | None  # None until the first evaluation of a task that declares no scores
    better: Mapping[str, Better]  # by score
    keeps: bool = True  # whether the best step is saved and kept
    early: EarlyStopping | None = None
    best_step: int | None = None
    best: float | None = None
    reference: float | None = None  # at the last improvement that early stopping counts
    stale: int = 0  # evaluations since
    step: int | None = None  # of the last evaluation
    score: float | None = None

    def add(self, step: int, scores: Mapping[str, float]) -> bool:
        """Whether the evaluation after `step` steps is the best so far. Of equal ones the first is; a score
        that is not finite never is."""
        self.metric = self.metric or main_score(scores)
        if self.metric is None:
            return False
        if self.metric not in scores:
            raise RecipeError(
                f"evaluation.metric: {self.metric!r} is not among the scores of this task: "
                f"{', '.join(scores)}"
            )
        score = float(scores[self.metric])
        self.step, self.score = step, score if math.isfinite(score) else None
        improved = self._better(score, self.best)
        if improved:
            self.best_step, self.best = step, score
        margin = self.early.min_delta if self.early else 0.0
        if self._better(score, self.reference, margin):
            self.reference, self.stale = score, 0
        else:
            self.stale += 1
        return improved

    def _better(self, score: float, other: float | None, margin: float = 0.0) -> bool:
        if not math.isfinite(score) or other is None:
            return math.isfinite(score)
        gain = score - other if self.better[str(self.metric)] == "max" else other - score
        return gain > margin

    @property
    def exhausted(self) -> bool:
        """Whether `training.early_stopping` ends the run now."""
        return self.early is not None and self.stale >= self.early.patience

    def words(self) -> str:
        """Why it ended, for people."""
        best = f"{self.reference:.4g}" if self.reference is not None else "none"
        return f"no better {self.metric} than {best} in {self.stale} evaluations"

    def state(self) -> dict[str, Any]:
        better = self.better[self.metric] if self.metric else None
        return {"better": better, **{key: getattr(self, key) for key in STATE}}

    def load(self, state: Mapping[str, Any], saved: set[int]) -> None:
        """From a checkpoint of this run, where `saved` are the steps of all complete ones. A best step that
        is no longer there, or that another score has chosen, is forgotten."""
        if not state or state["metric"] is None:
            return
        if self.metric is not None and state["metric"] != self.metric:
            log.warning(
                "evaluation.metric was %s and is %s now: the best checkpoint is chosen anew",
                state["metric"],
                self.metric,
            )
            return
        for key in STATE:
            if key != "keeps":
                setattr(self, key, state[key])
        if self.keeps and self.best_step is not None and self.best_step not in saved:
            log.warning(
                "the best checkpoint, step-%d, is missing or damaged; the next best is kept instead",
                self.best_step,
            )
            self.best_step = self.best = None


def selection_for(recipe: Recipe, task: Task, steps: int) -> Selection | None:
    """None where there is nothing to choose from: no evaluation before the end of `steps` steps."""
    every, early = recipe.evaluation.every_steps, recipe.training.early_stopping
    validated = task.source("validation") is not None
    if early and not validated:
        raise RecipeError(
            "training.early_stopping: there is no validation data to score; name some as data.validation, or "
            "leave training.early_stopping out"
        )
    if early and (every is None or every >= steps):
        raise RecipeError(
            "training.early_stopping counts evaluations before the end, and there is none: "
            f"evaluation.every_steps is {every} and the run has {steps} steps; set it to a part of them"
        )
    if not (recipe.checkpoint.best or early) or not validated or every is None or every >= steps:
        return None
    declared = task.facts.scores
    return Selection(
        _metric(recipe, declared),
        declared or {name: "max" if more else "min" for name, more in MAIN.items()},
        keeps=recipe.checkpoint.best,
        early=early,
    )


def _metric(recipe: Recipe, declared: Mapping[str, Better]) -> str | None:
    asked = recipe.evaluation.metric
    if asked == "auto":
        if not declared and recipe.training.early_stopping:
            raise RecipeError(
                f"training.early_stopping: {recipe.task} does not say what its scores are; add "
                'scores = {"NAME": "min"} (or "max") to the class'
            )
        return next(iter(declared), None)
    if asked not in (declared or MAIN):
        cure = f"choose {' or '.join(declared)}" if declared else ""
        raise RecipeError(
            f"evaluation.metric: {asked!r} is no score that {recipe.task} declares; "
            + (cure or f'add scores = {{"{asked}": "min"}} (or "max") to the class')
        )
    return asked
