"""muster trains speech and language models on every GPU you have.

What is listed here is the public API; everything else is private. Each name is imported when it is first used,
so that `import muster` is quick and leaves torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.api.check import check
    from muster.api.load import Loaded, load
    from muster.api.plan import plan
    from muster.api.run import Best, Run, runs
    from muster.api.train import train
    from muster.data.loader import Batch, Inputs, Source
    from muster.data.sources import ListSource
    from muster.errors import MusterError, RecipeError
    from muster.observe.trackers.base import Tracker, TrackerRun
    from muster.tasks.base import Example, Score, Task

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Best",
    "Example",
    "Inputs",
    "ListSource",
    "Loaded",
    "MusterError",
    "RecipeError",
    "Run",
    "Score",
    "Source",
    "Task",
    "Tracker",
    "TrackerRun",
    "check",
    "load",
    "plan",
    "runs",
    "train",
]
_HOMES = {
    "Batch": "muster.data.loader",
    "Best": "muster.api.run",
    "Example": "muster.tasks.base",
    "Inputs": "muster.data.loader",
    "ListSource": "muster.data.sources",
    "Loaded": "muster.api.load",
    "MusterError": "muster.errors",
    "RecipeError": "muster.errors",
    "Run": "muster.api.run",
    "Score": "muster.tasks.base",
    "Source": "muster.data.loader",
    "Task": "muster.tasks.base",
    "Tracker": "muster.observe.trackers.base",
    "TrackerRun": "muster.observe.trackers.base",
    "check": "muster.api.check",
    "load": "muster.api.load",
    "plan": "muster.api.plan",
    "runs": "muster.api.run",
    "train": "muster.api.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
