"""CONTRIBUTING's table of layers is what the import contract and the packages say."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import layers


def test_the_page_is_as_written_by_the_tool():
    text = layers.PAGE.read_text()
    assert layers.page(text) == text, "run: python tools/layers.py"


def test_every_package_has_a_layer_and_a_summary():
    named = [package for packages in layers.layers() for package in packages]
    assert len(named) == len(set(named))
    assert all(layers.summary(package) for package in named)
