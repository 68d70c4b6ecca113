"""The panel at the end of a run that failed: what failed first, cause, cure, and the log to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.text import Text

from muster.observe.results import complete_steps


def failure_panel(failure: dict[str, Any], folder: str) -> Panel:
    """`failure` as run.json keeps it; `folder` relative to the working directory."""
    words = Text(str(failure["what"]))  # never markup: torch's errors are full of brackets
    for title, part in (("likely cause: ", failure["cause"]), ("what to do: ", failure["cure"])):
        if part:
            words.append(f"\n\n{title}", style="bold").append(part)
    words.append("\n\nwhere: ", style="bold").append(_where(failure))
    words.append("\nlog: ", style="bold").append(_log(failure, folder))
    if failure["hang"]:
        words.append(f"\nstacks of every rank: {folder}/ranks/*.stacks.txt")
    if steps := complete_steps(Path(folder)):
        words.append(f"\nto go on from step {max(steps)}: ", style="bold")
        words.append(f"muster train {folder}")
    return Panel(words, title="the run failed", border_style="red")


def _where(failure: dict[str, Any]) -> str:
    who = "the launcher" if failure["rank"] is None else f"rank {failure['rank']}"
    ended = failure["signal"] or f"exit code {failure['exit_code']}"
    return f"{who} on {failure['host']}, {ended}"


def _log(failure: dict[str, Any], folder: str) -> str:
    rank = failure["rank"]
    return f"{folder}/launcher.log" if rank is None else f"{folder}/ranks/{rank}.log"
