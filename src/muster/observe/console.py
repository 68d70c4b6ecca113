"""A running run in the terminal: its steps, events and, where asked for, its ranks.

The run itself never writes to a terminal. It is shown from its files, so that one can stop watching
and start again at any time.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from muster.observe import shapes
from muster.observe.events import EVENTS_FILE
from muster.observe.scores import score_words
from muster.reading.text import printable

if TYPE_CHECKING:
    from muster.observe.ranks import RankTable

POLL_S = 0.2
PLAIN_EVERY_S = 10.0
LATEST = 256 * 1024  # bytes of metrics.jsonl: hundreds of steps
RECENT_STEPS = 50  # whose median says how long the rest takes
ACTIVE = ("queued", "starting", "running")


class Tail:
    """New complete lines of a .jsonl file since the last call; starts over when the file is replaced, as
    it is when a run resumes from a checkpoint. Skips a line that a full disk truncated."""

    def __init__(self, path: Path, *, from_end: bool = False, most: int | None = None) -> None:
        """`most`: bytes of the end of a file that is read for the first time."""
        self.path, self.offset, self.inode, self.most = path, 0, 0, most
        if from_end and path.exists():
            found = path.stat()
            self.offset, self.inode = found.st_size, found.st_ino

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self.inode or found.st_size < self.offset:
                self.inode, self.offset = found.st_ino, 0
                if self.most is not None and found.st_size > self.most:
                    file.seek(found.st_size - self.most)
                    self.offset = found.st_size - self.most + len(file.readline())
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    document = json.loads(line)
                except ValueError:
                    continue
                yield document


class Log:
    """New complete lines of a text file since the last call; at first only those at its end. `begin`: how many
    bytes an earlier start wrote, which are left out."""

    def __init__(self, path: Path, end: int = 2048, begin: Callable[[], int] = lambda: 0) -> None:
        self.path, self.end, self.begin = path, end, begin
        self.offset: int | None = None

    def new(self) -> list[str]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            if self.offset is None:
                size, begin = file.seek(0, os.SEEK_END), self.begin()
                begin = begin if begin <= size else 0  # it is another file
                self.offset = max(begin, size - self.end)
                file.seek(self.offset)
                self.offset += len(file.readline()) if self.offset > begin else 0
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
            self.offset += len(whole + newline)
        return whole.decode(errors="replace").splitlines()


def events_to_come(folder: Path) -> Tail:
    """Without those of a run's earlier starts."""
    return Tail(folder / EVENTS_FILE, from_end=True)


def follow(
    folder: Path,
    state: Callable[[], str],
    console: Console,
    ranks: RankTable | None = None,
    events: Tail | None = None,
) -> str:
    """Show the run until it ends; returns its last state. Ctrl-C reaches the caller. With `ranks`,
    rank 0's log and the state of every rank, too. `events` are those to come, all by default."""
    metrics = Tail(folder / "metrics.jsonl", most=LATEST)
    events = events or Tail(folder / EVENTS_FILE)
    # The last step; a run that starts again repeats those after its checkpoint.
    shown: float = math.inf
    log = Log(folder / "ranks" / "0.log", 2048 if ranks else 0, lambda: _old_log(folder))
    begun = False
    show = _Bar(console, ranks) if console.is_terminal else _Lines(console, ranks)
    with show:
        while True:
            now = state()
            for words in log.new() if now != "queued" else ():
                if ranks:
                    show.print(words)
                elif not begun:
                    show.preparing(printable(words).removeprefix("[Rank 0] "))
            for event in events.new():
                if event["event"] in ("started", "restarting"):
                    begun = event["event"] == "started"
                shown = event["step"] if event["event"] == "started" else shown
                show.event(event)
            for line in metrics.new():
                if line["step"] > shown:
                    shown = line["step"]
                    show.step(line)
            if now not in ACTIVE:
                return now
            time.sleep(POLL_S)


def _old_log(folder: Path) -> int:
    """Bytes of rank 0's log that were there when this start began."""
    return int(shapes.info(shapes.document(folder / "run.json")).get("old_log") or 0)


def step_words(line: dict[str, Any], rehearsal: bool = False) -> str:
    """Loss, gradient norm, learning rate and, except in a rehearsal, speed."""
    words = (
        f"loss {_number(line['loss'], '.4f')}  grad {_number(line['grad_norm'], '.3f')}  "
        f"lr {line['lr']:.2e}"
    )
    return words if rehearsal else f"{words}  {line['samples_per_s']:.1f} samples/s"


def _number(value: float | None, form: str) -> str:
    """A skipped step has no finite loss; the file says null."""
    return "not finite" if value is None else format(value, form)


def event_words(event: dict[str, Any]) -> str | None:
    match event["event"]:
        case "started":
            return f"{event['world']} rank(s), steps {event['step']} to {event['steps']}"
        case "resumed":
            passed = "".join(f"; passed over {words}" for words in event["passed_over"])
            before, now = event.get("saved_by"), event.get("world")
            ranks = f", with {now} rank(s) instead of {before}" if before != now else ""
            return f"resumed at step {event['step']} from {event['path']}{ranks}{passed}"
        case "data":
            return "\n".join(event["lines"])
        case "choices":
            titles = {"compile": "torch.compile", "cuda_graphs": "CUDA graphs"}
            return "; ".join(f"{titles[k]}: {event[k]}" for k in titles if k in event)
        case "evaluation":
            best = ", the best so far" if event.get("best") else ""
            words = f"step {event['step']}: {event['split']} {score_words(event['scores'])}{best}"
            return "\n".join([words, *event.get("remarks", [])])
        case "scoring":
            return _scoring_words(event)
        case "early_stop":
            return f"step {event['step']}: {event['words']}; training ends early"
        case "mirror failed":
            step, address = event["step"], event["address"]
            what = "checkpoints were" if step is None else f"the checkpoint of step {step} was"
            return f"{what} not copied to {address}: {event['why']}"
        case "restarting":
            at = f" at step {event['step']}" if "step" in event else ""
            return f"rank {event['rank']} was killed{at} ({event['signal']}); restarting from the last checkpoint"
        case "node_lost" | "device_lost":
            what = "a GPU of " if event["event"] == "device_lost" else ""
            why = str(event["why"]).rstrip(".")
            return f"{what}{event['host']} is lost at step {event['step']} ({why}); the rest go on from the last checkpoint"
        case "node_joined":
            return f"{', '.join(event['hosts'])} joined after step {event['step']}"
        case "world":
            return world_words(event)
        case "continuing":
            return f"the last start of this run ended at step {event['step']}: {event['why']}"
        case "warning":
            return f"warning: {event['words']}"
        case "spike":
            then = "; the update is skipped" if event["skipped"] else ""
            return str(event["words"]) + then
        case "rewind":
            return f"step {event['step']}: {event['words']}"
        case "shrunk":
            after = "; all ranks restart from the last checkpoint" if event["restart"] else ""
            return str(event["words"]) + after
    return None


def world_words(event: dict[str, Any]) -> str:
    """Who trains from here on, of an elastic run."""
    ranks, before, offered = event["ranks"], event["before"], event["offered"]
    words = f"{ranks} rank(s)" + (f" instead of {before}" if before else "")
    words += f" on {len(event['hosts'])} of at most {event['most_nodes']} node(s): {', '.join(event['hosts'])}"
    if offered > ranks:
        words += f"; {offered - ranks} more cannot share the global batch evenly enough and wait"
    return words


def _scoring_words(event: dict[str, Any]) -> str:
    done, batches = event["done"], event["batches"]
    words = f"scoring {event['split']} data: {done} of {batches} batches"
    if not done:
        return words
    return f"{words}, {event['seconds'] / done * (batches - done):.0f} s left"


class _Progress(Progress):
    """With the table of ranks below it, if any."""

    def __init__(self, ranks: RankTable | None, *columns: ProgressColumn, console: Console) -> None:
        self.ranks = ranks
        super().__init__(*columns, console=console)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.ranks:
            yield self.ranks.table()


class _Bar:
    """A live line: step, loss, gradient norm, learning rate, speed, time left; before the first step, what
    rank 0 last said."""

    def __init__(self, console: Console, ranks: RankTable | None = None) -> None:
        self.progress = _Progress(
            ranks,
            TextColumn("{task.fields[head]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self.bar = self.progress.add_task("", total=None, head="starting …")
        self.rehearsal, self.steps = False, 0

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.rehearsal = event.get("rehearsal", False)
            self.steps = event["steps"]
            self._go_to(event["step"], "")
        words = event_words(event)
        if event["event"] == "scoring":
            self.progress.update(self.bar, description=words)
        elif words:
            self.print(words)

    def print(self, words: str) -> None:
        self.progress.console.print(printable(words))

    def step(self, line: dict[str, Any]) -> None:
        self._go_to(line["step"], step_words(line, self.rehearsal))

    def preparing(self, words: str) -> None:
        self.progress.update(self.bar, description=words)

    def _go_to(self, step: int, words: str) -> None:
        head = f"step {step}/{self.steps}"
        self.progress.update(
            self.bar, total=self.steps, completed=step, description=words, head=head
        )


class _Lines:
    """Plain lines at intervals, for logs and pipes."""

    def __init__(self, console: Console, ranks: RankTable | None = None) -> None:
        self.console, self.ranks, self.total, self.next = console, ranks, 0, 0.0
        self.rehearsal, self.recent = False, deque[float](maxlen=RECENT_STEPS)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.total, self.rehearsal = event["steps"], event.get("rehearsal", False)
        if words := event_words(event):
            self.print(words)

    def preparing(self, words: str) -> None:
        """Nothing: the log has it."""

    def step(self, line: dict[str, Any]) -> None:
        self.recent.append(line["step_time_s"])
        if time.monotonic() >= self.next or line["step"] == self.total:
            self.next = time.monotonic() + PLAIN_EVERY_S
            left = (self.total - line["step"]) * statistics.median(self.recent)
            words = step_words(line, self.rehearsal)
            self.print(f"step {line['step']}/{self.total}  {words}  {left:.0f} s left")
            for words in self.ranks.lines() if self.ranks else ():
                self.print(f"  {words}")

    def print(self, words: str) -> None:
        self.console.print(printable(words), soft_wrap=True)
