"""Pictures of a plan: they show what they were given, in files a browser and a page can use."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from muster.errors import MusterError
from muster.observe.drawing import COLOURS, DPI
from muster.planner.picture import draw_memory, draw_scaling

PARTS = ["weights", "gradients", "optimizer", "activations", "context"]
SVG = "{http://www.w3.org/2000/svg}"


def stacks(count: int, *sizes: float) -> dict[str, dict[str, float]]:
    return {f"rank {i}": dict(zip(PARTS, sizes, strict=True)) for i in range(count)}


def texts(path: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.parse(path).iter(f"{SVG}text")]


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:24])


def fills(path: Path) -> list[str]:
    """Colours of the palette in the order they are drawn: one for each part of each bar, then the
    legend."""
    found = re.findall(r"fill: (#[0-9a-f]{6}); stroke: #ffffff", path.read_text())
    return [colour.upper() for colour in found]


@pytest.mark.parametrize("bars", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 16))])
def test_memory_shows_every_bar_part_and_total(tmp_path, bars):
    files = draw_memory(tmp_path / "memory", stacks(bars, 8, 8, 16, 20, 1.5), 79.1, "The plan")
    assert files == [tmp_path / "memory.png", tmp_path / "memory.svg"]
    width, height = size_of(files[0])
    assert height == round(5.2 * DPI)
    assert 1.0 < width / height < 3
    words = texts(files[1])
    assert {"The plan", "memory (GiB)", "capacity", "79.1 GiB"} <= set(words)
    assert [f"rank {i}" for i in range(bars)] == [w for w in words if re.fullmatch(r"rank \d+", w)]
    assert words.count("53.5") == bars  # the total
    assert words.count("20.0") == bars  # a part with room for its number
    assert {"activations  20.0", "context  1.5"} <= set(words)  # the legend has the thin one's too


def test_a_part_has_one_colour_and_keeps_it_where_others_are_absent(tmp_path):
    bars = {"stage 0": {"weights": 4.0, "logits": 0.0, "activations": 9.0}}
    bars["stage 1"] = {"weights": 4.0, "logits": 3.0}
    draw_memory(tmp_path / "a.svg", bars, None, "two")
    weights, logits, activations = COLOURS[:3]
    assert fills(tmp_path / "a.svg")[-3:] == [activations, logits, weights]
    assert fills(tmp_path / "a.svg").count(weights) == 3  # two bars and the legend
    del bars["stage 1"]
    draw_memory(tmp_path / "b.svg", bars, None, "one")
    assert fills(tmp_path / "b.svg")[-2:] == [activations, weights]
    assert not [word for word in texts(tmp_path / "b.svg") if "logits" in word]
    assert "capacity" not in texts(tmp_path / "b.svg")


def test_what_does_not_fit_says_by_how_much(tmp_path):
    draw_memory(tmp_path / "a.svg", stacks(1, 10, 10, 20, 50, 1.5), 79.1, "too much")
    assert {"91.5", "12.4 over"} <= set(texts(tmp_path / "a.svg"))
    draw_memory(tmp_path / "b.svg", stacks(1, 10, 10, 20, 30, 1.5), 79.1, "fits")
    assert not [word for word in texts(tmp_path / "b.svg") if "over" in word]


def test_a_part_under_half_a_percent_has_no_number(tmp_path):
    draw_memory(tmp_path / "a.svg", stacks(1, 49.6, 49.5, 0.4, 0, 0.5), None, "small")
    words = texts(tmp_path / "a.svg")
    assert "optimizer" in words
    assert "context  0.5" in words
    assert "activations" not in words


def test_flat_bars_are_shown_large_under_a_far_capacity(tmp_path):
    draw_memory(tmp_path / "a.svg", stacks(2, 0.1, 0.1, 0.2, 0.6, 0.5), 139.8, "small model")
    words = texts(tmp_path / "a.svg")
    assert {"↑ capacity", "139.8 GiB", "0.6"} <= set(words)
    assert "100" not in words  # the axis ends near the bars


def test_scaling_shows_curves_counts_perfect_scaling_and_the_choice(tmp_path):
    curves = {
        "FSDP": [(8, 1000.0), (16, 1900.0), (48, 4500.0)],
        "tensor 8 × FSDP": [(16, 1500.0), (32, 2900.0)],
    }
    files = draw_scaling(tmp_path / "new" / "scaling", curves, "tokens/s", "$70B$", (48, 4500.0))
    assert files == [tmp_path / "new" / f"scaling.{kind}" for kind in ("png", "svg")]
    assert size_of(files[0]) == (round(8.2 * DPI), round(5.2 * DPI))
    words = texts(files[1])
    assert [w for w in words if re.fullmatch(r"8|16|32|48|64", w)] == ["8", "16", "32", "48"]
    assert {"GPUs", "throughput (tokens/s)", "$70B$", "perfect scaling"} <= set(words)
    assert "FSDP (75 % of that at 48)" in words  # 4,500 of 6,000
    assert "tensor 8 × FSDP (72 % of that at 32)" in words  # 2,900 of 4,000
    assert {"chosen: 48 GPUs", "4.5k tokens/s"} <= set(words)


def test_one_point_is_a_picture_too(tmp_path):
    (file,) = draw_scaling(tmp_path / "a.svg", {"DDP": [(1, 274.0)]}, "clips/s", "one GPU")
    assert {"1", "DDP", "250"} <= set(texts(file))
    assert not [word for word in texts(file) if "perfect" in word or "chosen" in word]


def test_perfect_scaling_starts_at_the_first_point_and_doubles_with_the_gpus(tmp_path):
    for share in (1.0, 0.5):
        points = [(8, 400.0 * share), (2, 100.0), (4, 200.0)]
        draw_scaling(tmp_path / "a.svg", {"DDP": points}, "clips/s", "x")
        perfect, curve = line(tmp_path / "a.svg", "#888888"), line(tmp_path / "a.svg", COLOURS[0])
        assert perfect[0] == curve[0]
        assert perfect[-1][0] == curve[-1][0]
        assert (perfect[-1][1] < curve[-1][1] - 50) == (share < 1)  # y grows downwards in SVG
        assert share < 1 or perfect[-1] == curve[-1]


def line(path: Path, colour: str) -> list[tuple[float, float]]:
    """The first line of that colour: the legend's sample comes later."""
    for node in ET.parse(path).iter(f"{SVG}path"):
        if f"stroke: {colour.lower()}" in node.get("style", "") and node.get("clip-path"):
            numbers = [float(word) for word in re.findall(r"[\d.]+", node.get("d", ""))]
            if len(numbers) > 2 and numbers[0] != numbers[2] and numbers[1] != numbers[3]:
                return list(zip(numbers[::2], numbers[1::2], strict=True))
    raise AssertionError(f"no line in {colour}")


@pytest.mark.parametrize("ending", [".png", ".svg", ".PNG"])
def test_an_ending_asks_for_that_file_only(tmp_path, ending):
    path = tmp_path / f"memory{ending}"
    assert draw_memory(path, stacks(1, 1, 1, 1, 1, 1), 8, "one") == [path]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes().startswith(b"<?xml" if ending == ".svg" else b"\x89PNG")


def test_the_same_plan_gives_the_same_files(tmp_path):
    first, second = (
        [p.read_bytes() for p in draw_memory(tmp_path / name, stacks(2, 1, 1, 2, 5, 1), 8, "x")]
        for name in "ab"
    )
    assert first == second


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda f: draw_memory(f / "a.pdf", stacks(1, 1, 1, 1, 1, 1), 8, "x"), r"a\.pdf: .*\.png or \.svg, not \.pdf"),
        (lambda f: draw_scaling(f / "a.jpg", {"a": [(1, 1.0)]}, "x", "x"), r"a\.jpg: .*not \.jpg"),
        (lambda f: draw_memory(f / "a", {}, 8, "x"), "a: there is no bar"),
        (lambda f: draw_scaling(f / "a", {"a": []}, "x", "x"), "a: there is no point"),
        (lambda f: draw_scaling(f / "a", {"a": [(8, 0.0)]}, "clips/s", "x"), r"0\.0 clips/s on 8 GPUs"),
        (lambda f: draw_scaling(f / "a", {"a": [(8, 1.0)]}, "x", "x", (8, float("nan"))), "nan x on 8"),
        (lambda f: draw_memory(f / "file" / "a", stacks(1, 1, 1, 1, 1, 1), 8, "x"), "cannot be written"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_with_the_reason(tmp_path, draw, words):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MusterError, match=words):
        draw(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MusterError, match=r"pictures need matplotlib .*: pip install matplotlib"):
        draw_memory(tmp_path / "a", stacks(1, 1, 1, 1, 1, 1), 8, "x")


@pytest.mark.guides
def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    code = (
        "import sys; from pathlib import Path; from muster.planner.picture import draw_memory\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        f"draw_memory(Path({str(tmp_path / 'a')!r}), {{'rank 0': {{'weights': 1.0}}}}, 8, 'x')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert before == matplotlib.rcParams.copy()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
