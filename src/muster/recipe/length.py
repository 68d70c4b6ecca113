"""How long to train: of `training.steps` and `training.epochs`, the one that is given last counts.

An override replaces what a file says, and a file what it builds on. Two in one place are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from muster.reading.files import is_file
from muster.recipe import aliases

KEYS = ("training.steps", "training.epochs")
Parse = Callable[[Path], Mapping[Any, Any]]


def names(key: str) -> set[str]:
    """`key` and its older names."""
    return {key, *(row.old for row in aliases.TABLE if row.new == key)}


def replace_other(config: DictConfig, given: Mapping[str, Any]) -> None:
    """What `given` says, by key, is the length; what `config` has of the other kind becomes null."""
    told = [key for key in KEYS if names(key) & set(given)]
    if len(told) != 1 or all(given.get(name) is None for name in names(told[0])):
        return
    (other,) = set(KEYS) - set(told)
    for name in names(other):
        if aliases.has(config, name):
            OmegaConf.update(config, name, None)


def of_file(path: Path, parse: Parse, shipped: Path) -> dict[str, Any]:
    """The length that `path` gives itself or, where it gives none, the last of its `defaults` that
    does, by key."""
    own = parse(path)
    entries = own.get("defaults")
    layers = [*entries] if isinstance(entries, list) else []
    if "_self_" not in layers:
        layers.append("_self_")
    for layer in reversed(layers):
        found: dict[str, Any] = {}
        if layer == "_self_":
            found = _given(own)
        elif isinstance(layer, str):
            beside, among = path.parent / f"{layer}.yaml", shipped / f"{layer}.yaml"
            file = beside if is_file(beside) else among
            if is_file(file) and file != path:
                found = of_file(file, parse, shipped)
        elif layer == {"training": layer.get("training")}:  # a group: its file fills the section
            file = path.parent / "training" / f"{layer['training']}.yaml"
            found = _given({"training": parse(file)}) if is_file(file) else {}
        if found:
            return found
    return {}


def _given(document: Mapping[Any, Any]) -> dict[str, Any]:
    section = document.get("training")
    return dict(_lengths(section)) if isinstance(section, Mapping) else {}


def _lengths(section: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key in KEYS:
        for name in names(key):
            value = section.get(name.removeprefix("training."))
            if value is not None:
                yield name, value
