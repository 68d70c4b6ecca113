"""`muster data`: make or look at a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.common import SplitOption, console
from muster.observe.progress import working
from muster.workloads import Content

if TYPE_CHECKING:
    from rich.table import Table

    from muster.data.inspection import Inspection

COLUMNS = 80  # of a terminal, at most

app = typer.Typer(no_args_is_help=True, help="Make or look at a corpus.")


@app.command("inspect")
def data_inspect(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA…", help="Folders, files, globs or embedded:NAME, together one corpus."
        ),
    ],
    kind: Annotated[
        Content | None,
        typer.Option(help="What it holds. Default: told by the files.", show_default=False),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Decode every clip too; training then leaves out those that break.",
        ),
    ] = False,
) -> None:
    """Speech, text, chat rows or images: sizes, a histogram of lengths, duplicates, what cannot be read."""
    from muster.data.inspect import inspect

    with working("decoding" if decode else "reading", "clips") as progress:
        parts, remarks = inspect(data, kind, progress, decode)
    console.print(_table(parts))
    for part in parts:
        _show(part)
    for remark in remarks:
        console.print(remark, soft_wrap=True)


def _table(parts: list[Inspection]) -> Table:
    """A column for each split: there are three at most, and a line has 80 columns."""
    from rich.table import Table

    what, unit = parts[0].what, parts[0].unit
    table = Table("", *(part.split for part in parts))
    for column in table.columns[1:]:
        column.justify = "right"
    of = f"in {'seconds' if unit == 's' else unit}"
    sizes = [f"shortest, {of}", "median", "95 % are at most", "longest"]
    table.add_row("files", *(f"{part.files:,}" for part in parts))
    table.add_row(what, *(f"{part.count:,}" for part in parts))
    for number, name in enumerate(sizes):
        table.add_row(name, *(_length(part.lengths[number], unit) for part in parts))
    table.add_row("unreadable", *(f"{part.unreadable:,}" for part in parts))
    table.add_row("duplicates", *(f"{len(part.twins):,}" for part in parts))
    if any(part.split == "train" for part in parts):
        both = ("" if part.split == "train" else f"{len(part.in_train):,}" for part in parts)
        table.add_row("also in train", *both)
    return table


def _show(part: Inspection) -> None:
    console.rule(part.heading, align="left")
    lines = list(part.details)
    if part.longest:
        lines.append(f"longest: {part.longest}")
    for line in [*lines, *part.duplicates()]:
        console.print(line, soft_wrap=True)
    if part.unreadable:
        console.print(f"{part.unreadable:,} rows cannot be read", style="red")
        for problem in part.problems:
            console.print(f"  {problem}", soft_wrap=True)
    most = max((n for _, _, n in part.histogram), default=1)
    spans = [
        f"{_length(start, part.unit):>9} – {_length(end, part.unit):>9} {part.unit}"
        for start, end, _ in part.histogram
    ]
    widest = min(
        40, min(console.width, COLUMNS) - len(f"    {most:,}") - max(map(len, spans), default=0)
    )
    for span, (_, _, count) in zip(spans, part.histogram, strict=True):
        bar = "█" * round(widest * count / most) or ("▏" if count else "")
        console.print(f"  {span} {bar} {count:,}")


def _length(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "s" else f"{value:,.0f}"


@app.command("make")
def data_make(
    folder: Annotated[Path, typer.Argument(help="Audio files and metadata.csv or metadata.jsonl.")],
    out: Annotated[Path, typer.Argument(help="Where to write the parquet shards.")],
    split: SplitOption = "train",
    shard_mb: Annotated[
        float, typer.Option(min=0.001, help="Largest shard, in MB of audio.")
    ] = 500.0,
) -> None:
    """Write parquet shards from a folder of audio with a metadata file."""
    from muster.data.speech.make import make

    for path in make(folder, out, split, shard_mb):
        console.print(str(path))
