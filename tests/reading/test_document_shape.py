"""Documents of anybody's keep the keys whose values are of the kind expected, and nothing else happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import FEW, HOSTILE_TEXT, documents
from muster.errors import CheckpointError, DataError, LaunchError, RecipeError, UnreadableError
from muster.observe import shapes
from muster.observe.evaluations import best, evaluations
from muster.observe.events import restarts_in
from muster.observe.results import read_last, read_lines
from muster.reading.libraries import refused
from muster.reading.shape import all_kept, kept

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), HOSTILE_TEXT)
ANY = documents(LEAVES, st.sampled_from([*shapes.EVENT, *shapes.FAILURE, *shapes.INFO]))


@FEW
@given(ANY)
def test_no_event_or_run_json_of_whatever_shape_is_an_error(document: object) -> None:
    info = shapes.info(document)
    assert isinstance(info.get("failure") or {}, dict)
    for kind in ["started", "restarting", *shapes.EVENT_NEEDS]:
        own = document if isinstance(document, dict) else {}
        events = [{"time": 1.0, "step": 2, **own, "event": kind}, document]
        restarts_in(events), evaluations(events), best(events)


def test_what_is_of_another_kind_counts_as_missing() -> None:
    found = shapes.info({"created": "x", "pid": True, "ranks": -1, "state": "failed", "more": [1]})
    assert found == {"state": "failed", "more": [1]}
    assert shapes.info({"created": float("inf")}) == shapes.info([1]) == {}
    assert kept({"a": 2**60, "b": 1.5}, {"a": "count", "b": "count"}) == {}
    assert kept({"a": 10**400}, {"a": "number"}) == {}  # beyond all floats
    assert not kept({"time": None}, {"time": "finite"}, "time")
    assert [*all_kept([{"a": 1}, 5, {"b": 1}], {"a": "count"}, "a")] == [{"a": 1}]
    assert not shapes.event({"event": "evaluation", "time": 1.0, "step": 3, "split": "x"})


def test_a_damaged_line_of_a_run_is_named_and_its_last_good_one_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps({"step": 1, "loss": 2.0}).encode() + b"\n\xff\xfe\n" + b"[" * 5000)
    with pytest.raises(UnreadableError, match=r"metrics\.jsonl, line 2: is not an object of JSON"):
        read_lines(path)
    assert read_last(path) == {"step": 1, "loss": 2.0}


@FEW
@given(st.lists(HOSTILE_TEXT | st.just("\n\n") | st.just("x" * 5000)).map("".join))
def test_a_refusal_is_one_short_line_whatever_it_quotes(text: str) -> None:
    for kind in (RecipeError, DataError, CheckpointError, UnreadableError):
        words = str(kind(f"train.parquet: {text}; copy it again"))
        assert words.startswith("train.parquet:")
        assert words.endswith("copy it again")
        assert words.isprintable()
        assert len(words) <= 2000
    assert str(RecipeError("one", "two\n")) == "one\ntwo"
    assert str(LaunchError("one\ntwo")) == "one\ntwo"


def test_what_a_library_raises_becomes_a_sentence() -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    for error in (ValueError("a\nb"), PanicException("index out of bounds"), RecursionError()):
        words = r"^x\.json cannot be read \(.+\); take another$"
        with (
            pytest.raises(DataError, match=words),
            refused("x.json", "take another", DataError),
        ):
            raise error
    with pytest.raises(KeyboardInterrupt), refused("x.json"):
        raise KeyboardInterrupt
    with pytest.raises(RecipeError, match=r"^mine$"), refused("x.json"):
        raise RecipeError("mine")
