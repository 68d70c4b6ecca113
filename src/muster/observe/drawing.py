"""Shared by all plots: colours, fonts, files, and annotations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "muted" scheme, made for colour-blind readers, with a darker grey; neighbours in a stack
# differ in lightness, so it can also be printed in grey.
COLOURS = [
    *("#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677"),
    *("#882255", "#44AA99", "#AA4499", "#BBBBBB", "#999933"),
]
INK, FAINT, RED = "#222222", "#DDDDDD", "#B2182B"
DPI = 160
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "muster",  # the same figures give the same file
}
SMALL = 9  # points


def files_for(path: Path) -> list[Path]:
    """The files that will be written, before anything is drawn."""
    suffix = path.suffix.lower()
    if suffix in (".png", ".svg"):
        return [path]
    if suffix:
        raise MusterError(
            f"{path}: a picture ends in .png or .svg, not {path.suffix}; without an ending, both are "
            "written"
        )
    return [path.with_name(path.name + ending) for ending in (".png", ".svg")]


@contextmanager
def figure_for(width: float, title: str, height: float = 5.2) -> Iterator[Figure]:
    """A figure without pyplot and its state; rcParams are restored."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MusterError(f"pictures need matplotlib ({error}): pip install matplotlib") from None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        figure.suptitle(
            textwrap.fill(title, int(width * 10)), x=0.012, ha="left", size=12, weight="bold"
        )
        yield figure


def plain_axes(figure: Figure, label: str, place: tuple[int, int, int] = (1, 1, 1)) -> Axes:
    """`place` is rows, columns and which of them, where a figure has several."""
    axes = figure.add_subplot(*place)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(label)
    return axes


def save(figure: Figure, files: list[Path]) -> None:
    for file in files:
        kind = file.suffix.lower()[1:]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
        except OSError as error:
            raise MusterError(f"{file}: the picture cannot be written: {error.strerror}") from None


def note(axes: Axes, text: str, at: tuple[float, float], points_up: float, **style: Any) -> None:
    """Text above all lines; with a background where it may overlap one."""
    style = {"size": SMALL, "xytext": (0, points_up), "zorder": 4, **style}
    if colour := style.pop("backgroundcolor", None):
        style["bbox"] = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
    axes.annotate(text, at, textcoords="offset points", **style)


def short(value: float) -> str:
    """1,234,000 as 1.23M."""
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, letter = next((unit for unit in units if value >= unit[0]), (1.0, ""))
    return f"{float(f'{value / scale:.3g}'):g}{letter}"
