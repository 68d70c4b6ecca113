"""The lessons of systems/distributed-training/04-nccl-operations, by real torchruns on two CPU ranks."""

from __future__ import annotations

import re

import pytest

from course import broken, torchrun
from muster.hardware import rehearsal

pytestmark = pytest.mark.timeout(300)

CLAIMS = {
    "collective_ops.py": r"6 collectives right on 2 ranks \((gloo|cpu:gloo,cuda:nccl)\); .* held everyone \d+\.\d s",
    "point_to_point.py": r"arrive in order \[1, 2, 3\]; two blocking sends were stuck for \d+\.\d s; "
    r".* 1 ring steps sum to 3 like all_reduce",
    "bandwidth_test.py": r"sends 1\.00 × the array from each: .* every sum is 3",
}
WAIT, RECV = "sending.wait(LIMIT)", "dist.recv(torch.empty(4), src=other, group=group)"
BROKEN = [
    ("collective_ops.py", "dist.all_to_all_single(got, mine)", "got.copy_(mine)"),
    ("collective_ops.py", '"has come")\n    dist.barrier()\n', '"has come")\n'),  # no barrier
    ("point_to_point.py", f"        {WAIT}\n        {RECV}\n", f"        {RECV}\n        {WAIT}\n"),
    ("bandwidth_test.py", "range(2 * (n - 1))", "range(n - 1)"),  # the second lap is missing
]


@pytest.mark.both
@pytest.mark.parametrize("lesson", CLAIMS)
def test_a_lesson_ends_with_its_claim(lesson):
    words = torchrun(f"04-nccl-operations/{lesson}")
    last = words if rehearsal.active() else words.splitlines()[-1]  # NCCL may have the last word
    assert re.search(CLAIMS[lesson], last), words


@pytest.mark.parametrize(
    ("lesson", "line", "instead"),
    [BROKEN[0], *(pytest.param(*row, marks=pytest.mark.full) for row in BROKEN[1:])],
)
def test_a_lesson_fails_where_its_crucial_line_is_broken(lesson, line, instead, tmp_path):
    script = broken(f"04-nccl-operations/{lesson}", line, instead, tmp_path)
    assert "AssertionError" in torchrun(script, fails=True)
