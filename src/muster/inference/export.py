"""Checkpoints for other programs: a language model, a Whisper or a speech encoder as a Hugging Face
folder, or adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from muster.data.speech.whisper_features import preprocessor_config
from muster.errors import MusterError
from muster.inference import averaging
from muster.inference.choose import choose
from muster.inference.load import trained_model, trained_task, whole
from muster.models import lora
from muster.models.huggingface import folder as huggingface
from muster.models.huggingface import speech_folder
from muster.models.huggingface.generation import FILE as GENERATION
from muster.models.huggingface.tensors import refuse_full
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.models.weights import Weights
from muster.models.whisper import folder as whisper_folder
from muster.models.whisper.hybrid import without_head
from muster.observe.progress import Report, silent
from muster.reading.files import expanded
from muster.recipe.schema import Recipe
from muster.tasks.causal_lm import CausalLM
from muster.tasks.chat import ChatLM
from muster.tasks.speech_encoder import SpeechEncoder
from muster.tasks.speech_seq2seq import SpeechSeq2Seq
from muster.training.manifest import Saved

Exported = CausalLM | SpeechSeq2Seq | SpeechEncoder


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    adapter: bool = False,
    average: int = 1,
    blend: float | None = None,
    which: str | None = None,
    tell: Report = silent,
) -> str:
    """A run's checkpoint, by `choose`, or one `step-<n>` folder, for transformers or, `adapter`, for peft.
    Returns which it took.

    Without `adapter`, adapters are merged into the weights they stand beside. `average` takes the
    mean of so many checkpoints; `blend` then goes only that share of the way from
    the pretrained weights (WiSE-FT, Wortsman et al. 2022).
    """
    _check_options(adapter, average, blend)
    refuse_full(folder.absolute())
    chosen = choose(checkpoint, which, average)
    saved, task = chosen.saved, _task(chosen.saved)
    if adapter:
        _export_adapter(saved, task, folder)
        return chosen.words
    base = None if blend is None else _pretrained(saved, task)
    parts = len(chosen.all) + 1  # and what is written
    read = (whole(one, task) for one in chosen.all)
    state = averaging.mean(_counted(read, parts, tell), average)
    if base is not None and blend is not None:
        averaging.blend(state, base, blend)
    tell(parts - 1, parts)
    _write(folder, task, state)
    return chosen.words


def _counted(
    read: Iterator[dict[str, Tensor]], parts: int, tell: Report
) -> Iterator[dict[str, Tensor]]:
    tell(0, parts)
    for number, state in enumerate(read, 1):
        yield state
        tell(number, parts)


def _write(folder: Path, task: Exported, state: dict[str, Tensor]) -> None:
    if isinstance(task, SpeechEncoder):
        speech_folder.export(folder, task.document, state, task.exported_files())
    elif isinstance(task, SpeechSeq2Seq):
        whisper_folder.export(folder, task.config, without_head(state), *_processor(task))
    else:
        files, keys = _tokenizer(task)
        huggingface.export(folder, task.config, state, family=task.family, files=files, keys=keys)


def _check_options(adapter: bool, average: int, blend: float | None) -> None:
    if blend is not None and not 0 < blend <= 1:
        raise MusterError(
            f"--blend {blend}: expected more than 0, which would be the pretrained model, and at "
            "most 1, the trained one"
        )
    mixed = "--average" if average > 1 else "--blend" if blend is not None else None
    if adapter and mixed:
        raise MusterError(
            f"{mixed} is of whole weights, and two thin matrices cannot hold what comes of it; leave "
            f"--adapter out, or {mixed}"
        )


def _export_adapter(saved: Saved, task: Exported, folder: Path) -> None:
    options = task.recipe.model.lora
    if options is None or isinstance(task, SpeechEncoder):
        raise MusterError(
            f"{saved.path} was trained without model.lora, so it has no adapters; leave --adapter out"
        )
    if task.recipe.model.pretrained is None:
        raise MusterError(
            f"{saved.path} has adapters on a model that was not pretrained, so the base model is not "
            "available elsewhere; leave --adapter out to export the whole model"
        )
    lora.export_adapter(
        folder,
        task.config,
        _weights(saved, task),
        rank=options.rank,
        alpha=options.alpha,
        base=_base(task.recipe.model.pretrained),
        family=task.family if isinstance(task, CausalLM) else None,
    )


def _pretrained(saved: Saved, task: Exported) -> Weights:
    if task.recipe.model.pretrained is None:
        raise MusterError(
            f"{saved.path} was trained without model.pretrained, so there is nothing to blend it "
            "with; leave --blend out"
        )
    try:
        return task.weights()
    except MusterError as error:
        raise MusterError(f"--blend reads the pretrained model again: {error}") from None


def _task(saved: Saved) -> Exported:
    task = trained_task(saved)
    if not isinstance(task, Exported):
        raise MusterError(
            f"{saved.path} is of task {task.recipe.task}; only language models (causal-lm), Whisper "
            "(speech-seq2seq) and pretrained speech encoders (speech-ctc) have a Hugging Face form to "
            "export to"
        )
    return task


def _weights(saved: Saved, task: Exported) -> dict[str, Tensor]:
    return dict(trained_model(saved, task).state_dict())


def _base(pretrained: str) -> str:
    path = expanded(pretrained)
    return str(path.absolute()) if path.is_dir() else pretrained


def _tokenizer(task: CausalLM) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The tokenizer and generation_config.json as the checkpoint has them, with the other files of the original."""
    files: dict[str, bytes] = {}
    keys: dict[str, Any] = {"bos_token_id": task.tokenizer.end, "eos_token_id": task.tokenizer.end}
    saved = task.tokenizer.to_json()
    if saved["kind"] != "huggingface":
        return files, keys
    generation = task.generation.document(task.ends)
    if generation is not None:
        files[GENERATION] = json.dumps(generation, indent=2).encode()
    files["tokenizer.json"] = saved["tokenizer"].encode()
    if isinstance(task.config, TransformersConfig) and task.recipe.model.pretrained:
        keys = {}  # config.json goes out with the ids it came with
    original = _original(task.recipe)
    found, ids = huggingface.tokenizer_of(original) if original else ({}, {})
    files |= found
    if isinstance(task, ChatLM):  # goes before one in tokenizer_config.json
        files["chat_template.jinja"] = task.template.source.encode()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **task.template.tokens}
        files.setdefault("tokenizer_config.json", json.dumps(config, indent=2).encode())
    return files, keys | ids


def _processor(task: SpeechSeq2Seq) -> tuple[dict[str, bytes], dict[str, Any]]:
    """All that transformers' WhisperProcessor and `generate` need, from the checkpoint alone, and
    the ids that config.json gives."""
    data, found = task.recipe.data, task.generation
    generation = task.tokens.generation_config(
        found.suppress, found.suppress_first, data.language, data.speech_task
    )
    if found.keys:  # the pretrained model's, except language and task
        trained = {k: generation[k] for k in ("language", "task") if k in generation}
        generation = found.keys | trained
    documents: dict[str, Any] = {
        GENERATION: generation,
        "preprocessor_config.json": preprocessor_config(task.config.mels),
    }
    if task.spelling is not None:
        documents["normalizer.json"] = task.spelling
    files = {name: json.dumps(d, indent=2).encode() for name, d in documents.items()}
    keys = {
        "bos_token_id": task.tokens.end,
        "eos_token_id": task.tokens.end,
        "pad_token_id": task.tokens.end,
        "decoder_start_token_id": task.tokens.start,
    }
    return task.tokens.files() | files, keys


def _original(recipe: Recipe) -> Path | None:
    """The folder that the tokenizer was read from, if it is on this machine."""
    if recipe.data.tokenizer.path is not None:
        path = expanded(recipe.data.tokenizer.path)
        return path if path.is_dir() else path.parent if path.is_file() else None
    try:
        return huggingface.locate(str(recipe.model.pretrained), fetch=False)
    except MusterError:
        return None
