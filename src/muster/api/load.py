"""A trained model, ready to use in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muster.api.run import Run
from muster.data.corpus import Split
from muster.data.text.tokenizers import Tokenizer
from muster.errors import MusterError
from muster.inference import generate as generation
from muster.inference.load import Recogniser, Trained, as_recogniser, is_folder, load_folder
from muster.inference.load import load_trained as load_checkpoint
from muster.inference.score import score
from muster.inference.subtitles import Transcript
from muster.inference.transcribe import transcribe
from muster.tasks.causal_lm import CausalLM


class Loaded:
    """A trained model in evaluation mode on its device, and what goes with it."""

    def __init__(self, trained: Trained | Recogniser, path: Path) -> None:
        self._trained = trained
        self.path = path  # the checkpoint
        self.model: nn.Module = trained.model
        self.device: torch.device = trained.device
        self.task: str = trained.task.recipe.task

    def __repr__(self) -> str:
        return f"<muster.Loaded {self.task} from {self.path} on {self.device}>"

    @property
    def tokenizer(self) -> Tokenizer:
        """Of a language model: `encode`, `decode`, `size`, `end`."""
        task = self._trained.task
        if not isinstance(task, CausalLM):
            raise MusterError(f"{self.path} is of task {self.task}; a tokenizer needs causal-lm")
        return task.tokenizer

    def generate(self, prompt: str, **options: Any) -> str:
        """A language model's continuation of `prompt`, without the prompt. `options` are those of `stream`."""
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """The same, in pieces as they are generated. Temperature 0 takes the likeliest token; `top_k` and
        `top_p` keep only the likeliest; the same seed gives the same text."""
        return next(
            generation.generate(
                self._of_a_run("generating", "causal-lm"),
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
            )
        )

    def answer(self, messages: str | Sequence[dict[str, Any]], **options: Any) -> str:
        """A language model's reply to a question, or to a conversation of `role` and `content`, by its chat
        template. `options` are those of `stream`."""
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        trained = self._of_a_run("answering", "causal-lm")
        return "".join(generation.answer(trained, asked, **options))

    def transcribe(self, file: str | Path) -> Transcript:
        """A speech model's transcript of an audio file of any length: `.text`, and `.segments` with their
        times in seconds."""
        if isinstance(self._trained, Trained):
            recogniser = as_recogniser(self._trained)
        else:
            recogniser = self._trained
        (found,) = transcribe(recogniser, [Path(file)])
        if isinstance(found, MusterError):
            raise found
        return found

    def evaluate(self, split: Split | None = None) -> dict[str, float]:
        """Scores on a split of the run's data; by default test, else validation."""
        return dict(score(self._of_a_run("scoring", "a run"), split).scores)

    def _of_a_run(self, what: str, needed: str) -> Trained:
        if not isinstance(self._trained, Trained):
            raise MusterError(f"{self.path} is a Hugging Face folder; {what} needs {needed}")
        return self._trained


def load(
    checkpoint: str | Path | Run,
    *,
    root: str | Path = "runs",
    evaluation: dict[str, Any] | None = None,
    which: str | None = None,
    average: int = 1,
) -> Loaded:
    """The model of a run, of one `step-<n>` folder, or of a Hugging Face folder of Whisper's or of a CTC
    model's; on a GPU where there is one.

    `which` checkpoint of a run: `best`, by default where one was chosen, `last` or `step-N`. `average` takes
    the mean of so many: the last, or with `which="best"` the best.

    A run may also be named, or be `latest` in `root`. `evaluation` replaces keys of that section of the
    recipe, such as `{"decoder": "beam"}`.
    """
    path = checkpoint.path if isinstance(checkpoint, Run) else Path(checkpoint)
    if not path.exists():
        path = Run(str(checkpoint), root).path
    if is_folder(path):
        return Loaded(load_folder(path, evaluation), path)
    trained = load_checkpoint(path, evaluation, which=which, average=average)
    return Loaded(trained, trained.saved.path)
