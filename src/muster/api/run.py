"""A run, as Python sees it: everything is read from its folder, whichever process runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from muster import run_directory
from muster.errors import MusterError
from muster.observe.evaluations import best
from muster.observe.events import EVENTS_FILE, Restart, restarts_in
from muster.observe.results import read_lines

if TYPE_CHECKING:
    import pandas

POLL_S = 0.1
STOP_WAIT_S = 120.0  # that a run has to save and end by itself


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run."""

    step: int
    split: str
    name: str  #: of the score, such as `wer` or `perplexity`
    score: float
    checkpoint: Path | None  #: of that step; None if none was saved then, or it was removed since


class Run:
    """A run by its folder, its name in `root`, or `latest`."""

    def __init__(self, run: str | Path, root: str | Path = "runs") -> None:
        self._folder = run_directory.find(str(run), Path(root))

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._folder.path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self._folder.name

    @property
    def state(self) -> str:
        """queued, starting, running, finished, failed, stopped, or interrupted: its process is gone."""
        return self._folder.state()

    @property
    def info(self) -> dict[str, Any]:
        """run.json: when and where it was started, on how many ranks, how it ended."""
        return self._folder.info()

    @property
    def results(self) -> dict[str, Any] | None:
        """training_results.json; None until the run has ended."""
        return None if self.state in run_directory.ALIVE else self._folder.results()

    @overload
    def metrics(self, *, frame: Literal[False] = False) -> list[dict[str, Any]]: ...
    @overload
    def metrics(self, *, frame: Literal[True]) -> pandas.DataFrame: ...
    def metrics(self, *, frame: bool = False) -> list[dict[str, Any]] | pandas.DataFrame:
        """One row per optimizer step, up to now; as a pandas data frame if asked for."""
        rows = read_lines(self.path / "metrics.jsonl")
        if not frame:
            return rows
        try:
            import pandas
        except ImportError:
            raise MusterError("frame=True needs pandas: pip install pandas") from None
        return pandas.DataFrame(rows)

    @property
    def last(self) -> dict[str, Any]:
        """The row of the last step; empty before the first."""
        return self._folder.last_metrics()

    def events(self) -> list[dict[str, Any]]:
        """What happened: starts, evaluations, restarts, each with its time."""
        return read_lines(self.path / EVENTS_FILE)

    def restarts(self) -> list[Restart]:
        """Its starts after the first, by its supervisor or by someone, each with why and from which step."""
        return restarts_in(self.events())

    def log(self, rank: int = 0) -> str:
        """What a rank has written, up to now."""
        path = self.path / "ranks" / f"{rank}.log"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.log"))) or "none yet"
            raise MusterError(f"{self.name} has no log of rank {rank}; ranks with a log: {known}")
        return path.read_text(errors="replace")

    @property
    def best(self) -> Best | None:
        """The best evaluation by `evaluation.metric`, else by the task's own score: on validation data, or where
        there is none, on what the run was scored on at its end. None where nothing was scored."""
        found = best(self.events())
        if found is None:
            return None
        saved = self.path / "checkpoints" / f"step-{found['step']}"
        whole = (saved / "manifest.json").is_file()
        return Best(
            found["step"], found["split"], found["name"], found["value"], saved if whole else None
        )

    def wait(self, timeout: float | None = None) -> Run:
        """Return this run when it has finished or was stopped; after `timeout` seconds raise TimeoutError.

        A run that failed raises a MusterError with what failed, the likely cause and the cure; so does one
        whose process is gone. Ctrl-C ends the waiting, not the run.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while (state := self.state) in run_directory.ALIVE:
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError(f"{self.name} is still {state} after {timeout:g} s")
                time.sleep(POLL_S)
        except KeyboardInterrupt as error:
            error.add_note(f"{self.name} goes on; muster.Run({str(self.path)!r}).stop() ends it")
            raise
        self._folder.wait_for_owner()
        if state == "failed":
            raise MusterError(*self._failure())
        if state not in run_directory.ENDED:
            raise MusterError(
                f"{self.name} was {state}: its process is gone; go on: muster.train({str(self.path)!r})"
            )
        return self

    def _failure(self) -> list[str]:
        failure = self.info.get("failure") or {}
        words = [f"{self.name} failed: {failure.get('what', 'see its logs')}"]
        for title, key in (("likely cause", "cause"), ("what to do", "cure")):
            if failure.get(key):
                words.append(f"{title}: {failure[key]}")
        return [*words, f"logs: {self.path}/ranks"]

    def stop(self, *, now: bool = False, wait: float = STOP_WAIT_S) -> str:
        """Ask the run to save a checkpoint and end, and wait for it; after `wait` seconds, or with `now`
        at once, end its processes. Returns what it took: asked, terminated, killed, or cancelled for
        a run that waited at a scheduler."""
        state = self.state
        if state not in run_directory.ALIVE:
            go_on = f"; go on: muster train {self.path}" if state != "finished" else ""
            raise MusterError(f"{self.name} is not running: it is {state}{go_on}")
        if state == "queued":
            self._cancel()
            return "cancelled"
        return run_directory.stop(self._folder, wait, now=now)

    def _cancel(self) -> None:
        """It waits at a scheduler, where no process of it can be asked."""
        from muster.launch import slurm

        if not self.info.get("slurm_job"):
            raise MusterError(
                f"{self.name} waits at a scheduler; take it back there "
                f"(kubectl delete -f {self.path}/kubernetes.yaml)"
            )
        slurm.cancel(self._folder)

    def __repr__(self) -> str:
        step = f", step {self.last['step']}" if self.last else ""
        return f"<muster.Run {self.name}: {self.state}{step}>"

    def _repr_html_(self) -> str:
        """In a notebook: its state and curves."""
        from muster.api.curves import as_html

        return as_html(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)


def runs(root: str | Path = "runs") -> list[Run]:
    """All runs in `root`, newest first."""
    return [Run(found.path) for found in run_directory.every(Path(root))]
