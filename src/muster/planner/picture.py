"""Plots of a plan: memory as stacked bars, throughput over GPUs. Plain data in, PNG and SVG out."""

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
    note,
    plain_axes,
    save,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNLABELLED = 0.005  # of a bar's total: a smaller part is not labelled
READABLE = 0.045  # of the axis: a lower part is too small for its label
NEAR = 1 / 6  # of the capacity: bars below it would be too flat to read on one axis with it


def draw_memory(
    path: Path, stacks: Mapping[str, Mapping[str, float]], capacity_gib: float | None, title: str
) -> list[Path]:
    """One bar per rank or stage, its parts in GiB, against the `capacity_gib` of its device.

    Colours follow the order in which parts first appear. A part that is nowhere in use may be given
    as 0: it keeps its colour and is not shown, so plots of different plans can be compared.
    """
    files = files_for(path)
    if not stacks:
        raise MusterError(f"{path}: there is no bar to draw")
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    totals = {name: sum(stack.values()) for name, stack in stacks.items()}
    fullest = max(totals.values())
    shown = capacity_gib if capacity_gib and fullest >= NEAR * capacity_gib else 0.0
    top = 1.14 * (max(fullest, shown) or 1.0)
    margin = 0.04 * len(stacks) + 0.4 if capacity_gib else 0.0
    width = min(6.0 + 0.6 * len(stacks), 15)
    with figure_for(width, title) as figure:
        axes = plain_axes(figure, "memory (GiB)")
        axes.set_ylim(0, top)
        axes.set_xlim(-0.6, len(stacks) - 0.4 + margin)
        bottoms = [0.0] * len(stacks)
        for index, part in enumerate(parts):
            heights = [stack.get(part, 0.0) for stack in stacks.values()]
            _layer(axes, index, heights, bottoms, READABLE * top)
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
        for x, total in enumerate(totals.values()):
            _total(axes, x, total, capacity_gib)
        _bar_names(axes, list(stacks), inches=(width - 2.8) / (len(stacks) + margin))
        if capacity_gib:
            _capacity(axes, capacity_gib, inside=bool(shown))
        _memory_legend(axes, parts, stacks, totals)
        save(figure, files)
    return files


def draw_scaling(
    path: Path,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    unit: str,
    title: str,
    chosen: tuple[int, float] | None = None,
) -> list[Path]:
    """Throughput in `unit` against GPUs, a curve of (GPUs, throughput) per name, both axes
    logarithmic; what perfect scaling of the first curve would give; and the plan that was chosen."""
    files = files_for(path)
    drawn = {name: sorted(points) for name, points in curves.items() if points}
    everything = [point for points in drawn.values() for point in points]
    if not everything:
        raise MusterError(f"{path}: there is no point to draw")
    for gpus, value in [*everything, *([chosen] if chosen else [])]:
        if gpus < 1 or not 0 < value < math.inf:
            raise MusterError(f"{path}: {value} {unit} on {gpus} GPUs cannot be drawn")
    first, rate = next(iter(drawn.values()))[0]
    last = max(gpus for gpus, _ in everything)
    with figure_for(8.2, title) as figure:
        axes = plain_axes(figure, f"throughput ({unit})")
        ends = [(first, rate), (last, rate * last / first)]
        if last > first:
            axes.plot(*zip(*ends, strict=True), "--", color="#888888", label="perfect scaling")
        for index, (name, points) in enumerate(drawn.items()):
            gpus, value = points[-1]
            share = f" ({100 * value * first / (rate * gpus):.0f} % of that at {gpus:,})"
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[(2 * index + index // 5) % len(COLOURS)],
                marker="osD^vPX"[index % 7],
                linewidth=2,
                label=name + share if gpus > first else name,
            )
        _scaling_axes(axes, everything + ends, chosen)
        if chosen:
            _chosen(axes, chosen, unit)
        axes.legend(loc="upper left", frameon=False, fontsize=SMALL)
        save(figure, files)
    return files


def _look(index: int) -> dict[str, Any]:
    hatch = "//" if index >= len(COLOURS) else None
    return {"facecolor": COLOURS[index % len(COLOURS)], "edgecolor": "white", "hatch": hatch}


def _layer(
    axes: Axes, index: int, heights: list[float], bottoms: list[float], readable: float
) -> None:
    """One part of all bars, with its label where it fits."""
    look = _look(index)
    axes.bar(range(len(heights)), heights, 0.72, bottoms, linewidth=0.6, **look)
    red, green, blue = (int(look["facecolor"][at : at + 2], 16) for at in (1, 3, 5))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 125
    paint = {"color": "white" if dark else INK, "backgroundcolor": look["facecolor"]}
    for x, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
        if height >= readable:
            note(axes, _gib(height), (x, bottom + height / 2), 0, ha="center", va="center", **paint)


def _total(axes: Axes, x: int, total: float, capacity: float | None) -> None:
    text, colour = _gib(total), INK
    if capacity and total > capacity:
        text, colour = f"{text}\n{_gib(total - capacity)} over", RED
    paint = {"color": colour, "backgroundcolor": "white", "weight": "bold"}
    note(axes, text, (x, total), 3, ha="center", va="bottom", **paint)


def _capacity(axes: Axes, capacity: float, inside: bool) -> None:
    """The line, named in the free space right of the bars; an arrow where it lies far above them."""
    right: dict[str, Any] = {"ha": "right", "xycoords": ("axes fraction", "data")}
    size = f"{_gib(capacity)} GiB"
    if inside:
        axes.axhline(capacity, color=INK, linewidth=1.4, zorder=3)
        note(axes, "capacity", (1, capacity), 3, va="bottom", **right)
        note(axes, size, (1, capacity), -3, va="top", **right)
    else:
        note(axes, f"↑ capacity\n{size}", (1, axes.get_ylim()[1]), -3, va="top", **right)


def _bar_names(axes: Axes, names: list[str], inches: float) -> None:
    """Rotated where the longest is wider than the `inches` of a bar."""
    axes.set_xticks(range(len(names)), names, size=SMALL)
    axes.tick_params(axis="x", length=0)
    if 0.075 * max(map(len, names)) + 0.05 > inches:
        for label in axes.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")


def _memory_legend(
    axes: Axes,
    parts: list[str],
    stacks: Mapping[str, Mapping[str, float]],
    totals: Mapping[str, float],
) -> None:
    """Parts in the order of the stack, the top one first, with the numbers of the largest bar,
    also of parts too small to be labelled."""
    from matplotlib.patches import Patch

    fullest = max(totals, key=lambda name: totals[name])
    title = "GiB" if len(stacks) == 1 else f"GiB in {fullest}"
    if totals[fullest] > min(totals.values()):
        title += ", the largest"
    entries = []
    for index, part in enumerate(parts):
        if not any(stack.get(part) for stack in stacks.values()):
            continue
        size = stacks[fullest].get(part, 0.0)
        number = f"  {_gib(size)}" if size and size >= UNLABELLED * totals[fullest] else ""
        entries.append(Patch(label=part + number, **_look(index)))
    position: dict[str, Any] = {
        "loc": "center left",
        "bbox_to_anchor": (1, 0.5),
        "alignment": "left",
    }
    sizes = {"fontsize": SMALL, "title_fontsize": SMALL}
    axes.legend(handles=entries[::-1], title=title, frameon=False, **position, **sizes)


def _gib(size: float) -> str:
    return f"{size:.1f}" if size >= 0.95 or size == 0 else f"{size:.2g}"


def _scaling_axes(
    axes: Axes, points: list[tuple[int, float]], chosen: tuple[int, float] | None
) -> None:
    """Ticks are the GPU counts, unless they would overlap."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullLocator

    marked = [*points, chosen] if chosen else points
    counts, values = sorted({gpus for gpus, _ in marked}), [value for _, value in marked]
    low, high = min(values), max(values)
    doublings = max(math.log2(counts[-1] / counts[0]), 1.0)
    ticks: list[int] = []
    for count in sorted(counts, key=lambda n: (n.bit_count() > 1, n)):  # powers of two first
        if all(abs(math.log2(count / tick)) > 0.05 * doublings for tick in ticks):
            ticks.append(count)
    beside = chosen is not None and math.log2(counts[-1] / chosen[0]) < 0.2 * doublings
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    left, right = (2 ** (share * doublings) for share in (0.06, 0.22 if beside else 0.06))
    axes.set_xlim(counts[0] / left, counts[-1] * right)
    axes.set_ylim(low / 1.35, high * 1.6)
    axes.set_xlabel("GPUs")
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    wide = high > 4 * low
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)) if wide else AutoLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=SMALL)


def _chosen(axes: Axes, point: tuple[int, float], unit: str) -> None:
    axes.plot(*point, marker="o", markersize=15, fillstyle="none", color=RED, markeredgewidth=2)
    text = f"chosen: {point[0]:,} {'GPU' if point[0] == 1 else 'GPUs'}\n{short(point[1])} {unit}"
    note(axes, text, point, 0, xytext=(10, -14), va="top", color=RED, weight="bold")
