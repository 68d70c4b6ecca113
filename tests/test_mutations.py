"""The table of faults fits the code: each line is there once, and each test exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_every_fault_of_the_table_can_be_planted(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("mutations")
    faults = [tool.Fault(**entry) for entry in yaml.safe_load(tool.TABLE.read_text())]
    assert [found for fault in faults if (found := fault.problem())] == []
    for fault in faults:
        file, *_, function = re.sub(r"\[.*", "", fault.test).split("::")
        assert f"def {function}(" in (ROOT / file).read_text(), fault.test
