"""A run as a terminal shows it: progress while it goes, one table at the end, a panel if it failed.

The run itself never writes to a terminal. Whoever watches reads its files, so that watching,
leaving and coming back are the same thing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

POLL_S = 0.2
PLAIN_EVERY_S = 10.0
ACTIVE = ("starting", "running")


class Tail:
    """New whole lines of a .jsonl file since the last look; starts over when the file is replaced,
    as it is when a run goes back to a checkpoint. Passes over a line that a full disk cut short."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.inode = path, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self.inode or found.st_size < self.offset:
                self.inode, self.offset = found.st_ino, 0
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


def follow(folder: Path, state: Callable[[], str], console: Console) -> str:
    """Show the run until it ends; returns its last state. Ctrl-C reaches the caller."""
    metrics, events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
    show = _Bar(console) if console.is_terminal else _Lines(console)
    with show:
        while True:
            now = state()
            for event in events.new():
                show.event(event)
            for line in metrics.new():
                show.step(line)
            if now not in ACTIVE:
                return now
            time.sleep(POLL_S)


def step_words(line: dict[str, Any]) -> str:
    return (
        f"loss {_number(line['loss'], '.4f')}  grad {_number(line['grad_norm'], '.3f')}  "
        f"lr {line['lr']:.2e}  "
        f"{line['samples_per_s']:.1f} samples/s"
    )


def _number(value: float | None, form: str) -> str:
    """A skipped step has no finite loss; the file says null."""
    return "not finite" if value is None else format(value, form)


def event_words(event: dict[str, Any]) -> str | None:
    match event["event"]:
        case "started":
            return f"{event['world']} rank(s), steps {event['step']} to {event['steps']}"
        case "resumed":
            passed = "".join(f"; passed over {words}" for words in event["passed_over"])
            return f"resumed at step {event['step']} from {event['path']}{passed}"
        case "evaluation":
            return f"step {event['step']}: {event['split']} {score_words(event['scores'])}"
        case "restarting":
            return f"rank {event['rank']} was killed ({event['signal']}); starting again from the last checkpoint"
    return None


def score_words(scores: dict[str, float]) -> str:
    """The rates of whatever task it was, in the order of how much they say."""
    forms = {
        "wer": "WER {:.2%}",
        "cer": "CER {:.2%}",
        "accuracy": "accuracy {:.2%}",
        "perplexity": "perplexity {:.3f}",
        "bits_per_byte": "{:.3f} bits per byte",
    }
    return ", ".join(form.format(scores[name]) for name, form in forms.items() if name in scores)


class _Bar:
    """A live line: step, loss, gradient norm, learning rate, speed, time left."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.bar = self.progress.add_task("starting …", total=None, visible=False)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.progress.update(
                self.bar, total=event["steps"], completed=event["step"], visible=True
            )
        if words := event_words(event):
            self.progress.console.print(words, highlight=False, markup=False)

    def step(self, line: dict[str, Any]) -> None:
        self.progress.update(self.bar, completed=line["step"], description=step_words(line))


class _Lines:
    """Plain lines, now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console, self.total, self.next = console, 0, 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.total = event["steps"]
        if words := event_words(event):
            self._say(words)

    def step(self, line: dict[str, Any]) -> None:
        if time.monotonic() >= self.next or line["step"] == self.total:
            self.next = time.monotonic() + PLAIN_EVERY_S
            left = (self.total - line["step"]) * line["step_time_s"]
            self._say(f"step {line['step']}/{self.total}  {step_words(line)}  {left:.0f} s left")

    def _say(self, words: str) -> None:
        self.console.print(words, highlight=False, markup=False, soft_wrap=True)


def results_table(results: dict[str, Any], folder: str) -> Table:
    """The run in one glance."""
    balance = results["balance"]
    rates = results["throughput"]
    table = Table(
        title=f"{results['status']}: {results['steps']} steps in {_minutes(results['total_time_s'])}"
    )
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    if results["scores"]:
        table.add_row(f"unseen {results['scored']} data", score_words(results["scores"]))
    speed = f"{rates['samples_per_s']:.1f} samples/s"
    if "audio_s_per_s" in rates:
        speed = f"{rates['samples_per_s']:.1f} clips/s, {rates['audio_s_per_s']:.0f} × real time"
    if "tokens_per_s" in rates:
        speed += f", {rates['tokens_per_s']:.0f} tokens/s"
    table.add_row("throughput", speed)
    table.add_row(
        "ranks",
        escape(f"{results['world_size']} ({', '.join(sorted(set(results['devices'])))})"),
    )
    if balance:
        table.add_row(
            "balance of the ranks",
            f"slowest ÷ mean {balance['slowest_over_mean']:.3f}; waiting for others "
            f"{balance['comm_wait_share']:.1%}, for data {balance['data_wait_share']:.1%}; "
            f"padding {balance['padding_share']:.1%}",
        )
    for what, key in (("left out", "left_out"), ("cut", "cut")):
        if counts := results.get(key):
            table.add_row(
                f"clips {what}", escape("; ".join(f"{n} {why}" for why, n in counts.items()))
            )
    table.add_row("memory per rank", f"{results['measured']['memory_gib']:.2f} GiB")
    table.add_row("everything is in", escape(folder))
    table.add_row("checkpoint", escape(results["checkpoint"]))
    return table


def failure_panel(failure: dict[str, Any], folder: str) -> Panel:
    """What failed first, in the rank's own words, and where to read on."""
    rank, error = failure["rank"], failure["error"]
    log = f"{folder}/launcher.log" if rank is None else f"{folder}/ranks/{rank}.log"
    if failure["signal"]:
        words = (
            f"Rank {rank} was killed by {failure['signal']}. If nobody did that by hand, the machine "
            "most likely ran out of memory: use a smaller training.per_device_batch_size or fewer ranks."
        )
    elif error and error["expected"]:
        words = str(error["message"])
    elif error:
        who = "The launcher" if rank is None else f"Rank {rank}"
        words = f"{who}: {error['kind']}: {error['message']}"
    else:
        words = f"Rank {rank} ended with exit code {failure['exit_code']} before it could say why."
    # Errors of torch hold brackets ("[/pytorch/…/pair.cc:534] Connection closed"): no markup here.
    return Panel(Text(f"{words}\n\nlog: {log}"), title="the run failed", border_style="red")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
