from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import processes
from budget import Budget
from pool import RankPool

# For the tests and all that they start: workers and ranks share the cores, the tensors are too small
# to be worth two threads, and sums come out in the same order everywhere.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("COLUMNS", None)  # of pytest-xdist: a console that is made under it keeps that width
processes.environment.update(os.environ)

CACHE = "XDG_CACHE_HOME"
LONG = ("launch", "systems", "plan", "parity", "train")
SETS = {
    "full": "long storms and complete tables",
    "guides": "every command of the guides, as printed, by real launchers; hosts, a browser, the wheel, servers",
    "gpu": "on NVIDIA GPUs, which ranks share where there are too few",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in SETS.items():
        parser.addoption(f"--{name}", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Indexes of durations go to a folder of the test run, not to the developer's cache."""
    if hasattr(config, "workerinput"):
        return  # its parent has done so for all
    ordinary = not any(config.getoption(f"--{name}") for name in SETS)
    whole = config.args == config.getini("testpaths") or config.getoption("-m") == "serial"
    if ordinary and whole:
        config.pluginmanager.register(Budget(), "budget")
    if config.getoption("--gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.exit("--gpu: torch finds no GPU here", returncode=2)
        os.environ["MUSTER_REHEARSE"] = "1"  # ranks share GPUs
    folder = Path(tempfile.mkdtemp(prefix="muster-tests-"))
    before = os.environ.get(CACHE)
    os.environ[CACHE] = str(folder / "cache")
    processes.prepare(folder)

    def end() -> None:
        os.environ.pop(CACHE)
        if before is not None:
            os.environ[CACHE] = before
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(end)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sets that were not asked for are left out, other than tests that are named one by one. Files that take
    long come first, so that all workers have something to do until the end."""
    asked = {name for name in SETS if config.getoption(f"--{name}")}
    chosen = [i for i in items if _in_sets(i, asked, named=i.nodeid in config.args)]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = sorted(chosen, key=lambda item: item.path.parent.name not in LONG)


def _in_sets(item: pytest.Item, asked: set[str], *, named: bool) -> bool:
    """`--guides` and `--gpu` are sets of their own; `--full` adds to the ordinary one, of files for `--guides` too.
    Tests for both CPU ranks and GPUs are also in the set for GPUs."""
    if "gpu" in asked:
        return any(item.get_closest_marker(name) for name in ("gpu", "both"))
    needed = {name for name in SETS if item.get_closest_marker(name)}
    if named:
        return needed <= asked | {"full", "guides"}
    if "full" in needed:
        return needed - {"guides"} <= asked
    return needed <= asked and ("guides" in needed) == ("guides" in asked)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The rows of the tables that tests filled in (`record_property("row", …)`), in order."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    found = [(r.nodeid, dict(r.user_properties).get("row"), r.outcome) for r in reports]
    rows = [(name.split("::")[1], row, outcome) for name, row, outcome in sorted(found) if row]
    if not rows or not any(config.getoption(f"--{name}") for name in SETS):
        return
    terminalreporter.section("rows")
    for test, group in itertools.groupby(rows, key=lambda row: row[0].partition("[")[0]):
        terminalreporter.line(test.removeprefix("test_").replace("_", " "))
        for _, row, outcome in group:
            terminalreporter.line(f"  {row} |{' FAILED' if outcome == 'failed' else ''}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)` is a pool of four ranks, started once."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or pools[world].closed:
            pools[world] = RankPool(world)
        return pools[world]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny recipe's file."""
    import tiny

    return str(tiny.write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    import subprocess

    folder = tmp_path / "small"
    folder.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], stderr=subprocess.DEVNULL
    )
    if not mounted:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.call(["umount", "--lazy", str(folder)])  # ranks may still hold files open
    shutil.rmtree(folder, ignore_errors=True)
