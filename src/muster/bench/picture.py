"""Plots of measurements: bandwidth over sizes, and the matrix of pairs, from plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError
from muster.observe.drawing import (
    COLOURS,
    INK,
    RED,
    SMALL,
    figure_for,
    files_for,
    plain_axes,
    save,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = (0, 4, 2, 6, 9)  # of colours: neighbours in the legend differ in hue
LINES = ("-", "--", ":", "-.")  # one for each number type
NUMBERED = 16  # ranks: above, a cell is too small for its number
BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def draw_collectives(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> list[Path]:
    """Bus bandwidth over the size of the array, both logarithmic, a line for each collective: in place
    where it has such a form. One rank alone has no bus: then algorithm bandwidth."""
    files = files_for(path)
    if not rows:
        raise MusterError(f"{path}: there is no measurement to draw")
    bus = any(row["bus_gb_per_s"] for row in rows)
    figure_name = "bus_gb_per_s" if bus else "algorithm_gb_per_s"
    lines: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        forms = lines.setdefault((row["collective"], row["dtype"]), {})
        forms.setdefault(row["where"], []).append((row["bytes"], row[figure_name]))
    names = list(dict.fromkeys(name for name, _ in lines))
    dtypes = list(dict.fromkeys(dtype for _, dtype in lines))
    with figure_for(8.8, title) as figure:
        label = "bus bandwidth" if bus else "algorithm bandwidth (one rank has no bus)"
        axes = plain_axes(figure, f"{label} (GB/s)")
        for (name, dtype), forms in lines.items():
            points = forms.get("in") or forms["out"]
            axes.plot(
                *zip(*points, strict=True),
                LINES[dtypes.index(dtype) % len(LINES)],
                color=COLOURS[ORDER[names.index(name) % len(ORDER)]],
                marker="osD^v"[names.index(name) % 5],
                markersize=5,
                linewidth=2,
                label=name if len(dtypes) == 1 else f"{name}, {dtype}",
            )
        _log_axes(axes, [row["bytes"] for row in rows])
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        axes.legend(frameon=False, fontsize=SMALL, handlelength=3.2, **beside)
        save(figure, files)
    return files


def _log_axes(axes: Axes, sizes: Sequence[int]) -> None:
    """Sizes in powers of two, as many as do not touch."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    first, last = round(math.log2(min(sizes))), round(math.log2(max(sizes)))
    shown = [2**power for power in range(first, last + 1, max(2, (last - first) // 10))]
    axes.set_xticks(shown, [_bytes(size) for size in shown])
    axes.set_xlabel("whole array")
    low, high = axes.get_ylim()
    thin = high / low > 300
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1,) if thin else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=SMALL)


def _bytes(size: int) -> str:
    unit, name = next(entry for entry in BYTES if size >= entry[0])
    return f"{size / unit:.3g} {name}"


def draw_pairs(path: Path, document: Mapping[str, Any], title: str) -> list[Path]:
    """Bandwidth and latency of every pair as heat maps, a row for each sender; slow links in red."""
    files = files_for(path)
    world = document["ranks"]
    side = min(2.6 + 0.42 * world, 9.0)
    with figure_for(2 * side + 1.2, title, side + 0.9) as figure:
        panels = (("gb_per_s", "GB/s", "viridis"), ("latency_us", "latency, µs", "viridis_r"))
        for axes, (key, label, colours) in zip(figure.subplots(1, 2), panels, strict=True):
            _heat_map(axes, document[key], label, colours, document["where"])
        for link in document["slow"]:
            _frame(figure.axes[0], link["from"], link["to"])
        save(figure, files)
    return files


def _heat_map(
    axes: Axes,
    matrix: Sequence[Sequence[float | None]],
    label: str,
    colours: str,
    where: Sequence[str],
) -> None:
    """The scale begins at 0, so that half the bandwidth looks like half."""
    world = len(matrix)
    values = [[float("nan") if value is None else value for value in row] for row in matrix]
    found = [value for row in matrix for value in row if value is not None]
    image = axes.imshow(values, cmap=colours, vmin=0, vmax=max(found))
    step = world // 17 + 1
    axes.set_xticks(range(0, world, step))
    several = len(set(where)) > 1 and world <= NUMBERED
    ranks = [f"{where[r]}  {r}" if several else str(r) for r in range(0, world, step)]
    axes.set_yticks(range(0, world, step), ranks)
    axes.set(xlabel="to rank", ylabel="from rank")
    axes.tick_params(labelsize=SMALL, length=0)
    axes.set_title(label, size=10, loc="left")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    for a, row in enumerate(matrix if world <= NUMBERED else []):
        for b, value in enumerate(row):
            if value is not None:
                red, green, blue, _ = image.cmap(value / max(found))
                dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                axes.text(
                    *(b, a, short(value)),
                    ha="center",
                    va="center",
                    size=SMALL if world <= 10 else 7,
                    color="white" if dark else INK,
                )


def _frame(axes: Axes, sender: int, receiver: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (receiver - 0.5, sender - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=RED, linewidth=2.5))
