"""What is known of a task by its name alone, without importing torch.

The places that treat tasks differently ask for one of these facts; none of them compares names. A
task of the user's own, `FILE.py:CLASS` or `package.module:CLASS`, has the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Content = Literal["speech", "text", "images"]


@dataclass(frozen=True)
class Workload:
    where: str  # `module:CLASS`
    content: Content | None = None  # what `data` holds; None: the task reads its data by itself
    corpus: str | None = None  # stands in for data that a recipe to plan for does not name
    compiles: bool = False  # measured: torch.compile pays
    captures: bool = False  # no synchronization within a step, so CUDA graphs can be captured
    packed: bool = False  # every sample is `data.sequence_length` tokens, with or without data


WORKLOADS = {
    "speech-ctc": Workload(
        "muster.tasks.speech_ctc:SpeechCTC", "speech", "embedded:spoken-numbers"
    ),
    "speech-seq2seq": Workload(
        "muster.tasks.speech_seq2seq:SpeechSeq2Seq",
        "speech",
        "embedded:spoken-numbers",
        compiles=True,
        captures=True,
    ),
    "causal-lm": Workload(
        "muster.tasks.causal_lm:CausalLM",
        "text",
        "embedded:python-source",
        compiles=True,
        captures=True,
        packed=True,
    ),
    "image-classification": Workload(
        "muster.tasks.image_classification:ImageClassification", "images"
    ),
}


def workload(task: str) -> Workload:
    """Of a built-in task, or of the user's own."""
    return WORKLOADS.get(task) or Workload(task)
