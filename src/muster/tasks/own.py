"""A task of the user's own: its class from a file or a module, and mistakes in it as one sentence each."""

from __future__ import annotations

import functools
import hashlib
import importlib
import linecache
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import nn

from muster.data.loader import Source
from muster.errors import MusterError, RecipeError
from muster.recipe.own_task import OwnTask, find_from_here, original_of, parse
from muster.recipe.schema import Recipe
from muster.tasks.base import Task, read_options

log = logging.getLogger(__name__)

_run: dict[str, ModuleType] = {}  # files that this process has run
DATA = "data"  # the asset of a checkpoint that says what it was trained on
SOURCE = ("broken", "fingerprint", "groups", "lengths", "load", "name", "preload", "reserve")
CODE = "code"  # the asset of a checkpoint that says which code it was trained with


def build_own(own: OwnTask, recipe: Recipe, assets: dict[str, Any] | None = None) -> Task:
    """The task, its sources opened once. From a checkpoint's assets, a file is as it was then."""
    assets = dict(assets or {})
    code: dict[str, Any] = assets.pop(CODE, {})
    assets.pop(DATA, None)
    kind = load_class(own, code.get("text"))
    with named(own, "__init__"):
        task = kind(recipe, assets or None)
    if not isinstance(getattr(task, "assets", None), dict):
        raise RecipeError(
            f"{own.label}: __init__ left the task without assets; begin it with "
            "super().__init__(recipe, assets)"
        )
    if reserved := sorted({CODE, DATA} & set(task.assets)):
        raise RecipeError(
            f"{own.label}: assets has {reserved[0]!r}, a name that muster uses itself; call it another"
        )
    if code and not own.is_file and code["sha256"] != own.digest():
        log.warning("%s has changed since %s was trained with it", own.file(), own.label)
    task.assets[CODE] = code or record(own)
    open_source = task.source

    @functools.cache
    def source(split: Any) -> Source | None:
        with named(own, "source"):
            found = open_source(split)
        return _checked_source(own, split, found)

    build_model = task.build_model

    def build() -> nn.Module:
        with named(own, "build_model"):
            model = build_model()
        if not isinstance(model, nn.Module):
            raise RecipeError(
                f"{own.label}: build_model returned a {type(model).__name__}, expected a torch.nn.Module"
            )
        return model

    task.source, task.build_model = source, build  # type: ignore[method-assign]
    return task


def record(own: OwnTask) -> dict[str, Any]:
    """For a checkpoint: which code this is, and a file's whole text."""
    file = own.file() if own.is_file else None
    text = file.read_text() if file else None
    return {"task": own.label, "sha256": own.digest(), **({"text": text} if text else {})}


def settle_options(recipe: Recipe) -> Recipe:
    """The recipe with every option of its task. Refuses what is wrong with the class, as far as that is
    known without its data."""
    own = parse(recipe.task)
    if own is None:
        if recipe.task_options:
            raise RecipeError(
                f"task_options.{next(iter(recipe.task_options))}: {recipe.task} takes no options; they are "
                "for a task of your own"
            )
        return recipe
    options = read_options(load_class(own), recipe)
    found = {} if options is None else options.model_dump(mode="json", by_alias=True)
    return recipe.model_copy(update={"task_options": found})


def load_class(own: OwnTask, text: str | None = None) -> type[Task]:
    """The class; `text` replaces what its file holds now."""
    if own.is_file:
        module = _run_file(own, text)
    else:
        find_from_here()
        with named(own, None):
            module = importlib.import_module(own.place)
    found = getattr(module, own.name, None)
    if found is None:
        there = ", ".join(names_in(module)) or "no subclass of muster.Task"
        raise RecipeError(f"task: {own.place} has no class {own.name}; it has {there}")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise RecipeError(
            f"task: {own.label} is not a subclass of muster.Task; write class {own.name}(muster.Task)"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise RecipeError(
            f"task: {own.label} has no method {', '.join(missing)}; a task needs build_model, source, "
            "collate and loss"
        )
    _check_scores(own, found.scores)
    return found


def _check_scores(own: OwnTask, scores: Any) -> None:
    if not isinstance(scores, Mapping) or any(way not in ("min", "max") for way in scores.values()):
        raise RecipeError(
            f"{own.label}: scores is {scores!r:.80}, expected names with the direction that is better, such "
            'as {"accuracy": "max"}'
        )


def names_in(module: ModuleType) -> list[str]:
    """The tasks that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value is not Task
        and value.__module__ == module.__name__
    ]


def only_class(file: Path) -> str:
    """The name of the one task in a file."""
    own = OwnTask(str(file.absolute()), "")
    if not file.is_file():
        raise RecipeError(f"task: no file {file}")
    found = names_in(_run_file(own, None))
    if len(found) != 1:
        there = ", ".join(found) or "no subclass of muster.Task"
        raise RecipeError(f"task: {file} has {there}; say which: {file}:CLASS")
    return found[0]


def _run_file(own: OwnTask, text: str | None) -> ModuleType:
    """The file as a module, once per text of it."""
    path = Path(own.place)
    try:
        code = path.read_text() if text is None else text
    except OSError as error:
        raise RecipeError(f"task: {own.place} cannot be read ({error.strerror})") from None
    digest = hashlib.sha256(f"{own.place}\n{code}".encode()).hexdigest()[:12]
    name = f"muster_task_{path.stem}_{digest}"
    if name in _run:
        return _run[name]
    if text is not None:  # tracebacks show the lines that ran
        linecache.cache[own.place] = (len(code), None, code.splitlines(True), own.place)
    module = ModuleType(name)
    module.__file__ = own.place
    sys.modules[name] = module
    try:
        with named(own, None):
            exec(compile(code, own.place, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _run[name] = module
    return module


@contextmanager
def named(own: OwnTask, method: str | None) -> Iterator[None]:
    """Errors of the user's code as a sentence with the file, the line and the method."""
    try:
        yield
    except MusterError:
        raise
    except SyntaxError as error:
        raise RecipeError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        raise RecipeError(_sentence(own, method, error)) from error


def _sentence(own: OwnTask, method: str | None, error: Exception) -> str:
    file = own.file()
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    if lines and file and (original := original_of(file)):  # which is the one to edit
        where = f"{original}, line {lines[-1]} (copied into the run: {file})"
    else:
        where = f"{file}, line {lines[-1]}" if lines else own.label
    inside = f", in {method}" if method else ""
    words = f"{where}{inside}: {type(error).__name__}: {error}"
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing and own.is_file and Path(own.place).with_name(f"{missing}.py").is_file():
        words += (
            "; a task's file travels alone with its run: put everything into it, or make a package and "
            "name it package.module:CLASS"
        )
    elif missing and missing == own.place.split(".")[0]:
        words += "; install the package, or start from the directory that holds it"
    return words


def _checked_source(own: OwnTask, split: str, found: Any) -> Source | None:
    if found is None:
        return None
    if [name for name in SOURCE if not hasattr(found, name)]:
        raise RecipeError(
            f"{own.label}: source({split!r}) returned a {type(found).__name__}, expected a muster.Source; "
            "wrap a list or a torch Dataset: muster.ListSource(samples)"
        )
    lengths = np.asarray(found.lengths)
    if lengths.shape != (len(found),):
        raise RecipeError(
            f"{own.label}: source({split!r}) has {len(found)} samples, but lengths of shape "
            f"{lengths.shape}; give one length for each sample"
        )
    if found.lengths is not lengths or lengths.dtype != np.float64 or not (lengths > 0).all():
        raise RecipeError(
            f"{own.label}: source({split!r}).lengths must be a numpy array of float64, each above 0"
        )
    checked: Source = found
    return checked
