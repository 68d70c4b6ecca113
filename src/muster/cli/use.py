"""Using checkpoints: eval, transcribe, generate."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from muster.cli.checkpoints import (
    AverageOption,
    CheckpointOption,
    checkpoint_path,
    refuse_choice,
    say_which,
)
from muster.cli.common import CheckpointArgument, DirOption, console, print_error
from muster.data.corpus import Split
from muster.errors import MusterError
from muster.inference.subtitles import Format
from muster.observe.progress import working
from muster.observe.terminal import write_text

Decoder = Annotated[
    Literal["greedy", "beam"] | None, typer.Option(help="Speech. Default: the recipe's.")
]
Ngram = Annotated[
    str | None, typer.Option(help="CTC's beam: an ARPA file, or `train` to make one.")
]
Beam = Annotated[int | None, typer.Option(min=1, help="So many hypotheses for the beam.")]


def decoding(decoder: str | None, ngram: str | None, beam: int | None) -> dict[str, Any]:
    """What the options change in the recipe's `evaluation`."""
    if decoder == "greedy" and (ngram or beam):
        raise MusterError(f"{'--ngram' if ngram else '--beam'} needs --decoder beam")
    if decoder == "greedy":
        return {"decoder": "greedy", "ngram": None, "known_words": False}
    given = {"ngram": ngram, "beam_width": beam}
    changed = {key: value for key, value in given.items() if value is not None}
    return {"decoder": "beam", **changed} if decoder or changed else {}


def evaluate(
    checkpoint: CheckpointArgument,
    split: Annotated[
        Split | None, typer.Option(help="Which part of the data. Default: test, else validation.")
    ] = None,
    decoder: Decoder = None,
    ngram: Ngram = None,
    beam: Beam = None,
    worst: Annotated[int, typer.Option(min=0, help="Show so many of the worst samples.")] = 5,
    data: Annotated[
        str | None,
        typer.Option(help="Other data than its own: a folder, a file or a glob.", metavar="DATA"),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Spoken, for a multilingual Whisper folder.")
    ] = None,
    which: CheckpointOption = None,
    average: AverageOption = 1,
    dir: DirOption = Path("runs"),
) -> None:
    """Score a checkpoint on a split of its data, or a recogniser's Hugging Face folder on DATA."""
    options, path = decoding(decoder, ngram, beam), checkpoint_path(checkpoint, dir)
    with working(f"scoring {checkpoint}", "batches") as progress:
        from muster.inference.load import Recogniser, Trained, is_folder, load_folder, load_trained
        from muster.inference.score import score
        from muster.observe.scores import score_words

        other = _other_data(data, split) if data else {}
        trained: Trained | Recogniser
        if is_folder(path):
            if not data:
                raise MusterError(
                    f"{path} is a model without data of its own; name some with --data"
                )
            refuse_choice(path, which, average)
            trained = load_folder(path, options, other, language=language)
        else:
            trained = load_trained(path, options, other, which=which, average=average)
        result = score(trained, split, progress)
    say_which(trained.words)
    scores = result.scores
    sizes = [f", {scores[name]:.0f} {name}" for name in _SIZES if name in scores]
    console.print(f"{result.split}: {score_words(scores)}{''.join(sizes)}")
    if "words" in scores:
        edits = [f"{scores[f'word_{kind}']:.0f} {kind}" for kind in _EDITS]
        console.print(f"{scores['words']:.0f} words: {', '.join(edits)}")
    for remark in result.remarks:
        console.print(remark, soft_wrap=True)
    for why, count in result.left_out.items():
        console.print(f"not scored: {count} {why}")
    said, heard = _WORDS.get(trained.task.facts.content, ("right", "found"))
    for example in result.worst[:worst]:
        console.print(f"  {said} {example.reference}\n  {heard} {example.hypothesis}\n")


def _other_data(data: str, split: Split | None) -> dict[str, Any]:
    """A file, or files without a split, are scored as they are."""
    from muster.data import corpus

    found = {"train": data, "validation": None, "test": None, "max_parquet_files": None}
    marked = any(corpus.sibling_split(data, s) for s in ("train", "validation", "test"))
    return found if marked else found | {split or "test": data}


_SIZES = ("clips", "images", "tokens")
_EDITS = ("substitutions", "deletions", "insertions")
_WORDS: dict[str | None, tuple[str, str]] = {"speech": ("said ", "heard")}


def transcribe(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A run, one of its checkpoints, or a Hugging Face folder of Whisper or a CTC model.",
        ),
    ],
    files: Annotated[
        list[str], typer.Argument(metavar="AUDIO…", help="Audio files, or - for a live pipe.")
    ],
    form: Annotated[
        Format, typer.Option("--format", help="Plain text, subtitles, or all that is known.")
    ] = "text",
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a file per audio file there.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files in --output.")] = False,
    decoder: Decoder = None,
    ngram: Ngram = None,
    beam: Beam = None,
    language: Annotated[
        str | None,
        typer.Option(help="Language of the audio, such as `en`, for a multilingual Whisper."),
    ] = None,
    timestamps: Annotated[
        bool | None,
        typer.Option(
            "--timestamps/--no-timestamps",
            help="Decode with timestamps. Default: if it was trained with them.",
        ),
    ] = None,
    which: CheckpointOption = None,
    average: AverageOption = 1,
    dir: DirOption = Path("runs"),
) -> None:
    """Audio to text. `-` reads raw 16-bit mono samples from standard input as they arrive."""
    from muster.inference.subtitles import render, targets, write

    live, paths = files == ["-"], [Path(file) for file in files]
    if live and (form != "text" or output):
        raise MusterError("- is printed as it arrives; leave --format and --output out")
    if form in ("srt", "vtt") and len(files) > 1 and output is None:
        raise MusterError(f"--format {form} of several files needs --output FOLDER")
    places = targets(paths, output, form, force) if output else None
    options, path = decoding(decoder, ngram, beam), checkpoint_path(checkpoint, dir)
    from muster.inference.load import is_folder, load_recogniser
    from muster.inference.stream import stream
    from muster.inference.transcribe import transcribe

    if is_folder(path):
        refuse_choice(path, which, average)
    recogniser = load_recogniser(
        path, options, language=language, timestamps=timestamps, which=which, average=average
    )
    say_which(recogniser.words)
    if live:
        for piece in stream(recogniser, sys.stdin.buffer):
            write_text(piece, end="")
        print()
        return
    failed = False
    with working("transcribing", "files") as tell:
        tell(0, len(paths))
        for number, found in enumerate(transcribe(recogniser, paths)):
            with tell.paused():
                if isinstance(found, MusterError):
                    failed = True
                    print_error(str(found))
                elif places:
                    write(places[number], render(found, form))
                    write_text(str(places[number]))
                else:
                    named = f"{found.file}: " if form == "text" and len(files) > 1 else ""
                    write_text(named + render(found, form), end="")
            tell(number + 1, len(paths))
    if failed:
        raise typer.Exit(1)


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Text to continue; with --chat, a question."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Answer by the model's chat template; without PROMPT, a conversation."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --chat: the system message.")
    ] = None,
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
    which: CheckpointOption = None,
    average: AverageOption = 1,
    dir: DirOption = Path("runs"),
) -> None:
    """Continue a text with a language model, or answer, shown as it is written."""
    if prompt is None and not chat:
        raise MusterError("name a PROMPT to continue, or talk with the model: --chat")
    if system is not None and not chat:
        raise MusterError("--system needs --chat")
    if chat and prompt is None and samples != 1:
        raise MusterError(
            "--samples needs a PROMPT; a conversation has one answer to each question"
        )
    path = checkpoint_path(checkpoint, dir)
    from muster.inference import generate as generation
    from muster.inference.load import load_trained

    trained = load_trained(path, which=which, average=average)
    say_which(trained.words)
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    options |= {"top_k": top_k, "top_p": top_p, "seed": seed}
    messages = [{"role": "system", "content": system}] if system is not None else []
    if chat and prompt is None:
        _converse(trained, messages, options)
        return
    streams: Iterator[Iterator[str]]
    if chat:
        messages.append({"role": "user", "content": str(prompt)})
        streams = (
            generation.answer(trained, messages, **options, sample=i) for i in range(samples)
        )
        prompt = None
    else:
        streams = generation.generate(trained, str(prompt), samples=samples, **options)
    for number, stream in enumerate(streams, 1):
        if samples > 1:
            print(f"--- {number} of {samples}")
        write_text(prompt or "", end="")
        for piece in stream:
            write_text(piece, end="")
        print()


def _converse(trained: Any, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
    """Questions from standard input, a line each, and answers, until it ends. `/new` forgets them."""
    from muster.inference import generate as generation

    generation.template_of(trained)  # refuses a model without one before the first question
    asking, system = sys.stdin.isatty(), list(messages)
    if asking:
        print("A line is a question; /new starts a new conversation, Ctrl-D ends.", file=sys.stderr)
    for turn in itertools.count():
        try:
            line = input("> " if asking else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/new":
            messages = list(system)
        if line in ("", "/new"):
            continue
        question = {"role": "user", "content": line}
        said = []
        try:
            for piece in generation.answer(trained, [*messages, question], **options, sample=turn):
                write_text(piece, end="")
                said.append(piece)
        except KeyboardInterrupt:  # enough of this answer
            pass
        print()
        messages = [*messages, question, {"role": "assistant", "content": "".join(said)}]
