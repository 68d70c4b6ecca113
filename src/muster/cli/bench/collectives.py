"""`muster bench collectives`: time and bandwidth of what ranks do together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.bench.common import (
    AgainstOption,
    Document,
    FolderOption,
    JsonOption,
    RanksOption,
    figure_of,
    measure_and_show,
    size_in,
    size_of,
    tell,
    title,
)
from muster.cli.common import (
    AddressOption,
    NodeRankOption,
    NodesOption,
    PortOption,
    RehearseOption,
    console,
)
from muster.errors import LaunchError

if TYPE_CHECKING:
    from muster.bench.results import Comparison

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64")


def collectives(
    gpus: RanksOption = None,
    rehearse: RehearseOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this one; may be given several times."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Number type; may be given several times. Default: float32."
        ),
    ] = None,
    smallest: Annotated[
        str, typer.Option("--min", metavar="SIZE", help="The first array: 1K, 64M, 1G or bytes.")
    ] = "1K",
    largest: Annotated[
        str | None,
        typer.Option(
            "--max",
            metavar="SIZE",
            help="The last. Default: 256M on GPUs, 16M on CPU ranks.",
            show_default=False,
        ),
    ] = None,
    factor: Annotated[int, typer.Option(min=2, help="From one size to the next.")] = 4,
    against: AgainstOption = None,
    folder: FolderOption = Path("runs/bench"),
    as_json: JsonOption = False,
    nodes: NodesOption = None,
    node_rank: NodeRankOption = None,
    master_addr: AddressOption = None,
    master_port: PortOption = None,
) -> None:
    """Latency, algorithm and bus bandwidth of collectives, each one proven right. Exit code 1 where
    values are wrong."""
    first, last = size_in("--min", smallest), size_in("--max", largest) if largest else None
    if last and last < first:
        raise LaunchError(f"--max {largest} is less than --min {smallest}")
    options = {
        "only": _known("--only", only or [], NAMES),
        "dtypes": _known("--dtype", dtype or ["float32"], DTYPES),
        "smallest": first,
        "largest": last,
        "factor": factor,
    }
    document = measure_and_show(
        "collectives",
        options,
        ranks=gpus,
        nodes=(nodes, node_rank, master_addr, master_port),
        folder=folder,
        against=against,
        as_json=as_json,
        show=_show,
        draw=_draw,
        rehearse=rehearse,
    )
    if document is None:
        return
    from muster.bench.collectives import save_for_planner, wrong_rows
    from muster.hardware import rehearsal

    if not rehearsal.active():
        words = save_for_planner(document, folder)
        if not as_json:
            console.print(words, soft_wrap=True)
    if wrong_rows(document):
        raise typer.Exit(1)


def _known(option: str, asked: list[str], known: tuple[str, ...]) -> list[str]:
    for name in asked:
        if name not in known:
            raise LaunchError(f"{option} {name}: expected one of {', '.join(known)}")
    return list(dict.fromkeys(asked))


def _draw(path: Path, document: Document) -> list[Path]:
    from muster.bench.picture import draw_collectives

    return draw_collectives(
        path, document["rows"], f"Collectives, in place where they can be, {title(document)}"
    )


def _show(document: Document, comparison: Comparison | None) -> None:
    from rich.table import Table

    several = len({row["dtype"] for row in document["rows"]}) > 1
    names = ["", *(["dtype"] if several else []), "place", "size"]
    figures = ["median\nµs", "p99\nµs", "before" if comparison else "calls", "GB/s", "bus\nGB/s"]
    table = Table(*names, *figures)
    for column in table.columns[len(names) - 1 :]:
        column.justify = "right"
    table.columns[0].no_wrap = True
    section = None
    for row in document["rows"]:
        begins, section = row["collective"] != section, row["collective"]
        if begins:
            table.add_section()
        cells = [section if begins else "", *([row["dtype"]] if several else []), row["where"]]
        cells += [size_of(row["bytes"]), f"{row['time_us']:,.0f}", f"{row['p99_us']:,.0f}"]
        cells += [_before(comparison, row, document["keys"]) if comparison else str(row["repeats"])]
        cells += [figure_of(row[f"{kind}_gb_per_s"]) for kind in ("algorithm", "bus")]
        table.add_row(*cells, style="red" if row["wrong"] else None)
    kinds = "" if several else f", {document['rows'][0]['dtype']}" if document["rows"] else ""
    console.print(f"{title(document)}{kinds}", soft_wrap=True)
    console.print(table)
    _tell_problems(document)


def _before(comparison: Comparison, row: Document, keys: list[str]) -> str:
    ratio = comparison.ratios.get(tuple(row[key] for key in keys))
    return f"× {ratio:.2f}" if ratio else "–"


def _tell_problems(document: Document) -> None:
    for row in document["rows"]:
        for words in row["wrong"]:
            what = f"{row['collective']} {row['dtype']} {row['where']}, {size_of(row['bytes'])}"
            tell("wrong:", f"{what}, {words}", "bold red")
    for row in document["left_out"]:
        what = f"{row['collective']} {row['dtype']} {row['where']}"
        console.print(f"not offered by {document['backend']}: {what} ({row['refused']})")
    if fits := document["largest_that_fits"]:
        console.print(f"sizes above {size_of(fits)} left out: they do not fit into free memory")
