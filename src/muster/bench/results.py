"""Measurements are saved, and compared with earlier ones.

A document has `form`, `device`, `ranks` and `rows`. `keys` names what identifies a row, `figure`
the number that is compared, `better` whether higher or lower is better.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from muster.bench.device import known_as, title
from muster.bench.files import Document, write
from muster.errors import DataError
from muster.hardware import catalogue
from muster.parallel.mesh import Mesh, backend_for

ALIKE = (
    *("title", "ranks", "backend", "torch"),
    *("recipe", "overrides", "batch_per_rank", "block_bytes"),
)  # what must be the same for two results to be comparable, where they have it
CHANGED = 0.1  # of a figure: less is what two measurements of the same thing differ by


def head(form: str, mesh: Mesh) -> Document:
    """The fields common to all documents. A collective: all ranks call it."""
    here = os.uname().nodename
    cores_by_rank = mesh.gather((here, sorted(os.sched_getaffinity(0))))
    document = document_head(form, mesh.device, mesh.world, [host for host, _ in cores_by_rank])
    if mesh.device.type == "cpu":  # a rank sees only its own cores: count those of all ranks
        cores = {(host, core) for host, own in cores_by_rank for core in own}
        document["title"] = f"CPU, {len(cores)} core{'s' if len(cores) > 1 else ''}"
    return document


def document_head(form: str, device: torch.device, ranks: int, hosts: Sequence[str]) -> Document:
    """The same without a process group."""
    known = known_as(device)
    return {
        "form": form,
        "device": known.name if known else catalogue.slug(title(device)),
        "title": title(device),
        "ranks": ranks,
        "hosts": list(dict.fromkeys(hosts)),
        "backend": "nccl" if "nccl" in backend_for("auto", device) else "gloo",
        "torch": torch.__version__,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def keep(document: Document, folder: Path) -> Path:
    """A file of its own for every measurement: FORM-DEVICE-RANKS-TIME.json."""
    moment = datetime.fromisoformat(document["time"]).strftime("%Y%m%d-%H%M%S")
    path = folder / f"{_stem(document)}-{moment}.json"
    write(path, document)
    return path


def _stem(document: Document) -> str:
    return f"{document['form']}-{document['device']}-{document['ranks']}"


def earlier(asked: str, form: str, folder: Path) -> Document:
    """The document in a file; `last` is the newest of its form in `folder`."""
    path = Path(asked)
    if asked == "last":
        found = sorted(folder.glob(f"{form}-*.json"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise DataError(f"--against last: {folder} holds no {form}-*.json yet; measure once")
        path = found[-1]
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"--against {path}: {error.strerror}; name a file, or last") from None
    except ValueError as error:
        raise DataError(f"--against {path}: cannot be read as JSON ({error})") from None
    if not isinstance(document, dict) or document.get("form") != form:
        raise DataError(f"--against {path}: is no result of `muster bench {form}`")
    try:
        by_key(document)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise DataError(f"--against {path}: it {problem}; name another file") from None
    return {**document, "path": str(path)}


def by_key(document: Document) -> dict[tuple[Any, ...], float]:
    """Each row's figure."""
    keys, figure = document["keys"], document["figure"]
    return {tuple(row[key] for key in keys): float(row[figure]) for row in document["rows"]}


@dataclass(frozen=True)
class Comparison:
    """`ratios` are now ÷ before, by row; `differs` says what else does."""

    ratios: dict[tuple[Any, ...], float]
    figure: str
    better: str
    path: str
    differs: list[str]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios.values())

    def worse(self) -> list[tuple[Any, ...]]:
        """Rows that are slower by more than repeated measurements differ, worst first."""
        up = self.better == "higher"
        behind = {key: ratio if up else 1 / ratio for key, ratio in self.ratios.items()}
        return sorted((k for k, r in behind.items() if r < 1 - CHANGED), key=lambda k: behind[k])


def compare(now: Document, before: Document) -> Comparison:
    old, new = by_key(before), by_key(now)
    ratios = {key: new[key] / old[key] for key in new if old.get(key)}
    if not ratios:
        raise DataError(
            f"--against {before['path']}: no row of it was measured again; give the same options"
        )
    differs = [
        f"{name} was {before.get(name)}, is {now[name]}"
        for name in ALIKE
        if name in now and before.get(name) != now[name]
    ]
    hosts = [len(document.get("hosts", ())) for document in (before, now)]
    if hosts[0] != hosts[1]:
        differs.append(f"hosts were {hosts[0]}, are {hosts[1]}")
    return Comparison(ratios, now["figure"], now["better"], before["path"], differs)
