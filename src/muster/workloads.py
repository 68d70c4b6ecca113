"""What is known of a task by its name alone, without importing torch.

The places that treat tasks differently ask for one of these facts; none of them compares names. A
task of the user's own, `FILE.py:CLASS` or `package.module:CLASS`, has the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["min", "max"]  # of a score: whether smaller or larger values are better
Content = Literal["speech", "text", "images"]


@dataclass(frozen=True)
class Workload:
    where: str  # `module:CLASS`
    content: Content | None = None  # what `data` holds; None: the task reads its data by itself
    corpus: str | None = None  # stands in for data that a recipe to plan for does not name
    compiles: bool = False  # measured: torch.compile pays
    captures: bool = False  # no synchronization within a step, so CUDA graphs can be captured
    packed: bool = False  # every sample is `data.sequence_length` tokens, with or without data
    scores: Mapping[str, Better] = field(default_factory=dict)  # that compare models, its own first


WORD_SCORES: Mapping[str, Better] = {"wer": "min", "cer": "min"}


WORKLOADS = {
    "speech-ctc": Workload(
        "muster.tasks.speech_ctc:SpeechCTC",
        "speech",
        "embedded:spoken-numbers",
        scores=WORD_SCORES,
    ),
    "speech-seq2seq": Workload(
        "muster.tasks.speech_seq2seq:SpeechSeq2Seq",
        "speech",
        "embedded:spoken-numbers",
        compiles=True,
        captures=True,
        scores=WORD_SCORES,
    ),
    "causal-lm": Workload(
        "muster.tasks.causal_lm:CausalLM",
        "text",
        "embedded:python-source",
        compiles=True,
        captures=True,
        packed=True,
        scores={"perplexity": "min", "bits_per_byte": "min", "loss": "min"},
    ),
    "image-classification": Workload(
        "muster.tasks.image_classification:ImageClassification",
        "images",
        scores={"accuracy": "max", "loss": "min"},
    ),
}


def workload(task: str) -> Workload:
    """Of a built-in task, or of the user's own."""
    return WORKLOADS.get(task) or Workload(task)
