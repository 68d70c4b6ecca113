"""What a family of readers registers: how to make a hostile input, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


def _nothing(taken: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Case:
    """`read` gives the input to muster. A refusal names one of `names`; `wrong` says what should not have been
    taken of what `read` returned."""

    read: Callable[[], Any]
    names: tuple[str, ...] = ()
    wrong: Callable[[Any], str | None] = _nothing


Make = Callable[[Random, Path], Case]
"""Writes one hostile input into a folder of its own."""


@dataclass(frozen=True)
class Reader:
    name: str
    weight: int  # its share of all cases
    make: Make


READERS: dict[str, Reader] = {}


def reader(name: str, weight: int) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        READERS[name] = Reader(name, weight, make)
        return make

    return register
