"""What a recipe names, looked at before a run directory exists: the model, the tokenizer, how many samples.

Without torch, except for models that transformers builds, and without reading more than a file's header where a size is all that matters. What only the
data itself can tell (samples that are left out, a tokenizer learned from transcripts) is found by the ranks.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.data import corpus
from muster.errors import MusterError, RecipeError
from muster.models.configs import DecoderConfig, WhisperConfig
from muster.models.plan import ParallelPlan
from muster.models.presets import check_preset, configure
from muster.reading.files import expanded
from muster.urls import is_remote
from muster.workloads import workload

if TYPE_CHECKING:
    from muster.data.text.chat_template import ChatTemplate
    from muster.data.text.tokenizers import Tokenizer
    from muster.parallel.layout import Layout
    from muster.recipe.schema import Recipe


LITTLE_TEXT = 4 << 20  # bytes of chat rows: a second or two


def check_model(recipe: Recipe, layout: Layout) -> None:
    """The preset and its sizes, or config.json of a pretrained folder."""
    wanted, length = recipe.model, recipe.data.sequence_length
    if wanted.pretrained is not None:
        _check_pretrained(recipe, layout)
        return
    if wanted.config is not None:
        _check_config(recipe, expanded(wanted.config), "model.config", layout)
        return
    from muster.recipe.shape import check_length

    check_preset(recipe.task, wanted.preset, wanted.sizes)
    match configure(wanted.preset, wanted.sizes):
        case DecoderConfig() as config:
            _check_adapters(recipe, config)
            check_length(length, config.positions, wanted.title, pretrained=False)
            layout.check_heads(config.heads, config.kv_heads, wanted.title)
        case WhisperConfig() as config:
            _check_adapters(recipe, None)
            layout.check_heads(config.decoder_heads, config.encoder_heads, wanted.title)


def _check_pretrained(recipe: Recipe, layout: Layout) -> None:
    from muster.models.huggingface.locate import refuse_no_weights

    folder = _folder(recipe)
    if folder is None:
        return
    _check_config(recipe, folder, "model.pretrained", layout)
    if recipe.task == "causal-lm":
        refuse_no_weights(folder)


def _check_config(recipe: Recipe, folder: Path, key: str, layout: Layout) -> None:
    """A config.json of the task's own kind."""
    from muster.models.huggingface.config import SPEECH_FAMILIES, ConfigFile
    from muster.models.huggingface.transformers_config import check_folder
    from muster.recipe.shape import check_length

    if recipe.task == "speech-seq2seq":
        ConfigFile(folder, ("whisper",), key=key)
        _check_adapters(recipe, None)
    elif recipe.task == "causal-lm":
        trusted = recipe.model.trust_remote_code
        config = check_folder(folder, key, trust_remote_code=trusted)
        if config is not None:
            pretrained = key == "model.pretrained"
            length, title = recipe.data.sequence_length, recipe.model.title
            check_length(length, config.positions, title, pretrained=pretrained)
            _check_adapters(recipe, config)
        else:
            # transformers' modules have neither pipelines nor context ranks
            replace(layout, tensor=1).check_model(ParallelPlan(()), recipe.model.title)
    elif recipe.task == "speech-ctc" and key == "model.pretrained":
        ConfigFile(folder, SPEECH_FAMILIES, key=key)
        layout.check_model(ParallelPlan(()), recipe.model.title)
    elif recipe.task in ("speech-ctc", "image-classification") and key == "model.config":
        raise RecipeError(
            f"model.config: {recipe.task} takes model.preset; a config.json is for causal-lm and speech-seq2seq"
        )


def _check_adapters(recipe: Recipe, config: DecoderConfig | None) -> None:
    """The names of layers; those of a model that transformers builds are only known when it is built.
    `config` None is Whisper's."""
    from muster.models.lora_targets import check_targets, refuse_missing_library

    if recipe.model.lora is not None:
        refuse_missing_library()
        check_targets(recipe.model.lora.targets, config)


def _folder(recipe: Recipe) -> Path | None:
    """Of `model.pretrained`; None for a hub id that is not in the cache yet, which the ranks fetch."""
    from muster.models.huggingface.locate import is_hub_id, locate

    spec = recipe.model.pretrained
    if spec is None:
        return None
    if expanded(spec).is_dir() or not is_hub_id(spec):
        return locate(spec)
    try:
        return locate(spec, fetch=False)
    except RecipeError:
        return None


def check_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """It loads and fits the model; returned where a language model's text is to be counted by it."""
    wanted, folder = recipe.data.tokenizer, _folder(recipe)
    unknown = recipe.model.pretrained is not None and folder is None
    if recipe.task == "speech-ctc" and recipe.model.pretrained is None:
        from muster.data.speech.vocabulary import symbol_kind

        symbol_kind(wanted.kind)
    elif recipe.task == "speech-seq2seq":
        from muster.data.speech.whisper_text import WhisperTokens, tokenizer_kind

        pretrained = recipe.model.pretrained is not None
        kind = tokenizer_kind(wanted.kind, wanted.path, pretrained=pretrained)
        if kind == "huggingface" and wanted.path is not None:
            WhisperTokens.read(expanded(wanted.path), "data.tokenizer.path")
        elif kind == "huggingface" and folder is not None:
            WhisperTokens.read(folder, "model.pretrained")
    elif recipe.task == "causal-lm" and not (unknown and wanted.path is None):
        from muster.data.text import tokenizers

        tokenizer = tokenizers.choose(wanted.kind, wanted.path, folder)
        if recipe.model.pretrained is None and recipe.model.vocab_size is not None:
            tokenizers.check_rows(tokenizer, recipe.model.vocab_size)
        return tokenizer
    return None


def check_samples(recipe: Recipe, global_batch: int, tokenizer: Tokenizer | None) -> None:
    """The training data has a global batch of samples, where that is known without reading it."""
    data = recipe.data
    if any(map(is_remote, data.sources)):
        return  # its ranks copy it, and count then
    content = workload(recipe.task).content
    assert content is not None
    named = (data.sources, data.validation, data.test)
    files = corpus.split_files(*named, "train", data.max_parquet_files, content)
    most = 0
    if content == "text":
        if tokenizer is None:
            return
        from muster.data.text.chat_template import find_template
        from muster.data.text.conversations import are_chat

        if are_chat(data.format, data.text_column, files):
            folder = tokenizer.folder(data.tokenizer.path, _folder(recipe))
            template = find_template(data.chat_template, folder, tokenizer.end_text)
            found = _chat_sequences(recipe, files, tokenizer, template)
        else:
            found = _sequences(recipe, files, tokenizer)
        if found is None:
            return
        most = found
    else:
        for file in files:
            rows = _rows(file)
            most += rows or 0
            if rows is None or most >= global_batch:
                return
        if not files:
            return  # made by a library
    if most == 0:
        what = f"one sequence of {data.sequence_length} tokens" if content == "text" else "a row"
        raise RecipeError(f"data.train: {data.train_words} does not have {what}; name other data")
    if most < global_batch:
        raise RecipeError(
            f"training.global_batch_size: {global_batch} is more than the {most} samples of "
            f"{data.train_words}; set it to {most} or less, or add data"
        )


def _sequences(recipe: Recipe, files: list[Path], tokenizer: Tokenizer) -> int | None:
    """As tokenized before; or, of bytes in plain files, at most: the rest of a line of JSON is more than
    the end of a document."""
    from muster.data.text.packing import count_cached
    from muster.data.text.tokenizers import Bytes

    length = recipe.data.sequence_length
    cached = count_cached(files, tokenizer, recipe.data.text_column, length)
    plain = all(file.suffix in (".txt", ".jsonl") for file in files)
    if cached is not None or not (plain and isinstance(tokenizer, Bytes)):
        return cached
    return sum(file.stat().st_size + 1 for file in files) // length


def _chat_sequences(
    recipe: Recipe, files: list[Path], tokenizer: Tokenizer, template: ChatTemplate
) -> int | None:
    """Of little data, which is tokenized here; more has enough sequences, or its ranks find out."""
    from muster.data.text.chat import ChatSource

    data = recipe.data
    if sum(file.stat().st_size for file in files) > LITTLE_TEXT:
        return None
    source = ChatSource(
        files,
        tokenizer,
        template,
        data.sequence_length,
        pack=data.pack_rows,
        long_rows=data.long_texts,
        max_bad_fraction=data.max_bad_fraction,
    )
    return len(source)


def _rows(file: Path) -> int | None:
    """At most so many samples are in `file`; None where it cannot be read, which its reader explains."""
    try:
        if file.suffix == ".parquet":
            from muster.data.parquet import open_parquet

            return int(open_parquet(file).metadata.num_rows)
        if file.name.removesuffix(".gz").endswith("-ubyte"):
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
                return int.from_bytes(stream.read(8)[4:], "big")
        return sum(1 for _ in _lines(file)) - (file.suffix == ".csv")
    except (OSError, EOFError, MusterError):
        return None


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        yield from (line for line in stream if line.strip())
