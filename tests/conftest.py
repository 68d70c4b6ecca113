from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="long storms and complete tables too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="long; ./run_tests.sh --full runs it"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes of durations go to a folder of the test run, not to the developer's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
