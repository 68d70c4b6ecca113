"""`muster explain`: what went wrong in a log or a run, and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.common import DirOption, console
from muster.errors import MusterError

if TYPE_CHECKING:
    from rich.panel import Panel

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
        return explain_run(run_directory.find(log, root).path)
    except MusterError as error:
        raise MusterError(f"{log}: no log file of that name, and {error}") from None


def panel(report: Report) -> Panel:
    """Without markup: errors of torch hold brackets."""
    from rich.panel import Panel
    from rich.text import Text

    if report.first is None:
        words = f"No failure found in {report.lines:,} lines."
        return Panel(
            Text((words + "\n" + _also(report, 0)).rstrip()),
            title=report.source,
            border_style="green",
        )
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
    text.append(_also(report, 1 if report.cause else 0), style="dim")
    text.rstrip()
    return Panel(text, title=report.source, border_style="red")


def _also(report: Report, skip: int) -> str:
    lines = [
        f"  {seen.known.title} ({seen.location}{f', {seen.count} times' if seen.count > 1 else ''})"
        for seen in report.known[skip:]
    ]
    return "\nalso in the log:\n" + "\n".join(lines) if lines else ""
