"""The files of a run, read while they grow, are replaced and vanish."""

import json
import shutil
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from muster.diagnose.explain import explain_run
from muster.errors import MusterError
from muster.page import files
from muster.page.build import document, read_document
from muster.page.downsample import POINTS, bucket_size, rounded
from muster.page.files import Growing, JsonFile
from muster.page.live import LiveRuns
from muster.page.read import RunFacts, RunFiles, Vanished
from muster.page.report import as_script
from muster.page.summary import best
from muster.page.table import Table, parse
from muster.page.times import BINS, Bins, RankTimes
from page import synthetic


def lines(*steps: int, **values: float) -> str:
    return "".join(json.dumps({"step": step, **values}) + "\n" for step in steps)


def rank_lines(count: int, compute: float = 1.0, begin: int = 1) -> str:
    times = {"compute_s": compute, "comm_wait_s": 0.5, "data_wait_s": 0.25, "step_time_s": 2.0}
    return lines(*range(begin, begin + count), **times)


def test_a_line_cut_short_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    file = Growing(path)
    assert file.read() == (True, b'{"step": 1}\n')
    assert file.read() == (False, b"")
    with path.open("a") as out:
        out.write('ep": 2}\n')
    assert file.read() == (False, b'{"step": 2}\n')


def test_a_file_that_a_resume_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3))
    file = Growing(path)
    file.read()
    (tmp_path / "new").write_text(lines(1, 2) + lines(3, 4, 5))  # longer than before
    (tmp_path / "new").replace(path)
    fresh, text = file.read()
    assert fresh
    assert len(text.splitlines()) == 5


def test_samples_of_a_long_file_are_whole_lines_and_its_end_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text(lines(*range(1, 50_001), compute_s=0.123456789))
    file = Growing(path)
    _, text = file.read(samples=20)
    steps = parse(text)["step"]
    assert len(text) < path.stat().st_size / 5
    assert np.isfinite(steps).all()
    assert steps[-1] == 50_000
    assert (np.diff(steps[-200:]) == 1).all()
    with path.open("a") as out:
        out.write(lines(50_001))
    assert parse(file.read()[1])["step"].tolist() == [50_001]


@pytest.mark.parametrize(
    "recipe",
    [
        "training: {steps: !!bool x}\n",
        "training: {steps: !!timestamp x}\n",
        "name: 2026-01-01\ntask_options: {x: [.nan, {y: [.inf]}]}\n",
        "name: " + "[" * 3000 + "]" * 3000,
        "a: &a [x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join(['*' + a] * 8)}]\n" for a, b in pairwise("abcdefg")),
        "training: [1]\n",
        "training: {steps: x}\n",
    ],
)
def test_a_recipe_that_is_none_takes_no_other_run_with_it(tmp_path: Path, recipe: str) -> None:
    synthetic.write(tmp_path / "good", ranks=1, steps=5)
    bad = synthetic.write(tmp_path / "bad", ranks=1, steps=5)
    (bad / "recipe.yaml").write_text(recipe)
    live = LiveRuns(tmp_path)
    assert "good" in [run["name"] for run in json.loads(live.list().whole())["runs"]]
    with suppress(MusterError):
        json.loads(live.run("bad").refresh().whole())
    with suppress(MusterError):
        as_script(read_document(bad))


def test_names_and_numbers_that_no_run_has_are_left_out(tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "one", ranks=2, steps=5)
    (run / "ranks" / "².jsonl").write_text(rank_lines(2))
    (run / "ranks" / "².heartbeat.json").write_text('{"time": 1.0}')
    (run / "ranks" / "².log").write_text("x\n")
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "ranks": 2**50}))
    files = RunFiles(run)
    files.refresh()
    assert files.ranks == [0, 1]
    explain_run(run)


def test_numbers_of_a_file_with_a_spoilt_line_are_kept() -> None:
    text = (
        b'{"step": 1, "loss": null}\n{"step": 2, "lo\n{"step": 3, "loss": 2.5, "skipped": true}\n'
    )
    found = parse(text)
    assert found["step"].tolist() == [1, 3]
    assert np.isnan(found["loss"][0])
    assert found["loss"][1] == 2.5
    assert found["skipped"][1] == 1


@pytest.mark.parametrize(
    "text", [b"\x00\x00\n", b"garbage\n", b"[1]\n", b"null\n", b'{"step": 1}\nnull\n', b"{}\n"]
)
def test_lines_without_an_object_are_no_rows(text: bytes) -> None:
    assert set(parse(text)) <= {"step"}
    table = Table()
    table.extend(parse(text))
    assert list(table.column("step")) == ([1.0] if b"step" in text else [])


def test_a_column_that_ends_earlier_has_no_numbers_after() -> None:
    table = Table()
    table.extend({"step": np.arange(3.0), "skipped": np.ones(3)})
    table.extend({"step": np.arange(5000.0)})
    assert len(table.column("skipped")) == table.rows == 5003
    assert np.isnan(table.column("skipped")[3:]).all()


def test_files_are_not_judged_by_attributes_that_nfs_keeps_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines_path, beat_path = tmp_path / "0.jsonl", tmp_path / "0.heartbeat.json"
    lines_path.write_text(lines(1))
    beat_path.write_text('{"step": 1}')
    growing, beat = Growing(lines_path), JsonFile(beat_path)
    growing.read()
    beat.refresh()
    known = {path: path.stat() for path in (lines_path, beat_path)}
    lines_path.write_text(lines(1, 2))
    (tmp_path / "new").write_text('{"step": 2}')
    (tmp_path / "new").replace(beat_path)
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: known.get(path) or stat(path))
    assert growing.unread() == len(lines(2))
    assert beat.refresh()
    assert beat.value == {"step": 2}


def test_a_column_that_comes_later_has_no_numbers_before() -> None:
    table = Table()
    table.extend(parse(b'{"step": 1}\n'))
    table.extend(parse(b'{"step": 2, "mfu": 0.5}\n' * 3000))
    assert np.isnan(table.column("mfu")[0])
    assert table.column("mfu")[1:].tolist() == [0.5] * 3000


def test_json_that_is_not_whole_leaves_the_value_empty_until_it_is(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "plan.json")
    assert not file.refresh()
    file.path.write_text('{"steps": ')
    file.refresh()
    assert file.value == {}
    file.path.write_text('{"steps": 5}')
    assert file.refresh()
    assert file.value == {"steps": 5}
    assert not file.refresh()


def test_a_curve_keeps_its_peak_and_its_gap(tmp_path: Path) -> None:
    files = RunFiles(synthetic.write(tmp_path / "run", ranks=1, steps=5000))
    files.refresh()
    norms = files.metrics.column("grad_norm")
    norms[4000:4008] = np.nan
    norms[100] = np.inf
    curves = document(files)["curves"]
    series = curves["series"]["grad_norm"]
    assert len(curves["step"]) == len(series["mean"]) <= POINTS
    assert curves["step"][-1] == 5000
    assert max(value for value in series["high"] if value is not None) == 40.0  # one step's
    assert series["mean"].count(None) == 1
    assert bucket_size(5000) == 8


def test_numbers_are_rounded_to_digits_and_stay_short() -> None:
    values = np.array([[0.1 + 0.2, -1234567.8, 3e-9 / 7], [0.0, np.nan, -np.inf]])
    assert json.dumps(rounded(values)) == "[[0.3, -1234570.0, 4.28571e-10], [0.0, null, null]]"
    assert rounded(np.array([1795063708.3478315]), 13) == [1795063708.348]


def test_a_short_curve_is_every_step(tmp_path: Path) -> None:
    curves = read_document(synthetic.write(tmp_path / "run", ranks=1, steps=50))["curves"]
    assert curves["step"] == list(range(1, 51))
    assert curves["series"]["loss"]["low"] == []


def test_bins_hold_the_mean_of_their_steps_and_merge_in_pairs() -> None:
    bins = Bins(1)
    steps = np.arange(1, BINS + 1)
    times = np.stack([steps, 2 * steps, 0 * steps], 1).astype(float)
    bins.add(steps, times)
    bins.merge()
    means = bins.means()
    assert means[0].tolist() == [1.5, 3.0, 0.0]
    assert means[BINS // 2 - 1].tolist() == [BINS - 0.5, 2 * BINS - 1, 0.0]
    assert np.isnan(means[BINS // 2]).all()


def test_the_heat_map_of_growing_and_replaced_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"{rank}.jsonl").write_text(rank_lines(10, compute=1.0 + rank))
    times = RankTimes(tmp_path)
    times.refresh()
    heat = times.heat([0, 1])
    assert heat["step"] == list(range(11))
    assert heat["compute"] == [[1.0] * 10, [2.0] * 10]
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write(rank_lines(2 * BINS, compute=4.0, begin=11))
    times.refresh()
    heat = times.heat([0, 1])
    assert len(heat["step"]) - 1 <= BINS
    assert heat["step"][-1] == 2 * BINS + 10
    assert heat["compute"][1][-1] == 4.0
    assert heat["compute"][0][-1] is None
    (tmp_path / "new").write_text(rank_lines(5, compute=9.0))
    (tmp_path / "new").replace(tmp_path / "1.jsonl")
    times.refresh()
    assert times.heat([1])["compute"][0][0] == 9.0
    assert times.recent[1][:, 0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "name", ["ranks/1.heartbeat.json", "ranks/1.jsonl", "metrics.jsonl", "recipe.yaml", "data.json"]
)
@pytest.mark.parametrize("text", [b"", b"\x00\xff\n", b"[1]\n", b'{"ra'])
def test_a_spoilt_file_leaves_the_rest_of_the_document(
    tmp_path: Path, name: str, text: bytes
) -> None:
    run = synthetic.write(tmp_path / "run", ranks=2, steps=5)
    (run / name).write_bytes(text)
    found = read_document(run)
    assert [row["rank"] for row in found["ranks"]["rows"]] == [0, 1]


def test_a_run_that_goes_on_with_more_steps_is_shown_with_them(tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "run", ranks=1, steps=3, of_steps=120)
    files = RunFiles(run)
    files.refresh()
    assert files.steps == 120
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("steps: 120", "steps: 4000"))
    files.refresh()
    assert document(files)["run"]["progress"] == {"step": 3, "steps": 4000}


def test_a_vanished_directory_is_said(tmp_path: Path) -> None:
    files = RunFiles(synthetic.write(tmp_path / "run", ranks=1, steps=5))
    files.refresh()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(Vanished, match="no longer there"):
        files.refresh()


def test_a_directory_without_a_step_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": "failed", "created": 1.0, "ended": 3.0}')
    found = read_document(tmp_path)
    assert found["run"]["state"] == "failed"
    assert found["run"]["seconds"] == 2.0
    assert found["curves"]["step"] == []
    json.dumps(found, allow_nan=False)


def test_evaluations_after_the_step_of_a_resume_do_not_count(tmp_path: Path) -> None:
    events = [
        {"event": "started", "step": 0, "time": 1.0},
        {
            "event": "evaluation",
            "step": 5,
            "split": "validation",
            "scores": {"wer": 0.5},
            "time": 2,
        },
        {
            "event": "evaluation",
            "step": 9,
            "split": "validation",
            "scores": {"wer": 0.1},
            "time": 3,
        },
        {"event": "started", "step": 5, "time": 4.0},
    ]
    found = best(events)
    assert found is not None
    assert (found["step"], found["value"]) == (5, 0.5)


def test_the_line_of_a_run_in_the_list_needs_no_metrics_of_all_steps(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=20)
    facts = RunFacts(path)
    facts.refresh()
    assert facts.last["step"] == 20
    assert facts.steps == 40
    assert not hasattr(facts, "metrics")


@pytest.mark.serial
@pytest.mark.full
def test_64_ranks_and_100_000_steps_are_read_in_two_seconds(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=64, steps=100_000)
    begin = time.perf_counter()
    found = json.dumps(read_document(path))
    assert time.perf_counter() - begin < 2.0
    assert len(found) < 700_000
    assert found.count('"rank"') > 64


def test_a_block_of_nuls_longer_than_a_chunk_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", 64)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(1000) + b'\n{"step": 2}\n')
    growing = files.Growing(path)
    text = b"".join(text for _, text in growing.chunks())
    assert [found["step"] for found in files.documents(text)] == [1, 2]
