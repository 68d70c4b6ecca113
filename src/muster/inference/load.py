"""Opening a checkpoint, or a Hugging Face folder of a recogniser, in one process."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from muster.data.speech.waveforms import read_rate
from muster.data.speech.windows import LONGEST, TICKS_PER_SECOND
from muster.errors import CheckpointError, MusterError, RecipeError
from muster.inference import averaging
from muster.inference.choose import choose
from muster.models import lora
from muster.models.huggingface.speech_folder import has_head, is_speech_encoder
from muster.models.weights import Weights
from muster.models.whisper import folder as whisper_folder
from muster.parallel.materialise import materialise, restore_buffers
from muster.reading.libraries import refused
from muster.reading.text import in_one_line
from muster.reading.values import first_problem
from muster.recipe.aliases import as_named_today
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.tasks.speech_ctc import SpeechCTC
from muster.tasks.speech_seq2seq import SpeechSeq2Seq
from muster.training.checkpoint import load_model
from muster.training.manifest import Saved
from muster.workloads import WORKLOADS


@dataclass(frozen=True)
class Trained:
    """A trained model of any task, ready for use."""

    task: Task
    model: nn.Module
    device: torch.device
    saved: Saved
    words: str = ""  # which checkpoint of a run this is


@dataclass(frozen=True)
class Recogniser:
    """A model that turns audio into text."""

    task: SpeechCTC | SpeechSeq2Seq
    model: nn.Module
    device: torch.device
    longest: float = LONGEST  # seconds, maximum window
    timestamps: bool = False  # decode with timestamps
    words: str = ""  # which checkpoint of a run this is

    @property
    def rate(self) -> int:
        return self.task.recipe.data.sample_rate


def load_trained(
    checkpoint: Path,
    evaluation: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
    *,
    which: str | None = None,
    average: int = 1,
) -> Trained:
    """From a run directory, by `choose`, or one `step-<n>` folder.

    `evaluation` and `data` replace keys of the recipe's sections of those names. `average` takes the mean
    of so many checkpoints.
    """
    chosen = choose(checkpoint, which, average)
    saved, device = chosen.saved, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if average == 1:
        task = trained_task(saved, evaluation, data)
        model = trained_model(saved, task)
    else:
        of_one = trained_task(saved)
        task = trained_task(saved, evaluation, data, {"lora": None})
        model = _empty_model(saved, task)
        model.load_state_dict(averaging.mean((whole(s, of_one) for s in chosen.all), average))
    return Trained(task, model.to(device).eval(), device, saved, chosen.words)


def whole(saved: Saved, task: Task) -> dict[str, Tensor]:
    """The weights, adapters merged: a mean of them would not be the mean of their products."""
    state, options = dict(trained_model(saved, task).state_dict()), task.recipe.model.lora
    return state if options is None else lora.merged(state, options.alpha, options.rank)


def trained_task(
    saved: Saved,
    evaluation: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
    model: dict[str, object] | None = None,
) -> Task:
    """The task of a checkpoint, from its own recipe and files; keys given here replace the recipe's."""
    document, told = saved.recipe, f"{saved.path}: its recipe"
    if problem := first_problem(document):
        raise CheckpointError(f"{told}: {in_one_line(problem.key)} {problem.words}")
    try:
        for section, changes in (("evaluation", evaluation), ("data", data), ("model", model)):
            document[section] = {**document.get(section, {}), **(changes or {})}
        recipe = Recipe.model_validate(as_named_today(document))
    except (ValueError, TypeError) as error:
        words = in_one_line(error, 300)
        raise MusterError(f"{told} does not fit this muster ({words})") from None
    if recipe.task not in WORKLOADS:  # a user's own: what it raises is theirs to see
        return build_task(recipe, saved.assets)
    try:
        with _refused(saved):
            return build_task(recipe, saved.assets)
    except MusterError as error:  # of its recipe or assets, which does not know whose they are
        if str(saved.path) in str(error):
            raise
        raise type(error)(f"{saved.path}: {error}") from None


def _refused(saved: Saved) -> AbstractContextManager[None]:
    """What cannot be built of its documents, which anybody may have written."""
    return refused(
        f"{saved.path}: what recipe.json and assets.json describe",
        "load it with the muster that saved it",
        CheckpointError,
    )


def _empty_model(saved: Saved, task: Task) -> nn.Module:
    """The task's model on the CPU, to be filled. A user's own is built for real: it may hold buffers that
    are in no checkpoint."""
    if task.recipe.task not in WORKLOADS:
        return task.build_model()
    with _refused(saved), torch.device("meta"):
        model = task.build_model()
    model.to_empty(device="cpu")
    restore_buffers(model, torch.device("cpu"))
    return model


def trained_model(saved: Saved, task: Task) -> nn.Module:
    """The task's model on the CPU with the checkpoint's weights."""
    model = _empty_model(saved, task)
    with warnings.catch_warnings():  # torch warns that no process group is initialized
        warnings.simplefilter("ignore", UserWarning)
        load_model(saved, model)
    return model


def load_recogniser(
    checkpoint: Path,
    evaluation: dict[str, object] | None = None,
    *,
    language: str | None = None,
    timestamps: bool | None = None,
    which: str | None = None,
    average: int = 1,
) -> Recogniser:
    """From a speech task's checkpoint, by `load_trained`, or a Hugging Face folder of Whisper's or a CTC model's.

    `language` replaces data.language. `timestamps`: whether Whisper is asked for times; by default
    where it learned to tell them, as OpenAI's models did.
    """
    if is_folder(checkpoint):
        return load_folder(checkpoint, evaluation, language=language, timestamps=timestamps)
    spoken: dict[str, object] = {"language": language} if language else {}
    found = load_trained(checkpoint, evaluation, spoken, which=which, average=average)
    return as_recogniser(found, timestamps)


def as_recogniser(found: Trained, timestamps: bool | None = None) -> Recogniser:
    """Of a speech task's checkpoint."""
    task, where = found.task, found.saved.path
    if isinstance(task, SpeechCTC):
        _refuse_timestamps(where, timestamps)
        return Recogniser(task, found.model, found.device, words=found.words)
    if not isinstance(task, SpeechSeq2Seq):
        raise MusterError(
            f"{where} is of task {task.recipe.task}; transcribing needs speech-ctc or speech-seq2seq"
        )
    with_timestamps = task.recipe.data.timestamps if timestamps is None else timestamps
    # Without timestamps, windows are as in training: the last bucket is the encoder's maximum.
    longest = LONGEST if with_timestamps else task.buckets[-2:][0]
    longest = min(longest, float(task.windows(np.array([longest]), training=False)[0]))
    return Recogniser(task, found.model, found.device, longest, with_timestamps, found.words)


def is_folder(checkpoint: Path) -> bool:
    """Whether this is a Hugging Face folder, and no run of muster's."""
    return (checkpoint / "config.json").is_file()


def load_folder(
    folder: Path,
    evaluation: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
    *,
    language: str | None = None,
    timestamps: bool | None = None,
) -> Recogniser:
    """A pretrained Whisper, or a CTC model of the Wav2Vec2 family, as it is."""
    if is_speech_encoder(folder):
        _refuse_timestamps(folder, timestamps)
        return _load_encoder(folder, evaluation, data)
    try:
        positions = whisper_folder.read_config(folder).source_positions
        window = min(LONGEST, positions / TICKS_PER_SECOND)
        recipe = Recipe.model_validate(
            {
                "task": "speech-seq2seq",
                "model": {"pretrained": str(folder)},
                "data": {"language": language, "window": window, **(data or {})},
                "training": {"steps": 1},
                "evaluation": evaluation or {},
            }
        )
        task = SpeechSeq2Seq(recipe)
        weights = task.weights()
    except RecipeError as error:
        words = str(error).removeprefix("model.pretrained: ")
        raise MusterError(words.replace("data.language", "--language")) from None
    model, device = _materialised(task, weights)
    with_timestamps = bool(task.tokens.languages) if timestamps is None else timestamps
    return Recogniser(task, model, device, window, with_timestamps)


def _load_encoder(
    folder: Path, evaluation: dict[str, object] | None, data: dict[str, object] | None
) -> Recogniser:
    from muster.tasks.speech_encoder import SpeechEncoder

    try:
        if not has_head(folder):
            raise RecipeError(f"{folder} has no CTC head (lm_head): fine-tune it with muster first")
        recipe = Recipe.model_validate(
            {
                "task": "speech-ctc",
                "model": {"pretrained": str(folder)},
                "data": {"sample_rate": read_rate(folder), "spec_augment": None, **(data or {})},
                "training": {"steps": 1},
                "evaluation": evaluation or {},
            }
        )
        task = SpeechEncoder(recipe)
        weights = task.weights()
    except RecipeError as error:
        raise MusterError(str(error).removeprefix("model.pretrained: ")) from None
    return Recogniser(task, *_materialised(task, weights))


def _materialised(task: Task, weights: Weights) -> tuple[nn.Module, torch.device]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = task.build_model()
    materialise(model, weights, device)
    return model.eval(), device


def _refuse_timestamps(where: Path, timestamps: bool | None) -> None:
    if timestamps:
        raise MusterError(f"{where} is of task speech-ctc, which has no timestamps; leave them out")
