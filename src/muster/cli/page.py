"""Looking at runs: the live page, and what differs between two."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from muster.cli.common import DirOption, console
from muster.errors import MusterError

if TYPE_CHECKING:
    from muster.page.document import Comparison, Ratio, Summary

NEEDED = ("starlette", "uvicorn")
MOST_SHOWN = 60  # characters of a value

PagePortOption = Annotated[
    int | None,
    typer.Option(
        "--port", min=1, max=65535, help="By default one that is free.", show_default=False
    ),
]


def page(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN…]", help="Only these runs.", show_default=False),
    ] = None,
    dir: DirOption = Path("runs"),
    port: PagePortOption = None,
    open: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """A live page of all runs: curves, every rank, mistakes, what differs. On this machine's loopback address,
    until Ctrl-C."""
    source = context.get_parameter_source("dir")
    if not runs and not dir.is_dir() and source and source.name != "DEFAULT":
        raise MusterError(f"--dir: there is no folder {dir}")
    serve_page(runs, dir, port, open_browser=open)


def serve_page(
    runs: list[str] | None, dir: Path, port: int | None = None, *, open_browser: bool = False
) -> None:
    from muster import run_directory

    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise MusterError(
            f"the page needs {' and '.join(missing)}: pip install 'muster-train[page]'"
        )
    from muster.page.server import serve

    given = [run_directory.find(run, dir) for run in runs] if runs else None
    first = given[0].name if given is not None and len(given) == 1 else None

    def ready(address: str, port: int) -> None:
        address += f"#/run/{first}" if first else ""
        console.print(address, soft_wrap=True)
        console.print(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}, then the same "
            "address; Ctrl-C ends the page, not the runs",
            soft_wrap=True,
            style="dim",
        )
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    serve(dir, None if given is None else [run.path for run in given], port, ready)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run's folder, its name, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    dir: DirOption = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also as a page, like muster report A B.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """What differs between two runs: recipe, data, environment, losses, scores, speed."""
    from muster import run_directory
    from muster.page.compare import compare_runs

    paths = [run_directory.find(run, dir).path for run in (a, b)]
    found = compare_runs(*paths)
    if json:
        import json as encoder

        print(encoder.dumps(found, ensure_ascii=False, indent=2))
    else:
        _print(found)
    if output is not None:
        from muster.page import report

        report.write(paths, output)
        if not json:
            console.print(f"the page: {output}", soft_wrap=True)


def _print(found: Comparison) -> None:
    a, b = found["a"], found["b"]
    _table("run", a, b, [(what, show(a), show(b)) for what, show in SUMMARY])
    for title in ("recipe", "data", "environment"):
        _different(title, found[title], a, b)  # type: ignore[literal-required]
    _ratios("scores", found["scores"], a, b)
    _ratios("speed, the median", found["speed"], a, b)
    console.print(_losses(found), soft_wrap=True)


SUMMARY: list[tuple[str, Callable[[Summary], str]]] = [
    ("state", lambda run: run["state"]),
    ("task", lambda run: run["task"]),
    ("model", lambda run: run["model"]),
    ("strategy", lambda run: f"{run['strategy']}, {run['world']} rank(s)"),
    ("steps", lambda run: str(run["progress"]["step"])),
    (
        "best",
        lambda run: (
            "none"
            if run["best"] is None
            else f"{run['best']['split']} {run['best']['name']} {run['best']['value']:.4g} at step "
            f"{run['best']['step']}"
        ),
    ),
]


def _different(title: str, rows: list[dict[str, Any]], a: Summary, b: Summary) -> None:
    if rows:
        _table(title, a, b, [(row["key"], _value(row["a"]), _value(row["b"])) for row in rows])
    else:
        console.print(f"{title}: the same")


def _ratios(title: str, rows: list[Ratio], a: Summary, b: Summary) -> None:
    shown = [(r["name"], _value(r["a"]), _value(r["b"]), _ratio(r["ratio"])) for r in rows]
    if shown:
        _table(title, a, b, shown)


def _table(title: str, a: Summary, b: Summary, rows: Sequence[tuple[str, ...]]) -> None:
    ratio = ["B ÷ A"] if rows and len(rows[0]) == 4 else []
    table = Table(title, f"A: {a['name']}", f"B: {b['name']}", *ratio)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 2]} …"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _losses(found: Comparison) -> str:
    first = found["first_difference"]
    if first is None:
        return "The losses and gradient norms of the steps that both have are the same numbers."
    what = {"loss": "loss", "grad_norm": "gradient norm"}[first["series"]]
    return f"The {what} differs first at step {first['step']}: {first['a']} and {first['b']}."
