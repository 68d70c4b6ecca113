"""What a tracker is: the one interface behind TensorBoard, Weights & Biases, MLflow, Trackio and a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["finished", "stopped", "failed", "restarts"]
PROJECT = "muster"  # where runs are kept together, unless the tracker's environment variable names another


@dataclass(frozen=True)
class TrackerRun:
    """What a tracker is told before the first metrics."""

    name: str  # of the run directory
    folder: Path  # the run directory
    recipe: dict[str, Any]
    step: int  # that training goes on from; 0 in a new run
    id: str | None = None  # that this tracker's `start` returned when the run was first started

    def flat_recipe(self) -> dict[str, Any]:
        """Dotted keys: `training.lr`."""
        return dict(_flat(self.recipe))


def _flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{dotted}.")
        else:
            found.append((dotted, value))
    return found


class Tracker:
    """Base class of all trackers. Rank 0 calls the methods from one thread, which is not the training thread.

    An exception in `start` ends the tracker; in any other method it loses the values it was given. Neither
    ends the run.
    """

    replaces_steps = False  # True: a step that a resumed run repeats may be sent again

    def start(self, run: TrackerRun) -> str | None:
        """Open the tracker's run, that of `run.id` if there is one. Returns the id to go on with after a
        resume; None if the tracker has none."""
        raise NotImplementedError

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Finite numbers by name, such as `train/loss`."""
        raise NotImplementedError

    def evaluation(self, step: int, split: str, scores: dict[str, float]) -> None:
        self.metrics(step, {f"{split}/{name}": score for name, score in scores.items()})

    def text(self, step: int, name: str, text: str) -> None:
        """A remark on an evaluation. Trackers that show no text leave it out."""

    def flush(self) -> None:
        """After all that has come up to now, about once a second."""

    def finish(self, status: Status) -> None:
        """`restarts`: the run starts again in a moment and goes on with the same id."""
