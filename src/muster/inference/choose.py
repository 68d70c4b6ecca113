"""Which checkpoint is used: of a run the best, unless another is asked for; or several, to be averaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import CheckpointError
from muster.observe.results import MANIFEST, best_step, selection_of, step_folders, step_of
from muster.observe.scores import score_words
from muster.training.manifest import Saved, open_checkpoint, read_manifest


@dataclass(frozen=True)
class Chosen:
    """`all` begins with the one that gives the recipe; several are averaged."""

    all: list[Saved]
    words: str = ""  # which, and why; empty where the user named it

    @property
    def saved(self) -> Saved:
        return self.all[0]


def choose(path: Path, which: str | None = None, average: int = 1) -> Chosen:
    """`which`: best, last or step-N of a run. By default its best, or the last where none was chosen, and of
    several the last. A path of a single checkpoint is that one, and of several those before it too."""
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}")
    if average < 1:
        raise CheckpointError(f"--average {average}: expected a number of checkpoints, 1 or more")
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if which is not None and not step_folders(root):
        raise CheckpointError(
            f"--checkpoint {which} chooses among the checkpoints of a run, and {path} is none that has any; name "
            "the run's folder"
        )
    if average > 1:
        return _several(path, root, which, average)
    if step_of(path) >= 0:
        return Chosen([open_checkpoint(path)])
    if which not in (None, "best", "last"):
        return Chosen([_step(root, str(which))])
    if which == "last":
        saved = open_checkpoint(path)
        return Chosen([saved], f"{saved.path.name}, the last")
    return _best(path, root, needed=which == "best")


def _best(path: Path, root: Path, *, needed: bool) -> Chosen:
    step, note = best_step(root), ""
    if step is not None:
        try:
            saved = open_checkpoint(root / f"step-{step}")
        except CheckpointError as error:
            if needed:
                raise
            note = f"; the best is damaged ({error})"
        else:
            return Chosen([saved], f"{saved.path.name}, {_why(root)}")
    elif needed:
        raise CheckpointError(
            f"{path} has no best checkpoint: none was chosen by a score on validation data during training "
            "(evaluation.every_steps, checkpoint.best); take --checkpoint last"
        )
    saved = open_checkpoint(path)
    return Chosen([saved], f"{saved.path.name}, the last{note}" if step_of(saved.path) >= 0 else "")


def _why(root: Path) -> str:
    selection = selection_of(root)
    whole = (folder for folder in step_folders(root) if (folder / MANIFEST).is_file())
    last = step_of(next(whole))
    metric, score = selection.get("metric"), selection.get("best")
    words = "the best"
    if isinstance(metric, str) and isinstance(score, int | float):
        words += f" by validation {score_words({metric: score})}"
    return words + (f"; the last is step-{last}" if last != selection["best_step"] else "")


def _step(root: Path, which: str) -> Saved:
    folder = root / which
    if step_of(folder) < 0 or not folder.is_dir():
        there = ", ".join(path.name for path in step_folders(root))
        raise CheckpointError(
            f"--checkpoint {which}: expected best, last or one of {there} in {root}"
        )
    return open_checkpoint(folder)


def _several(path: Path, root: Path, which: str | None, count: int) -> Chosen:
    if which == "best":
        found, problems = _by_score(root, count)
        of = "with a score on validation data"
    else:
        start = path if which in (None, "last") else _step(root, str(which)).path
        found, problems = _backwards(start, count)
        of = f"complete up to step {found[0].step}"
    if len(found) < count:
        raise CheckpointError(
            f"--average {count}: {root} has {len(found)} {of}{''.join(problems)}; ask for fewer, or train "
            "with a greater checkpoint.keep and a smaller checkpoint.every_steps"
        )
    _refuse_two_runs(found)
    return Chosen(found, f"the mean of {', '.join(saved.path.name for saved in found)}")


def _backwards(checkpoint: Path, count: int) -> tuple[list[Saved], list[str]]:
    """So many complete checkpoints, the one that `checkpoint` means first, then back."""
    newest = open_checkpoint(checkpoint)
    folders = step_folders(newest.path.resolve().parent)
    return _opened([newest], (f for f in folders if step_of(f) < newest.step), count)


def _by_score(root: Path, count: int) -> tuple[list[Saved], list[str]]:
    """So many whose step was scored, the best first; of equal ones the earlier."""
    scored, problems = [], []
    for folder in step_folders(root):
        try:
            selection = read_manifest(folder)["trainer"].get("selection") or {}
        except CheckpointError as error:
            problems.append(f" ({error})")
            continue
        score = selection.get("score")
        if selection.get("step") == step_of(folder) and score is not None:
            sign = -1.0 if selection["better"] == "max" else 1.0
            scored.append((sign * score, step_of(folder)))
    folders = (root / f"step-{step}" for _, step in sorted(scored))
    found, more = _opened([], folders, count)
    return found, problems + more


def _opened(
    found: list[Saved], folders: Iterator[Path], count: int
) -> tuple[list[Saved], list[str]]:
    problems = []
    for folder in folders:
        if len(found) == count:
            break
        try:
            found.append(open_checkpoint(folder))
        except CheckpointError as error:
            problems.append(f" ({error})")
    return found, problems


def _refuse_two_runs(found: list[Saved]) -> None:
    runs = [_identity(one) for one in found]
    for one, run in zip(found, runs, strict=True):
        if run != runs[0]:
            raise CheckpointError(
                f"--average {len(found)}: {one.path} is of another run than {found[0].path} (their recipes "
                "differ in name, task, seed or model); average the checkpoints of one run"
            )


def _identity(saved: Saved) -> dict[str, Any]:
    recipe = saved.recipe
    return {key: recipe.get(key) for key in ("name", "task", "seed", "model")}
