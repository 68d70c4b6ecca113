"""A run in a notebook: its state in words, and its curves as an SVG that takes the page's colours."""

from __future__ import annotations

import html
import io
import math
from typing import TYPE_CHECKING, Any

from muster.observe.drawing import FAINT, INK, figure_for, plain_axes
from muster.observe.results import stream_lines
from muster.observe.scores import main_score, score_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from muster.api.run import Run

Curve = list[tuple[int, float]]

BLUE, ORANGE = "#3B82C4", "#D97B29"  # both read well on white and on black
GRAY = "#888888"  # edges
INCHES = (4.2, 2.6)  # of one plot
MOST_POINTS = 1000
LARGEST = 1e30  # value that is drawn
SMOOTH_FROM = 100  # points


def as_html(run: Run) -> str:
    """Its name and state, scores, and plots of the loss and of each evaluated split's score."""
    scored = [event for event in run.events() if event["event"] == "evaluation"]
    loss = [
        (row["step"], row["loss"])
        for row in stream_lines(run.path / "metrics.jsonl")
        if row.get("loss") is not None
    ]
    words = [f"<b>{html.escape(run.name)}</b>: {run.state}"]
    if run.last:
        words.append(f"step {run.last['step']}")
    if loss:
        words.append(f"loss {loss[-1][1]:.4f}")
    if scored and (said := score_words(scored[-1]["scores"])):
        words.append(html.escape(f"{scored[-1]['split']} {said}"))
    picture = _draw(loss, *_scores(scored)) if loss else ""
    return f"<div><div>{', '.join(words)}</div>{picture}</div>"


def _scores(scored: list[dict[str, Any]]) -> tuple[str, dict[str, Curve]]:
    """The name of the task's own score, and its values by split."""
    named = [event["metric"] for event in scored if event.get("metric")]
    name = named[-1] if named else main_score(scored[-1]["scores"]) if scored else None
    curves: dict[str, Curve] = {}
    for event in scored if name else ():
        if name in event["scores"]:
            curves.setdefault(event["split"], []).append((event["step"], event["scores"][name]))
    return name or "", curves


def _draw(loss: Curve, name: str, scores: dict[str, Curve]) -> str:
    width, height = INCHES
    count = 2 if scores else 1
    with figure_for(width * count, "", height) as figure:
        _loss(plain_axes(figure, "loss", (1, count, 1)), _drawable(loss))
        if scores:
            axes = plain_axes(figure, name, (1, count, 2))
            for (split, curve), colour in zip(scores.items(), (ORANGE, BLUE, GRAY), strict=False):
                axes.plot(
                    *zip(*_drawable(curve), strict=True),
                    "o-",
                    color=colour,
                    label=split,
                    markersize=4,
                )
            axes.set_xlabel("step")
            axes.legend(frameon=False)
        figure.patch.set_alpha(0.0)
        for axes in figure.axes:
            axes.patch.set_alpha(0.0)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK.lower(), "currentColor").replace(FAINT.lower(), f"{GRAY}55")


def _drawable(curve: list[tuple[int, Any]]) -> Curve:
    """With gaps where a run went astray: matplotlib fails at the largest of floats."""
    return [
        (step, math.nan if value is None or abs(value) >= LARGEST else value)
        for step, value in curve
    ]


def _loss(axes: Axes, loss: Curve) -> None:
    """Every step thinly; with many of them, a moving average on top."""
    shown = loss[:: math.ceil(len(loss) / MOST_POINTS)]
    steps, values = zip(*shown, strict=True)
    marker = "o" if len(shown) == 1 else ""
    if len(shown) < SMOOTH_FROM:
        axes.plot(steps, values, color=BLUE, marker=marker)
    else:
        axes.plot(steps, values, color=BLUE, alpha=0.35, linewidth=0.8)
        axes.plot(steps, _smooth(list(values)), color=BLUE)
    axes.set_xlabel("step")


def _smooth(values: list[float]) -> list[float]:
    """Means of up to a fiftieth of the points before each."""
    width, found, total = max(2, len(values) // 50), [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        found.append(total / min(i + 1, width))
    return found
