"""Measurements are kept, found again and compared, whatever their form."""

from __future__ import annotations

import json
import os

import pytest

from muster.bench import files, results
from muster.cli.bench.common import finish
from muster.errors import DataError, LaunchError


def document(*figures, time="2026-01-01T12:00:00+00:00", **changes):
    rows = [{"bytes": 2**n, "time_us": figure} for n, figure in enumerate(figures)]
    head = {"form": "collectives", "device": "cpu", "title": "CPU", "ranks": 2, "hosts": ["a"]}
    head |= {"backend": "gloo", "torch": "2", "time": time}
    return (
        head | {"keys": ["bytes"], "figure": "time_us", "better": "lower", "rows": rows} | changes
    )


def test_every_measurement_has_a_file_and_the_last_is_found(tmp_path):
    first = results.keep(document(1.0), tmp_path)
    second = results.keep(document(2.0, time="2026-01-02T12:00:00+00:00"), tmp_path)
    assert first.name == "collectives-cpu-2-20260101-120000.json"
    assert second != first
    os.utime(first, (1, 1))
    found = results.earlier("last", "collectives", tmp_path)
    assert (found["rows"], found["path"]) == (document(2.0)["rows"], str(second))
    assert results.earlier(str(first), "collectives", tmp_path)["rows"][0]["time_us"] == 1.0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ('{"form": "p2p", "rows": []}', "is no result of `muster bench collectives`"),
        ("[]", "is no result of"),
        ('{"form": "collectives"}', "it lacks 'keys'"),
        ('{"form": "collectives", "keys": [], "figure": "a", "rows": [1]}', "it is damaged"),
        ('{"form": "collectives", "keys": [], "figure": "a", "rows": [{}]}', "it lacks 'a'"),
        ('{"form": "collectives", "keys": [], "figure": "a", "rows": [{"a": "b"}]}', "is damaged"),
        (None, "No such file"),
    ],
)
def test_what_is_no_earlier_result_is_refused(tmp_path, content, words):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=words):
        results.earlier(str(path), "collectives", tmp_path)
    with pytest.raises(DataError, match="holds no collectives"):
        results.earlier("last", "collectives", tmp_path)


def test_a_comparison_tells_better_from_worse_by_what_is_compared():
    before = document(10.0, 10.0, 10.0, ranks=4) | {"path": "x.json"}
    found = results.compare(document(10.5, 20.0, 5.0), before)
    assert found.ratios == {(1,): 1.05, (2,): 2.0, (4,): 0.5}
    assert found.median == 1.05
    assert found.worse() == [(2,)]
    assert found.differs == ["ranks was 4, is 2"]
    elsewhere = results.compare(document(10.0, hosts=["a", "b"]), document(10.0) | {"path": "x"})
    assert elsewhere.differs == ["hosts were 1, are 2"]
    higher = results.compare(document(10.5, 20.0, 5.0, better="higher"), before)
    assert higher.worse() == [(4,)]
    with pytest.raises(DataError, match="no row of it was measured again"):
        results.compare(document(1.0), document() | {"path": "x.json"})


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="--dir"):
        files.prepare(tmp_path / "file" / "folder")
    files.prepare(tmp_path / "new" / "folder")
    path = results.keep(document(1.0), tmp_path / "new" / "folder")
    assert json.loads(path.read_text()) == document(1.0)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nor is a probe left"


def test_a_full_folder_is_refused_before_the_work_and_hides_nothing_after_it(small_disk, capsys):
    def shown(document, comparison):
        print("what was measured")

    files.prepare(small_disk)
    (small_disk / "filler").write_bytes(bytes(2**20))
    with pytest.raises(LaunchError, match="No space left"):
        files.prepare(small_disk)
    with pytest.raises(LaunchError, match="No space left"):
        finish(document(1.0), None, small_disk, False, shown, lambda path, document: [])
    assert "what was measured" in capsys.readouterr().out
