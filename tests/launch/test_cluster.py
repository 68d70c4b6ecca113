"""Which rank this process is, by the variables its launcher set."""

import pytest

from muster.errors import LaunchError
from muster.launch.cluster import Place, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TORCHRUN.items() if name not in names}


def test_torchrun_tells_the_place():
    assert detect(TORCHRUN) == Place(5, 8, 1, 4)


def test_without_variables_the_process_is_alone():
    assert detect({}) == Place(0, 1, 0, 1)
    assert detect({"PATH": "/bin", "LOCAL_RANK": "3"}).world == 1


def test_without_a_local_world_size_all_ranks_are_on_one_machine():
    assert detect(without("LOCAL_WORLD_SIZE")).local_world == 8


@pytest.mark.parametrize(
    "missing", [["LOCAL_RANK"], ["MASTER_ADDR"], ["MASTER_ADDR", "MASTER_PORT"]]
)
def test_a_missing_variable_is_named(missing):
    with pytest.raises(LaunchError, match=f"but {', '.join(missing)} is not; start with torchrun"):
        detect(without(*missing))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "one", "-1", "2.0", "²"])
def test_what_is_no_number_is_named(name, value):
    with pytest.raises(LaunchError, match=f"^{name} is '{value}', expected a whole number"):
        detect(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("rank", "world", "size"),
    [
        ("RANK", "WORLD_SIZE", 8),
        ("RANK", "WORLD_SIZE", 9),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", 4),
    ],
)
def test_a_rank_beyond_the_world_is_refused(rank, world, size):
    with pytest.raises(LaunchError, match=rf"^{rank}={size} does not exist with {world}="):
        detect(TORCHRUN | {rank: str(size)})


def test_a_world_of_nobody_is_refused():
    with pytest.raises(LaunchError, match="RANK=0 does not exist with WORLD_SIZE=0"):
        detect(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "0"})
