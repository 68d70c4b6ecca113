"""A profile on one page, for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = "profile"  # in the run directory
MOST_RANKS, NAME_WIDTH = 16, 60
SHARES = ("computing", "communication", "exposed_communication", "idle", "waiting_for_data")


def page(summary: dict[str, Any]) -> str:
    every, ranks = summary["all"], summary["ranks"]
    shown = sorted(
        sorted(ranks, key=lambda r: r["computing"])[:MOST_RANKS], key=lambda r: r["rank"]
    )
    few = f"; the {MOST_RANKS} that compute least" if len(ranks) > MOST_RANKS else ""
    return "\n".join(
        [
            f"{title(summary)}{few}",
            *(f"note: {note}" for note in summary["notes"]),
            "",
            *_table(
                ("rank", "step ms", "computing", "communicating", "exposed", "idle", "data"),
                [
                    (name, f"{row['step_ms']:.2f}", *(f"{row[share]:.1%}" for share in SHARES))
                    for name, row in [("all", every), *((str(r["rank"]), r) for r in shown)]
                ],
            ),
            "computing + exposed communication + idle = 100 %; data: the program waits for a batch",
            "",
            *_table(
                ("phase, ms per step", "wall", "computing", "communicating"),
                [
                    (p["phase"], *(f"{p[n]:.2f}" for n in ("wall_ms", *PHASE_TIMES)))
                    for p in every["phases"]
                ],
            ),
            "",
            *_table(
                ("top kernels, all ranks", "calls", "total ms", "of the time"),
                [
                    (_short(k["name"]), str(k["calls"]), f"{k['ms']:.2f}", f"{k['share']:.1%}")
                    for k in every["kernels"]
                ],
            ),
            "",
            *_table(
                ("largest idle gaps", "ms", "rank"),
                [
                    (
                        f"{g['phase']}: {_short(g['before'] or 'the start', 32)} → {_short(g['after'] or 'the end', 32)}",
                        f"{g['ms']:.2f}",
                        str(g["rank"]),
                    )
                    for g in every["gaps"]
                ],
            ),
            "",
        ]
    )


PHASE_TIMES = ("computing_ms", "communication_ms")


def title(summary: dict[str, Any]) -> str:
    first, last = summary["steps"]
    kind = {"gpu": "GPU", "cpu": "CPU"}[summary["ranks"][0]["device"]]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"profile of {steps} on {len(summary['ranks'])} {kind} rank(s)"


def headline(run: Path, name: str) -> str | None:
    """The main shares and the summary file; None where there is no profile."""
    try:
        summary = json.loads((run / FOLDER / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    every = summary["all"]
    shares = ", ".join(
        f"{share.replace('_', ' ')} {every[share]:.0%}"
        for share in ("computing", "exposed_communication", "idle")
    )
    notes = "".join(f"\nnote: {note}" for note in summary["notes"])
    return f"{title(summary)}: {shares}; see {name}/{FOLDER}/summary.txt{notes}"


def _short(name: str, width: int = NAME_WIDTH) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
