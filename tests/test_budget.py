"""The tests' own costs are counted, and growth is told."""

from __future__ import annotations

from budget import SLOWEST_S, TOTAL_S, by_folder, warnings

SPENT = {
    "tests/data/test_audio.py::test_a": 1.0,
    "tests/data/speech/test_b.py::test_b[x/y]": 2.0,
    "tests/test_cli.py::test_c": 4.0,
}


def test_seconds_are_summed_by_folder():
    assert by_folder(SPENT) == {"tests/data": 3.0, "tests/test_cli.py": 4.0}


def test_what_grew_is_named_and_what_did_not_is_not():
    assert list(warnings(SPENT, TOTAL_S)) == []
    grown = SPENT | {"tests/data/test_audio.py::test_a": SLOWEST_S + 1}
    total, slow = warnings(grown, TOTAL_S + 60)
    assert (
        total == f"the tests took {TOTAL_S + 60:.0f} s, more than the {TOTAL_S:.0f} s they may take"
    )
    assert slow.startswith(f"tests/data/test_audio.py::test_a took {SLOWEST_S + 1:.0f} s")
