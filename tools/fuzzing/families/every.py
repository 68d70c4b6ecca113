"""Every family: each module registers the readers of one kind of input."""

from fuzzing.families import (
    checkpoints,
    cluster,
    huggingface,
    images,
    logs,
    recipes,
    runs,
    speech,
    text,
)

__all__ = [
    "checkpoints",
    "cluster",
    "huggingface",
    "images",
    "logs",
    "recipes",
    "runs",
    "speech",
    "text",
]
