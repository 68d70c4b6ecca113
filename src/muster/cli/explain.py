"""`muster explain`: what went wrong in a log or a run, and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.common import DirOption, console
from muster.errors import MusterError
from muster.observe.events import count_words

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

    from muster.diagnose.explain import Report


def explain(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG|RUN",
            help="A log file, a run (folder, name or `latest`), or - to read a pipe.",
        ),
    ] = "latest",
    dir: DirOption = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False,
) -> None:
    """Say what failed first in a log or a run, why, and what to do."""
    report = _read(log, dir)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2, default=str))
    else:
        console.print(panel(report))


def _read(log: str, root: Path) -> Report:
    from muster import run_directory
    from muster.diagnose.explain import explain_file, explain_run, explain_stream

    if log == "-":
        return explain_stream(sys.stdin.buffer, "standard input")
    if Path(log).is_file():
        return explain_file(Path(log))
    try:
        run = run_directory.find(log, root)
    except MusterError as error:
        raise MusterError(f"{log}: no log file of that name, and {error}") from None
    return explain_run(run.path, run.state())


def panel(report: Report) -> Panel:
    """Of Text alone: a panel reads a string in its title as markup."""
    from rich.panel import Panel
    from rich.text import Text

    if report.first is None:
        colour = "yellow" if report.state == "interrupted" else "green"
        return Panel(_no_failure(report), title=Text(report.source), border_style=colour)
    first, text = report.first, Text()
    text.append(first.sentence, style="bold")
    text.append(f"  ({first.location})\n" if first.location else "\n", style="dim")
    if len(first.chain) > 1:
        text.append(f"It led to: {first.chain[-1].partition(chr(10))[0]}\n")
    text.append("\n")
    if report.cause is None:
        text.append("Not known: no entry fits this error. Read the traceback at that line.\n")
    elif not first.for_user or report.cause != first.message:
        text.append("likely cause  ", style="bold").append(f"{report.cause}\n")
    if report.cure:
        text.append("cure          ", style="bold").append(f"{report.cure}\n")
    if report.restarts:
        text.append(f"\nbefore that:\n{_restarts(report)}\n")
    text.append(_seen(report, 1 if report.cause else 0, "also in the log"), style="dim")
    text.rstrip()
    return Panel(text, title=Text(report.source), border_style="red")


def _no_failure(report: Report) -> Text:
    """Of a log or a run that has not failed, with what a run has survived."""
    from rich.text import Text

    ended = {
        "finished": "The run finished",
        "stopped": "The run was stopped, and can go on",
        "interrupted": "The run's processes are gone: killed, or the machine went down. It can go on",
        None: "No failure found",
    }.get(report.state, f"The run is {report.state}")
    if not report.restarts:
        survived = report.state and any(seen.known.level < 2 for seen in report.known)
        if survived:
            ended += ", in spite of what its logs hold"
        elif report.state:
            ended += ". No failure"
        seen = _seen(report, 0, "in its logs" if report.state else "also in the log")
        return Text(f"{ended}{'' if survived else f' in {report.lines:,} lines'}.\n{seen}".rstrip())
    text = Text(f"{ended}, after {' and '.join(count_words(report.restarts))}:\n", style="bold")
    text.append(_restarts(report) + "\n", style="not bold")
    explained = next((again for again in reversed(report.restarts) if again.cause), None)
    if explained:
        text.append(f"\nlikely cause at {explained.when()}  ")
        text.append(f"{explained.cause}\n", style="not bold")
        text.append("cure  ").append(f"{explained.cure}\n", style="not bold")
    text.append(_seen(report, 0, "in its logs, of all its starts"), style="dim not bold")
    text.rstrip()
    return text


def _restarts(report: Report) -> str:
    return "\n".join(f"  {again.when()}: {again.words()}" for again in report.restarts)


def _seen(report: Report, skip: int, title: str) -> str:
    lines = [
        f"  {seen.known.title} ({seen.location}{f', {seen.count} times' if seen.count > 1 else ''})"
        for seen in report.known[skip:]
    ]
    return f"\n{title}:\n" + "\n".join(lines) if lines else ""
