"""`muster data`: make or look at a corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.common import SplitOption, console

if TYPE_CHECKING:
    from muster.data.speech.inspect import SplitSummary

app = typer.Typer(no_args_is_help=True, help="Make or look at a corpus.")


@app.command("inspect")
def data_inspect(
    spec: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder, file, glob or embedded:NAME.")
    ],
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Decode every clip too; training then leaves out those that break.",
        ),
    ] = False,
) -> None:
    """Hours, lengths, vocabulary, a histogram; how it is stored and what cannot be read."""
    from muster.data.speech.inspect import inspect

    with _bar("decoding" if decode else "reading durations") as progress:
        parts = inspect(spec, progress, decode)
    for part in parts:
        _show(part)


@contextmanager
def _bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, so that the summary alone goes into a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(words)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _show(part: SplitSummary) -> None:
    low, median, high, longest = part.seconds
    console.rule(
        f"{part.split}: {part.clips} clips, {part.hours * 60:.1f} min, {part.files} file(s)",
        align="left",
    )
    lines = [
        *(f"columns: {layout}" for layout in part.layouts),
        "audio: " + ", ".join(f"{kind} × {count}" for kind, count in part.kinds),
        f"row groups: {part.row_groups}, largest {part.largest_group / 1e6:.1f} MB of audio",
        f"seconds: shortest {low:.2f}, median {median:.2f}, 95 % {high:.2f}, "
        f"longest {longest:.2f} ({part.longest})",
        f"words: {part.words}, {part.vocabulary} different; characters: {part.characters!r}",
        "most common: " + ", ".join(f"{word} {count}" for word, count in part.common),
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if part.unreadable:
        console.print(f"[red]{part.unreadable} rows cannot be read[/]")
        for name, why in part.problems:
            console.print(f"  {name}: {why}", markup=False, soft_wrap=True)
        if part.unreadable > len(part.problems):
            console.print("  …")
    most = max(n for _, _, n in part.histogram)
    for start, end, count in part.histogram:
        console.print(
            f"  {start:6.2f}–{end:6.2f} s {'█' * round(40 * count / max(most, 1))} {count}"
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
    from muster.data.speech.make import make

    for path in make(folder, out, split, shard_mb):
        console.print(str(path))
