"""The control plane of many nodes, in one process: nobody is missed, and what it costs does not grow with the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from muster.hardware import rehearsal

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import control_plane


@pytest.fixture(scope="module")
def files() -> control_plane.Files:
    return control_plane.Files()


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv(rehearsal.VARIABLE, "1")


def everyone_is_told(found: control_plane.Found) -> None:
    for what in (
        "ranks that know of all others, while all wait",
        "ranks in a reader's table, with times",
        "ranks that heard of the stall",
    ):
        assert found.counts[what] == found.ranks, what
    assert found.counts["nodes that heard of the failure"] == found.nodes
    assert found.counts["nodes that have the decision"] == found.nodes


@pytest.mark.guides
def test_ranks_of_one_node_cost_shared_storage_no_more_than_one(tmp_path, files):
    """The operations of 8 nodes with 8 ranks each; each writes one file a second (made, opened, renamed, its folder's
    mode) and looks for one."""
    found = control_plane.measure(8, 8, tmp_path / "run", files, 1.0)
    everyone_is_told(found)
    assert found.counts["file operations a second, a node, while it trains"] < 12
    assert found.counts["file operations a second, a node, while all wait"] < 36
    assert found.counts["file operations of a reader, a node"] < 3
    assert found.counts["messages a second, a node, while it trains"] < 20
    assert found.counts["threads of the store"] <= 2


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_ranks_are_all_told(tmp_path, files):
    small = control_plane.measure(2, 8, tmp_path / "small", files, 5.0)
    found = control_plane.measure(128, 8, tmp_path / "large", files, 5.0)
    everyone_is_told(found)
    for name in (
        "messages a second, a node, while it trains",
        "file operations a second, a node, while it trains",
    ):
        assert found.counts[name] < 1.5 * small.counts[name] + 2, name
    assert found.counts["file operations a second, a node, while all wait"] < 36
    assert found.counts["file operations of a reader, a node"] < 3
