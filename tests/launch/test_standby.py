"""A supervisor that is started ahead, and what becomes of it when it is not needed or not there."""

from __future__ import annotations

import os

import pytest

from muster.errors import LaunchError
from muster.launch.standby import Standby


@pytest.mark.guides
def test_one_that_is_not_needed_ends_with_its_caller():
    standby = Standby()
    standby._channel.close()
    assert standby.process.wait(60) == 0


def test_one_that_has_died_is_an_error_that_says_so():
    standby = Standby()
    standby.process.kill()
    standby.process.wait()
    with pytest.raises(LaunchError, match="the supervisor ended before it had begun"):
        standby.begin([], os.open(os.devnull, os.O_WRONLY), None)
