"""Recordings kept in the user's cache folder, so that the next plan of a model does not record it again.

A file is named by a hash of everything that its recording depends on, muster's own sources included.
One that cannot be read is recorded again, and the files that were used least recently are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import muster
from muster.data.cache import cache_folder
from muster.planner.messages import Message
from muster.planner.op_cost import OpCost
from muster.planner.profile import FEW, MORE, ExecutionMode, Profile
from muster.planner.subject import Subject, layout_of, signature
from muster.planner.trace import Trace, TracePoint
from muster.recipe.distributed import TensorOptions
from muster.writing import make_folder, write

MAX_BYTES = 64 * 2**20  # of all files
IRRELEVANT: Any = {  # parts of a recipe that tasks and models do not read, or that `mode` has
    **dict.fromkeys(("name", "description", "distributed", "checkpoint", "logging"), True),
    **dict.fromkeys(("slurm", "kubernetes"), True),
    "training": {
        "activation_checkpointing",
        "compile",
        "global_batch_size",
        "gradient_accumulation_steps",
        "per_device_batch_size",
        "precision",
    },
}
SOURCES = ("data", "models", "parallel", "planner", "tasks", "torch_internals.py")


@dataclass(frozen=True)
class Recordings:
    """Those of earlier plans, by what they depend on."""

    folder: Path = field(default_factory=lambda: cache_folder() / "recordings")

    def load(self, key: str) -> Profile | None:
        path = self._path(key)
        try:
            profile = _from_document(json.loads(path.read_text()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the last to be removed
        return profile

    def save(self, key: str, profile: Profile) -> None:
        """Atomically; not at all where the folder cannot be written to."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            make_folder(self.folder)
            write(path, json.dumps(_to_document(profile), separators=(",", ":")))
            self._remove_oldest()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _remove_oldest(self) -> None:
        files = [(path, path.stat()) for path in self.folder.iterdir()]
        total = 0
        for path, stat in sorted(files, key=lambda one: one[1].st_mtime_ns, reverse=True):
            total += stat.st_size
            if total > MAX_BYTES:
                path.unlink(missing_ok=True)


def recording_key(
    subject: Subject, mode: ExecutionMode, *, costliest: bool, options: TensorOptions
) -> str:
    """A hash of what a recording depends on."""
    batches = [subject.batch(rows, costliest=costliest) for rows in (FEW, MORE)]
    document = {
        "recipe": subject.recipe.model_dump(mode="json", exclude=IRRELEVANT),
        "assets": subject.task.assets,
        "model": repr(subject.model),
        "parameters": [
            (name, *layout_of(p), p.requires_grad) for name, p in subject.model.named_parameters()
        ],
        "plan": repr(subject.plan),
        "batches": [signature(batch) for batch in batches],
        "mode": astuple(mode),
        "options": options.model_dump(mode="json") if mode.tensor > 1 else None,
        "program": [_sources_digest(), *_platform()],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=repr).encode()).hexdigest()


def _platform() -> list[str]:
    """Torch chooses other kernels for other CPUs and with other backends."""
    return [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        str(torch.backends.mkldnn.is_available()),
        str(torch.version.cuda or torch.version.hip),
        platform.machine(),
        *(str(part) for part in sys.version_info[:2]),
    ]


@cache
def _sources_digest() -> str:
    """Of the parts of muster that decide what a recording contains."""
    return digest_of(Path(muster.__file__).parent / name for name in SOURCES)


def digest_of(places: Iterable[Path]) -> str:
    """A hash of Python files, and of those in folders, with their names."""
    total = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(place.parent)} {content}\n".encode())
    return total.hexdigest()


@dataclass
class _Table:
    """Values in the order of their first use; in documents, their index stands for them."""

    indexes: dict[Any, int] = field(default_factory=dict)

    def index(self, value: Any) -> int:
        return self.indexes.setdefault(value, len(self.indexes))

    @property
    def rows(self) -> list[Any]:
        return [astuple(value) for value in self.indexes]


def _to_document(profile: Profile) -> dict[str, Any]:
    points, costs, messages = _Table(), _Table(), _Table()

    def trace(one: Trace) -> dict[str, Any]:
        return {
            "ops": [(costs.index(cost), points.index(point)) for cost, point in one.ops],
            "messages": [(messages.index(m), points.index(point)) for m, point in one.messages],
            "calls": [(points.index(point), call, n) for (point, call), n in one.calls.items()],
            "timeline": [(points.index(point), line) for point, line in one.timeline.items()],
            "peak": one.peak,
            "at_peak": one.at_peak,
        }

    return {
        "depths": profile.depths,
        "short": [trace(one) for one in profile.short],
        "longer": {stack: [trace(one) for one in pair] for stack, pair in profile.longer.items()},
        "points": points.rows,
        "costs": costs.rows,
        "messages": messages.rows,
    }


def _from_document(document: dict[str, Any]) -> Profile:
    points = [TracePoint(*row) for row in document["points"]]
    costs = [
        OpCost(name, kind, flops, size, dtype, tuple(shape))
        for name, kind, flops, size, dtype, shape in document["costs"]
    ]
    messages = [
        Message(kind, size, tuple(ranks), dtype)
        for kind, size, ranks, dtype in document["messages"]
    ]

    def trace(one: dict[str, Any]) -> Trace:
        return Trace(
            [(costs[cost], points[point]) for cost, point in one["ops"]],
            [(messages[message], points[point]) for message, point in one["messages"]],
            Counter({(points[point], call): count for point, call, count in one["calls"]}),
            {points[point]: [(a, b) for a, b in line] for point, line in one["timeline"]},
            one["peak"],
            one["at_peak"],
        )

    def pair(traces: Sequence[dict[str, Any]]) -> tuple[Trace, Trace]:
        few, more = traces
        return trace(few), trace(more)

    longer = {stack: pair(traces) for stack, traces in document["longer"].items()}
    return Profile(document["depths"], pair(document["short"]), longer)
