"""A run's document, from its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from muster.observe.console import RECENT_STEPS
from muster.page import told as what_it_was_told
from muster.page.document import Document, RunPart
from muster.page.downsample import curves
from muster.page.examples import examples
from muster.page.findings import findings
from muster.page.marks import marks, scores
from muster.page.ranks import Compared, rows
from muster.page.read import RunFiles
from muster.page.summary import summary
from muster.reading.libraries import refused

REMEDY = "muster did not write it so; `muster explain` reads its logs alone"


def read_document(run: Path) -> Document:
    """Of a run directory, read once."""
    files = RunFiles(run)
    with refused(f"the run in {run}", REMEDY):
        files.refresh()
    return document(files)


def document(files: RunFiles) -> Document:
    """UnreadableError of a run whose files, each of its kind, do not fit each other."""
    with refused(f"the run in {files.run.path}", REMEDY):
        return _document(files)


def _document(files: RunFiles) -> Document:
    compared = Compared(files)
    lines = rows(files, compared)
    return {
        "run": run_part(files),
        "findings": findings(files, lines, compared),
        "curves": curves(files.metrics, files.step_times()),
        "evaluations": scores(files),
        "marks": marks(files),
        "planned": what_it_was_told.planned(files),
        "ranks": {"rows": lines},
        "heat": files.times.heat(files.ranks),
        "examples": examples(files),
        "told": what_it_was_told.told(files),
    }


def run_part(files: RunFiles) -> RunPart:
    plan, failure = files.plan, files.info.get("failure") or {}
    return {
        **summary(files),
        "eta_s": _seconds_left(files),
        "devices": sorted(
            {name.split(" (cuda:")[0] for name in files.environment.get("devices", [])}
        ),
        "directory": str(files.run.path),
        "parameters": plan.get("parameters"),
        "precision": plan.get("precision"),
        "global_batch_size": plan.get("global_batch_size"),
        "restarts": int(files.info.get("restarts") or 0),
        "cause": failure.get("cause"),
        "cure": failure.get("cure"),
    }


def _seconds_left(files: RunFiles) -> float | None:
    taken = files.metrics.column("step_time_s")[-RECENT_STEPS:]
    if not files.alive or files.steps is None or not np.isfinite(taken).any():
        return None
    return float(np.nanmedian(taken)) * max(0, files.steps - int(files.last.get("step", 0)))
