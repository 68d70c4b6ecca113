"""`muster check --parity`, as a user runs it."""

from __future__ import annotations

import re

import pytest

from muster.checks.parity import ROWS, rows_for
from muster.checks.parity_run import reason, run_parity
from muster.errors import MusterError
from processes import muster


def test_one_row_is_measured_on_two_ranks(tmp_path):
    words = ["check", "gpt-micro", "--parity", "--gpus", "2", "--strategy", "ddp"]
    table = muster(*words, folder=tmp_path).stdout
    (row,) = [line for line in table.splitlines() if "ddp" in line]
    strategy, ranks, _, norm, _, verdict = re.split(r"\s*│\s*", row.strip("│ "))
    assert (strategy, ranks, verdict) == ("ddp", "2", "agrees")
    assert 0 <= float(norm) < 1e-5


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8, 16, 64])
def test_any_number_of_ranks_has_rows(world):
    names = [row.name for row in rows_for(world)]
    assert {"ddp", "fsdp", "tensor"} <= set(names)
    assert ("hsdp" in names) == (world % 4 == 0)
    assert ("tensor × pipeline × fsdp" in names) == (world % 8 == 0)


def test_every_row_is_offered_to_the_worlds_of_the_table():
    for row in ROWS:
        assert all(row in rows_for(world) for world in row.worlds), row.name


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "distributed.context: 2, but only causal-lm has sequences that ranks can share, and this is a.py:A; "
            "set it to auto",
            "only causal-lm has sequences that ranks can share, and this is a.py:A",
        ),
        (
            "distributed.strategy: a.py:A has no tensor-parallel plan; it trains with ddp, fsdp",
            "a.py:A has no tensor-parallel plan",
        ),
        (
            "model.lora: adapters train under ddp. Change distributed.strategy",
            "model.lora: adapters train under ddp",
        ),
        (
            "distributed.strategy: zero needs DeepSpeed (no module): pip install 'x[deepspeed]'",
            "zero needs DeepSpeed (no module): pip install 'x[deepspeed]'",
        ),
    ],
)
def test_a_row_that_is_left_out_says_why_and_not_what_nobody_set(error, why):
    assert reason(MusterError(error)) == why


def test_a_row_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(
        MusterError, match="no row begins with 'magic' on 2 ranks; there are ddp, fsdp"
    ):
        run_parity("gpt-micro", 2, "magic")
