"""`muster bench p2p`: bandwidth and latency between every two ranks."""

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

SHOWN = 16  # ranks: a wider matrix is for the picture


def p2p(
    gpus: RanksOption = None,
    rehearse: RehearseOption = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of the block sent: 1M, 1G … Default: 64M between GPUs, 4M between CPU ranks.",
            show_default=False,
        ),
    ] = None,
    against: AgainstOption = None,
    folder: FolderOption = Path("runs/bench"),
    as_json: JsonOption = False,
    nodes: NodesOption = None,
    node_rank: NodeRankOption = None,
    master_addr: AddressOption = None,
    master_port: PortOption = None,
) -> None:
    """Bandwidth and latency from each rank to each other; slow links by name. Exit code 1 where values
    arrive wrong."""
    if gpus == 1 and not nodes:
        raise LaunchError("--gpus 1: one rank has no peer; start at least two")
    document = measure_and_show(
        "p2p",
        {"size": size_in("--size", size) if size else None},
        ranks=gpus,
        nodes=(nodes, node_rank, master_addr, master_port),
        folder=folder,
        against=against,
        as_json=as_json,
        show=_show,
        draw=_draw,
        rehearse=rehearse,
    )
    if document and any(row["wrong"] for row in document["rows"]):
        raise typer.Exit(1)


def _draw(path: Path, document: Document) -> list[Path]:
    from muster.bench.picture import draw_pairs

    return draw_pairs(
        path, document, f"Pairs, {size_of(document['block_bytes'])}, {title(document)}"
    )


def _show(document: Document, comparison: Comparison | None) -> None:
    console.print(title(document), soft_wrap=True)
    block = size_of(document["method"]["bytes"])
    _matrix(f"GB/s, {block} from each row to each column", document, "gb_per_s")
    _matrix("µs, half of a word there and back", document, "latency_us")
    for row in document["rows"]:
        if row["wrong"]:
            pair = f"rank {row['from']} → rank {row['to']}"
            tell("wrong:", f"{pair}: {row['wrong']}", "bold red")
        ratio = comparison and comparison.ratios.get((row["from"], row["to"]))
        if ratio and comparison and (row["from"], row["to"]) in comparison.worse():
            words = f"rank {row['from']} → rank {row['to']}: {ratio:.2f} × the bandwidth before"
            tell("slower:", words)
    for link in document["slow"]:
        tell("slow:", link["words"])


def _matrix(words: str, document: Document, figure: str) -> None:
    from rich.table import Table

    rows, world = document[figure], document["ranks"]
    if world > SHOWN:
        found = sorted(value for row in rows for value in row if value is not None)
        low, middle, high = found[0], found[len(found) // 2], found[-1]
        console.print(f"{words}: {low:.3g} to {high:.3g}, the middle one {middle:.3g}")
        return
    console.print(words)
    table = Table("", *(str(rank) for rank in range(world)))
    for column in table.columns[1:]:
        column.justify = "right"
    for rank, values in enumerate(rows):
        where = f"{rank} on {document['where'][rank]}" if len(document["hosts"]) > 1 else str(rank)
        table.add_row(where, *(figure_of(value) for value in values))
    console.print(table)
