"""Plots of where the time of a step goes: scaling over ranks, and overlap of communication."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from muster.bench.files import Document
from muster.bench.scaling import PARTS
from muster.observe.drawing import (
    COLOURS,
    INK,
    SMALL,
    figure_for,
    files_for,
    note,
    plain_axes,
    save,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART_COLOURS = {
    "compute": COLOURS[1],
    "exposed": COLOURS[4],
    "imbalance": COLOURS[3],
    "data": COLOURS[5],
    "rest": COLOURS[8],
}
KINDS = {"weak": (COLOURS[0], "o"), "strong": (COLOURS[4], "D")}


def draw_scaling(path: Path, document: Document) -> list[Path]:
    """Throughput over ranks beside what perfect scaling would give, and each step in its parts, in
    units of the perfect step."""
    files, rows = files_for(path), document["rows"]
    title = f"{document['recipe']} on {document['title']}"
    with figure_for(11.5, title) as figure:
        _throughput(plain_axes(figure, "samples/s", (1, 2, 1)), rows)
        _steps(plain_axes(figure, "step ÷ perfect step", (1, 2, 2)), rows)
        save(figure, files)
    return files


def _throughput(axes: Axes, rows: Sequence[Document]) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted({row["ranks"] for row in rows})
    base = rows[0]["samples_per_s"]
    axes.plot(counts, [base * n for n in counts], "--", color="#888888", label="perfect")
    for kind, (colour, marker) in KINDS.items():
        mine = [row for row in rows if row["kind"] == kind]
        if not mine:
            continue
        last = mine[-1]
        label = f"{kind}: {last['efficiency']:.0%} of it at {last['ranks']}"
        points = [(row["ranks"], row["samples_per_s"]) for row in mine]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_yticks([base * n for n in counts], [short(base * n) for n in counts])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    axes.legend(loc="upper left", frameon=False, fontsize=SMALL)


def _steps(axes: Axes, rows: Sequence[Document]) -> None:
    names = [f"{row['kind']}\n{row['ranks']}" for row in rows]
    perfect = [row["step_s"] * row["efficiency"] for row in rows]
    bottoms = [0.0] * len(rows)
    for part, (_, words) in PARTS.items():
        heights = [
            max(0.0, row["parts"][part]) / ideal for row, ideal in zip(rows, perfect, strict=True)
        ]
        axes.bar(names, heights, 0.7, bottoms, color=PART_COLOURS[part], label=words)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axes.axhline(1.0, color=INK, linewidth=1.2, linestyle="--")
    for at, (row, top) in enumerate(zip(rows, bottoms, strict=True)):
        note(axes, f"{row['efficiency']:.2f}", (at, top), 3, ha="center", va="bottom")
    axes.set_ylim(0, 1.45 * max(bottoms))
    axes.set_xlabel("ranks; the number is the efficiency")
    axes.legend(loc="upper left", ncols=2, frameon=False, fontsize=SMALL)


def draw_overlap(path: Path, document: Document) -> list[Path]:
    """Each setting as two bars: what computing and messages take one after the other, and what the
    strategy makes of them."""
    files, rows = files_for(path), document["rows"]
    title = f"{document['recipe']}, {document['ranks']} ranks, {document['title']}"
    with figure_for(max(8.0, 1.5 + 1.1 * len(rows)), title) as figure:
        axes = plain_axes(figure, "forward and backward (ms)")
        places = list(range(len(rows)))
        compute = [1e3 * row["compute_s"] for row in rows]
        apart = [1e3 * row["communication_s"] for row in rows]
        exposed = [1e3 * row["exposed_s"] for row in rows]
        left, right = [p - 0.2 for p in places], [p + 0.2 for p in places]
        axes.bar(left, compute, 0.36, color=COLOURS[1], label="computing")
        axes.bar(left, apart, 0.36, compute, color=COLOURS[8], label="messages alone, after it")
        axes.bar(right, compute, 0.36, color=COLOURS[1])
        sure = ["none" if row["hidden"] is None else COLOURS[4] for row in rows]
        axes.bar(right, exposed, 0.36, compute, color=sure, edgecolor=COLOURS[4])
        axes.bar([0], [0], color=COLOURS[4], label="exposed when overlapped (hollow: unsure)")
        tops = [c + max(a, e) for c, a, e in zip(compute, apart, exposed, strict=True)]
        for at, (row, top) in enumerate(zip(rows, tops, strict=True)):
            words = "?" if row["hidden"] is None else f"{row['hidden']:.0%} hidden"
            note(axes, words, (at, top), 3, ha="center", va="bottom")
        names = [f"{row['strategy']}\n{row['setting'].replace(' of ', chr(10))}" for row in rows]
        axes.set_xticks(places, names, size=SMALL)
        axes.set_ylim(0, 1.3 * max(tops))
        axes.legend(loc="upper left", ncols=3, frameon=False, fontsize=SMALL)
        save(figure, files)
    return files
