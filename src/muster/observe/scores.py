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


def main_score(scores: Mapping[str, float]) -> str | None:
    """The name of the score by which evaluations are compared; None where none is known."""
    return next((name for name in MAIN if name in scores), None)
