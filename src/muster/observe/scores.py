"""Which score of a task says how good its model is, and which way."""

from __future__ import annotations

from collections.abc import Mapping

# The first of these that a task reports is its own; the value: whether more is better.
MAIN = {
    "wer": False,
    "accuracy": True,
    "perplexity": False,
    "bits_per_byte": False,
    "loss": False,
}

FORMS = {
    "wer": "WER {:.2%}",
    "cer": "CER {:.2%}",
    "accuracy": "accuracy {:.2%}",
    "perplexity": "perplexity {:.3f}",
    "bits_per_byte": "{:.3f} bits per byte",
}

COUNTS = (
    "words",
    "word_",
    "char",
    "clips",
    "exact_clips",
    "units",
    "tokens",
    "bytes",
    "images",
    "correct",
)


def rates(scores: Mapping[str, float]) -> dict[str, float]:
    """Without what is only counted, such as the words that were compared."""
    return {name: score for name, score in scores.items() if not name.startswith(COUNTS)}


def main_score(scores: Mapping[str, float]) -> str | None:
    """The name of the score by which evaluations are compared; None where none is known."""
    return next((name for name in MAIN if name in scores), None)


def score_words(scores: dict[str, float]) -> str:
    """The scores of any task, the most important first."""
    forms = FORMS
    if "perplexity" in scores and "bits_per_byte" not in scores:  # of replies
        forms = FORMS | {"loss": "loss {:.3f}"}
    words = [form.format(scores[name]) for name, form in forms.items() if name in scores]
    own = [f"{name} {value:.4g}" for name, value in scores.items() if name != "units"]
    return ", ".join(words or own)


def named_scores(scores: Mapping[str, float]) -> list[str]:
    """The names of rates, without the counts that they come from."""
    return [name for name in FORMS if name in scores] or [
        name for name in scores if name != "units"
    ]


def score_number(name: str, value: float) -> str:
    """Its value alone."""
    return f"{value:.2%}" if name in ("wer", "cer", "accuracy") else f"{value:.4g}"
