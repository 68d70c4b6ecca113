"""What the forms of `muster bench` share: options, starting ranks, keeping and comparing results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.bench.files import Document
from muster.cli.common import begin_rehearsal, console
from muster.errors import DataError, LaunchError
from muster.observe.progress import working

if TYPE_CHECKING:
    from muster.bench.results import Comparison

FolderOption = Annotated[Path, typer.Option("--dir", help="Where the figures are kept.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|last", help="An earlier result to compare with.", show_default=False
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--gpus", min=1, metavar="N", help="Ranks here. Default: every GPU, or 2 CPU ranks."
    ),
]

NoRehearsalOption = Annotated[
    int | None, typer.Option("--rehearse", hidden=True)  # so that the refusal says why
]

FIGURES = {
    "time_us": "the time",
    "gb_per_s": "the bandwidth",
    "step_s": "the step time",
    "efficiency": "the efficiency",
}

UNITS = {"collectives": "rows", "p2p": "rounds", "overlap": "settings"}

Nodes = tuple[int | None, int | None, str | None, int | None]


def measure_and_show(
    form: str,
    options: dict[str, Any],
    *,
    ranks: int | None,
    nodes: Nodes,
    folder: Path,
    against: str | None,
    as_json: bool,
    show: Callable[[Document, Comparison | None], None],
    draw: Callable[[Path, Document], list[Path]],
    beforehand: str = "",
    rehearse: int | None = None,
) -> Document | None:
    """Measure on all ranks; rank 0, or the process that started them, keeps, compares and shows.
    `nodes` is --nodes, --node-rank, --master-addr and --master-port as given; `beforehand` is said
    where the wait is long. A rehearsal shows which values are right, and keeps nothing."""
    from muster.bench import ranks as benches
    from muster.bench import results
    from muster.bench.files import prepare
    from muster.hardware import rehearsal
    from muster.launch import cluster
    from muster.launch.join import is_rank

    if rehearse:
        ranks = begin_rehearsal(rehearse, ranks)
    count, rank, address, port = nodes
    node = cluster.node(os.environ, count or 0, rank, address or "", port or 0)
    if is_rank() and ((ranks and not rehearse) or count):
        raise LaunchError("these ranks were started already; leave --gpus and --nodes out")
    before = None
    if cluster.detect(os.environ).rank == node.rank == 0:  # who will show it
        prepare(folder)
        before = results.earlier(against, form, folder) if against else None
        if beforehand and not as_json:
            console.print(beforehand, style="dim")
    with working(f"measuring {form}", UNITS[form]) as progress:
        document = benches.measure(form, options, ranks, node, tell=progress)
    if document is None:
        return None
    if rehearsal.active():
        _show_values(document, as_json)
        return document
    finish(document, before, folder, as_json, show, draw)
    return document


def _show_values(document: Document, as_json: bool) -> None:
    """Which rows have the right values, without their times."""
    rows = [{name: row[name] for name in (*document["keys"], "wrong")} for row in document["rows"]]
    if as_json:
        print(json.dumps({"rehearsal": True, "ranks": document["ranks"], "rows": rows}, indent=2))
        return
    wrong = [row for row in rows if row["wrong"]]
    console.print(f"{title(document)}: a rehearsal", soft_wrap=True)
    console.print(f"{len(rows) - len(wrong)} of {len(rows)} rows have the right values")
    console.print("times are left out: ranks share GPUs", style="dim")
    for row in wrong:
        what = " ".join(str(row[name]) for name in document["keys"])
        tell("wrong:", f"{what}: {row['wrong']}", "bold red")


def finish(
    document: Document,
    before: Document | None,
    folder: Path,
    as_json: bool,
    show: Callable[[Document, Comparison | None], None],
    draw: Callable[[Path, Document], list[Path]],
) -> None:
    """Compare it, print it, keep it, draw it: what was measured is shown, whatever else fails."""
    from muster.bench import results

    comparison = problem = None
    try:
        comparison = results.compare(document, before) if before else None
    except DataError as error:
        problem = error
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        show(document, comparison)
        if comparison:
            _tell(comparison)
    path = results.keep(document, folder)
    for file in (path, *draw(path.with_suffix(".png"), document)):
        if not as_json:
            console.print(f"kept in {file}", soft_wrap=True)
    if problem:
        raise problem


def recipe_and(recipe: str, overrides: list[str] | None) -> tuple[str, list[str]]:
    """Where the recipe is left out, the first key=value stands in its place."""
    if "=" in recipe:
        return "gpt-micro", [recipe, *(overrides or [])]
    return recipe, overrides or []


def size_in(option: str, words: str) -> int:
    """Bytes of `64M`, `1GiB` or `1000`; units are powers of 1024."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", words.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise LaunchError(
            f"{option} {words}: expected a size above zero such as 1K, 64M, 1G or 4096"
        )
    return int(int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " "))


def size_of(size: int) -> str:
    """As one would type it, where it is round."""
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:.4g}{letter}"
    return str(size)


def figure_of(value: float | None) -> str:
    """Three digits, in few columns."""
    if value is None:
        return "–"
    if 0 < value < 0.01:
        return "<0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tell(title: str, words: str, style: str = "yellow") -> None:
    """One line under a table, with what kind it is in front."""
    from rich.text import Text

    console.print(Text.assemble((title, style), f" {words}"), soft_wrap=True)


def title(document: Document) -> str:
    """One line: what was measured on."""
    hosts = document["hosts"]
    where = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    return (
        f"{document['ranks']} ranks{where}, {document['title']}, {document['backend']}, "
        f"torch {document['torch']}"
    )


def _tell(comparison: Comparison) -> None:
    """The verdict of --against in words; the ratios stand in the table."""
    for words in comparison.differs:
        tell("not alike:", words)
    worse = comparison.worse()
    console.print(
        f"against {comparison.path}: {comparison.median:.2f} × {FIGURES[comparison.figure]} before, in the "
        f"median of {len(comparison.ratios)} rows; {len(worse)} of them worse by more than a tenth",
        soft_wrap=True,
    )
