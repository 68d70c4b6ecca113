"""`muster data`: make or look at a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.cli.common import SplitOption, console

app = typer.Typer(no_args_is_help=True, help="Make or look at a corpus.")


@app.command("inspect")
def data_inspect(
    spec: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder, file, glob or embedded:NAME.")
    ],
) -> None:
    """Hours, lengths, vocabulary, a histogram."""
    from muster.data.inspect import inspect

    for part in inspect(spec):
        low, median, high, longest = part.seconds
        console.rule(
            f"{part.split}: {part.clips} clips, {part.hours * 60:.1f} min, {part.files} file(s)",
            align="left",
        )
        console.print(
            f"seconds: shortest {low:.2f}, median {median:.2f}, 95 % {high:.2f}, longest {longest:.2f}",
        )
        console.print(
            f"words: {part.words}, {part.vocabulary} different; characters: {part.characters!r}",
            markup=False,
        )
        console.print("most common: " + ", ".join(f"{w} {n}" for w, n in part.common))
        if part.unreadable:
            console.print(f"[red]{part.unreadable} rows cannot be read[/]")
        most = max(n for _, _, n in part.histogram)
        for start, end, count in part.histogram:
            console.print(
                f"  {start:6.2f}–{end:6.2f} s {'█' * round(40 * count / most)} {count}",
            )


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
    from muster.data.make import make

    for path in make(folder, out, split, shard_mb):
        console.print(str(path))
