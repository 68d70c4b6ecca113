"""The catalogue of known failures: every entry finds its own real lines and nothing in a healthy log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from muster.diagnose.describe import page
from muster.diagnose.known import NO_DIGITS, Known, catalogue, longest_literal, match, suspicious

LOGS = Path(__file__).with_name("logs")
MANUAL = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.mark.parametrize("known", catalogue(), ids=lambda known: known.id)
def test_a_real_line_finds_its_own_entry_first(known: Known):
    assert known.examples
    for line in known.examples:
        assert [found.id for found in match(line)][:1] == [known.id], line


@pytest.mark.parametrize("known", catalogue(), ids=lambda known: known.id)
def test_the_filters_before_the_patterns_lose_no_real_line(known: Known):
    for line in known.examples:
        assert suspicious(line), line
        for pattern, words in zip(known.patterns, known.anchors, strict=True):
            assert len(words) >= 3, f"{pattern.pattern} has nothing to look for first"
            assert words in line.translate(NO_DIGITS) or not pattern.search(line)


def test_the_catalogue_is_complete_and_unambiguous():
    assert len(catalogue()) >= 45
    assert len({known.id for known in catalogue()}) == len(catalogue())
    assert len({known.title for known in catalogue()}) == len(catalogue())
    for known in catalogue():
        for words in (known.cause, known.cure):
            assert re.search(r"[.)]$", words), f"{known.id}: {words} is not a sentence"
        assert known.source


@pytest.mark.parametrize("log", ["healthy-torchrun-nccl.log", "healthy-muster.log"])
def test_no_entry_matches_a_healthy_log(log: str):
    for line in (LOGS / log).read_text().splitlines():
        assert not match(line), line


def test_cures_name_keys_that_a_recipe_has():
    from muster.recipe.describe import keys

    sections = "training|distributed|data|checkpoint|logging|slurm|kubernetes"
    named = {
        (known.id, key)
        for known in catalogue()
        for key in re.findall(
            rf"(?<![.\w])((?:{sections})\.[a-z_.]*[a-z])", known.cause + known.cure
        )
    }
    assert len(named) > 10
    assert [pair for pair in sorted(named) if pair[1] not in keys()] == []


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r"validation errors? for DeepSpeed\w*Config", "validation error"),
        (r"exitcode *: -9\b", "exitcode"),
        (r"Xid .*: (48|63),", "Xid "),
        (r"DataLoader worker \(pid(\(s\))? [\d, ]+\)", "DataLoader worker (pid"),
        (r"a{2}b|c", ""),
        (r"signal 9 \(SIGKILL\)", "signal  (SIGKILL)"),
    ],
)
def test_the_words_looked_for_first_are_in_every_match(pattern: str, literal: str):
    assert longest_literal(pattern) == literal


def test_causes_come_before_what_follows_from_them():
    text = "NCCL WARN Connect to 10.0.0.2<1> failed : No route to host\nunhandled system error"
    assert [known.id for known in match(text)] == [
        "nccl-no-route",
        "nccl-unhandled-system",
        "nccl-warning",
    ]
    text = "Connection closed by peer\nOSError: [Errno 28] No space left on device"
    assert [known.id for known in match(text)] == ["disk-full", "peer-gone"]


def test_the_manual_is_written_from_the_catalogue():
    hint = "run: python -m muster.diagnose.describe docs/troubleshooting.md"
    assert MANUAL.read_text(encoding="utf-8") == page(), hint
