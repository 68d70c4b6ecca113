"""Whisper's tokenizer: the tokens every Whisper has, after those of a folder or of learned text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.data.speech.whisper_languages import LANGUAGES
from muster.data.speech.windows import LONGEST, TICKS_PER_SECOND
from muster.data.text import tokenizer_bounds
from muster.errors import RecipeError
from muster.reading import json_file
from muster.reading.files import is_file, is_folder, read_text
from muster.reading.libraries import refused
from muster.reading.text import in_one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, START, NO_TIMESTAMPS = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
TASKS = ("<|translate|>", "<|transcribe|>")
UNUSED_TOKENS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>")
TIMESTAMPS = tuple(
    f"<|{tick / TICKS_PER_SECOND:.2f}|>" for tick in range(round(LONGEST * TICKS_PER_SECOND) + 1)
)
BYTES = 256


def read_tokenizer(folder: Path, key: str) -> tuple[Tokenizer, bool]:
    """Of a Hugging Face folder or its tokenizer.json, and whether it is a multilingual model's.
    `key` is the recipe key that named it."""
    file = folder / "tokenizer.json" if is_folder(folder) else folder
    folder = file.parent
    if not is_file(file) and not is_file(folder / "vocab.json"):
        raise RecipeError(
            f"{key}: {file} does not exist, nor vocab.json and merges.txt beside it; name a "
            "folder with Whisper's tokenizer"
        )
    from tokenizers import AddedToken, Tokenizer

    with refused(f"{key}: {folder}", kind=RecipeError, problem="has no valid tokenizer"):
        if is_file(file):
            tokenizer = Tokenizer.from_str(read_text(file, json_file.MOST_TOKENIZER))
        else:
            tokenizer = _from_parts(folder)
    tokenizer_bounds.check(tokenizer, f"{key}: {folder}")
    if tokenizer.token_to_id(TIMESTAMPS[0]) is None:  # folders of 2022 leave them out
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TIMESTAMPS])
    _check(tokenizer, f"{key}: {folder}")
    return tokenizer, _is_multilingual(folder, tokenizer)


def learn_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """The 256 bytes and at most `size` longer units: fewer when no further pair occurs twice.

    A function of the texts alone, whatever the number of threads or the hash seed.
    """
    from tokenizers import pre_tokenizers, processors, trainers

    learner = byte_level({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=BYTES + size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    vocab, merges = learned["vocab"], [(a, b) for a, b in learned["merges"]]
    tokenizer = byte_level(vocab | {END: len(vocab)}, merges)
    add_special(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} {NO_TIMESTAMPS} $A {END}",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in (START, NO_TIMESTAMPS, END)],
    )
    return tokenizer


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special(tokenizer: Tokenizer, languages: Iterable[str] = ()) -> None:
    from tokenizers import AddedToken

    special = (END, START, *(f"<|{code}|>" for code in languages), *TASKS, *UNUSED_TOKENS)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (*special, NO_TIMESTAMPS)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TIMESTAMPS])


def _from_parts(folder: Path) -> Tokenizer:
    """vocab.json and merges.txt; the special tokens are those that every Whisper has, with as many
    languages as config.json has rows for."""
    vocab = json_file.read(folder / "vocab.json", most=json_file.MOST_TOKENIZER)
    for token, i in vocab.items():
        if type(i) is not int or not 0 <= i < tokenizer_bounds.LARGEST_VOCABULARY:
            raise RecipeError(
                f"{folder / 'vocab.json'}: {in_one_line(token)} has {_told(i)}, expected a whole number "
                f"below {tokenizer_bounds.LARGEST_VOCABULARY:,}; copy it again"
            )
    merges = _merges(folder / "merges.txt")
    tokenizer = byte_level(vocab, merges)
    rows = _read_json(folder / "config.json").get("vocab_size", 0)
    others = len((END, START, *TASKS, *UNUSED_TOKENS, NO_TIMESTAMPS, *TIMESTAMPS))
    known = isinstance(rows, int) and rows > 0
    count = rows - vocab.get(END, len(vocab)) - others if known else 99
    add_special(tokenizer, list(LANGUAGES)[: max(count, 0)])
    return tokenizer


def _told(i: object) -> str:
    """Of an id, which may be any text of the file's."""
    return (
        f"the id {i}" if type(i) is int and abs(i) < 2**64 else f"an id of type {type(i).__name__}"
    )


def _merges(file: Path) -> list[tuple[str, str]]:
    found = []
    lines = read_text(file, json_file.MOST_TOKENIZER).split("\n")
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if line.startswith("#version") or (not line and number == len(lines)):
            continue
        first, blank, second = line.partition(" ")
        if not blank or " " in second:
            raise RecipeError(f"{file}, line {number}: is not a pair of units; copy it again")
        found.append((first, second))
    return found


def _check(tokenizer: Tokenizer, where: str) -> None:
    vocab = tokenizer.get_vocab()
    for token in (END, START, *TASKS, "<|startofprev|>", NO_TIMESTAMPS):
        if token not in vocab:
            raise RecipeError(f"{where} has no Whisper tokenizer: it lacks {token}")
    first = vocab[NO_TIMESTAMPS] + 1
    if [vocab.get(token) for token in TIMESTAMPS] != list(range(first, first + len(TIMESTAMPS))):
        raise RecipeError(
            f"{where}: the timestamps {TIMESTAMPS[0]} to {TIMESTAMPS[-1]} must be the {len(TIMESTAMPS)} "
            f"ids after {NO_TIMESTAMPS}, as in OpenAI's models"
        )


def _is_multilingual(folder: Path, tokenizer: Tokenizer) -> bool:
    """As generation_config.json says; older folders by their text tokens: GPT-2's are English."""
    if tokenizer.token_to_id("<|en|>") is None:
        return False
    saved = _read_json(folder / "generation_config.json").get("is_multilingual")
    return saved if isinstance(saved, bool) else tokenizer.token_to_id(END) != 50256


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json_file.read(file)
    except (OSError, ValueError):
        return {}
