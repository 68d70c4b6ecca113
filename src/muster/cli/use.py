"""Using checkpoints: eval, transcribe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from muster.cli.common import CheckpointArgument, SplitOption, console
from muster.errors import MusterError


def evaluate(
    checkpoint: CheckpointArgument,
    split: SplitOption = "test",
    decoder: Annotated[
        Literal["greedy", "beam"] | None, typer.Option(help="Default: the recipe's.")
    ] = None,
    ngram: Annotated[
        str | None, typer.Option(help="For the beam: an ARPA file, or `train` to make one.")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="Show so many of the worst clips.")] = 5,
) -> None:
    """Score a checkpoint on a split of its data."""
    from muster import inference
    from muster.observe.console import score_words

    options: dict[str, Any] = {}
    if decoder == "greedy" and ngram:
        raise MusterError("--ngram needs --decoder beam")
    if decoder == "greedy":
        options = {"decoder": "greedy", "ngram": None, "known_words": False}
    elif decoder or ngram:
        options = {"decoder": "beam"} | ({"ngram": ngram} if ngram else {})
    result = inference.score(inference.load_recogniser(checkpoint, options), split)
    console.print(f"{split}: {score_words(result.scores)}, {result.scores['clips']:.0f} clips")
    for example in result.worst[:worst]:
        if example.edits:
            console.print(f"  said  {example.reference}\n  heard {example.hypothesis}\n")


def transcribe(
    checkpoint: CheckpointArgument,
    files: Annotated[
        list[str], typer.Argument(metavar="AUDIO…", help="Audio files, or - for a live pipe.")
    ],
) -> None:
    """Audio to text. `-` reads raw 16-bit mono samples from standard input as they arrive."""
    from muster import inference

    recogniser = inference.load_recogniser(checkpoint)
    if files == ["-"]:
        for piece in inference.stream(recogniser, sys.stdin.buffer):
            print(piece, end="", flush=True)
        print()
        return
    for path, text in inference.transcribe(recogniser, [Path(f) for f in files]):
        print(f"{path}: {text}" if len(files) > 1 else text)
