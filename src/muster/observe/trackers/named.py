"""From a name in `logging.to` to its tracker: muster's own adapters, and classes of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from muster.errors import RecipeError
from muster.observe.trackers.base import Tracker

BUILT_IN = {
    "tensorboard": ("muster.observe.trackers.tensorboard", "TensorBoard"),
    "wandb": ("muster.observe.trackers.wandb", "WeightsAndBiases"),
    "mlflow": ("muster.observe.trackers.mlflow", "MLflow"),
    "trackio": ("muster.observe.trackers.trackio", "Trackio"),
}


def make(name: str) -> Tracker:
    """A tracker that has not started. Imports the code of one of the user's own."""
    if name in BUILT_IN:
        module, kind = BUILT_IN[name]
        return getattr(importlib.import_module(module), kind)()
    place, _, kind = name.rpartition(":")
    found = getattr(_module(place), kind, None)
    if found is None:
        raise RecipeError(f"logging.to: {place} has no class {kind}")
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise RecipeError(f"logging.to: {name} is no subclass of muster.Tracker")
    return found()


def label(name: str) -> str:
    """The same wherever the file is."""
    place, colon, kind = name.rpartition(":")
    return f"{Path(place).name}:{kind}" if colon and place.endswith(".py") else name


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"muster_tracker_{Path(place).stem}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refuse_missing(names: list[str]) -> None:
    """Before a run starts on this machine: a tracker whose package is not installed here, or whose file does not
    name its class."""
    for name in names:
        place, _, kind = name.rpartition(":")
        if name in BUILT_IN and importlib.util.find_spec(name) is None:
            raise RecipeError(missing(name))
        if place.endswith(".py") and Path(place).is_file() and kind not in _words(place):
            raise RecipeError(f"logging.to: {place} has no class {kind}")


def _words(file: str) -> list[str]:
    return re.findall(r"\w+", Path(file).read_text(errors="replace"))


def missing(name: str) -> str:
    return (
        f"logging.to: {name} is not installed; pip install 'muster-train[{name}]', or leave it out"
    )
