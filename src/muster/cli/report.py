"""muster report: runs as one file to send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.cli.common import DirOption, console, program

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Default: report.html in the folder of the first run.",
        show_default=False,
    ),
]


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN…", help="Runs: folders, names, or `latest`.", show_default="latest"
        ),
    ] = None,
    output: OutputOption = None,
    dir: DirOption = Path("runs"),
) -> None:
    """Write a run, or several compared, as one HTML file that needs no server and no network."""
    from muster import run_directory
    from muster.page import report as page

    found = [run_directory.find(name, dir).path for name in runs or ["latest"]]
    file = output or found[0] / page.REPORT
    page.write(found, file)
    console.print(f"{file}, {file.stat().st_size / 1024:.0f} KiB", soft_wrap=True)
    if any(run_directory.Run(path).state() in run_directory.ALIVE for path in found):
        console.print(f"live: {program()} page")
