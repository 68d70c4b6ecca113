"""Handing a checkpoint to other programs: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.cli.checkpoints import AverageOption, CheckpointOption, checkpoint_path, say_which
from muster.cli.common import CheckpointArgument, DirOption, console
from muster.observe.progress import working


def export(
    checkpoint: CheckpointArgument,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write; new, or empty.")
    ],
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Only the LoRA adapters, for peft; else they are merged."),
    ] = False,
    which: CheckpointOption = None,
    average: AverageOption = 1,
    blend: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="From the pretrained weights (0) to the trained (1)."),
    ] = None,
    dir: DirOption = Path("runs"),
) -> None:
    """A language model, a Whisper or a pretrained speech encoder as a Hugging Face folder."""
    path = checkpoint_path(checkpoint, dir)
    from muster.inference.export import export_checkpoint

    with working(f"exporting {checkpoint}", "parts") as tell:
        words = export_checkpoint(
            path, folder, adapter=adapter, average=average, blend=blend, which=which, tell=tell
        )
    say_which(words)
    console.print(f"written to {folder}", soft_wrap=True)
