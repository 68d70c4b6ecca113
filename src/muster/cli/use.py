"""Using checkpoints: eval, transcribe, generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from muster.cli.common import CheckpointArgument, DirOption, console
from muster.data.corpus import Split
from muster.errors import MusterError


def checkpoint_path(checkpoint: Path, dir: Path) -> Path:
    """A path as it stands, else a run in `dir` by its name, `latest` included."""
    named = dir / checkpoint
    return named if not checkpoint.exists() and (named / "run.json").is_file() else checkpoint


def evaluate(
    checkpoint: CheckpointArgument,
    split: Annotated[
        Split | None, typer.Option(help="Which part of the data. Default: test, else validation.")
    ] = None,
    decoder: Annotated[
        Literal["greedy", "beam"] | None, typer.Option(help="Speech. Default: the recipe's.")
    ] = None,
    ngram: Annotated[
        str | None, typer.Option(help="For the beam: an ARPA file, or `train` to make one.")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="Show so many of the worst samples.")] = 5,
    dir: DirOption = Path("runs"),
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
    trained = inference.load_trained(checkpoint_path(checkpoint, dir), options)
    result = inference.score(trained, split)
    sizes = [f", {result.scores[n]:.0f} {n}" for n in _SIZES if n in result.scores]
    console.print(f"{result.split}: {score_words(result.scores)}{''.join(sizes)}")
    said, heard = _WORDS.get(trained.recipe.task, ("right", "found"))
    for example in result.worst[:worst]:
        if example.edits:
            console.print(
                f"  {said} {example.reference}\n  {heard} {example.hypothesis}\n", markup=False
            )


_SIZES = ("clips", "images", "tokens")
_WORDS = {"speech-ctc": ("said ", "heard")}


def transcribe(
    checkpoint: CheckpointArgument,
    files: Annotated[
        list[str], typer.Argument(metavar="AUDIO…", help="Audio files, or - for a live pipe.")
    ],
    dir: DirOption = Path("runs"),
) -> None:
    """Audio to text. `-` reads raw 16-bit mono samples from standard input as they arrive."""
    from muster import inference

    recogniser = inference.load_recogniser(checkpoint_path(checkpoint, dir))
    if files == ["-"]:
        for piece in inference.stream(recogniser, sys.stdin.buffer):
            print(piece, end="", flush=True)
        print()
        return
    for path, text in inference.transcribe(recogniser, [Path(f) for f in files]):
        print(f"{path}: {text}" if len(files) > 1 else text)


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(help="The most tokens per sample.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Below 1 plays safe, 0 always takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the so many likeliest tokens.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Only the likeliest tokens that together hold this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed, the same text.")] = 0,
    samples: Annotated[int, typer.Option(help="Continuations to write.")] = 1,
    dir: DirOption = Path("runs"),
) -> None:
    """Continue a text with a language model, shown as it is written."""
    from muster import generation, inference

    streams = generation.generate(
        inference.load_trained(checkpoint_path(checkpoint, dir)),
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        samples=samples,
    )
    for number, stream in enumerate(streams, 1):
        if samples > 1:
            print(f"--- {number} of {samples}")
        print(prompt, end="", flush=True)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
