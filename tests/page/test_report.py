"""The report of a run: one file that needs nothing else, written whenever a run ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from muster import run_directory
from muster.cli import app
from muster.errors import MusterError
from muster.launch import local
from muster.launch.process import run_ownership
from muster.page import report
from muster.page.live import LiveRuns
from muster.recipe.schema import Logging
from muster.run_directory import Run
from page import synthetic
from processes import lives, muster, python_path, until

NO_OPTIMIZER = """
import sys
if "muster.worker" in sys.orig_argv:
    import torch
    def step(*args, **kwargs):
        raise RuntimeError("this optimizer is out of order")
    torch.optim.AdamW.step = step
"""
NASTY = "</script><script>alert(1)</script><!-- \u2028 &amp;"


def embedded(text: str) -> dict:
    found = re.search(r'<script id="documents" type="application/json">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def test_the_file_names_no_other_file_and_no_address(tmp_path):
    run = synthetic.write(tmp_path / "speech", ranks=2, steps=20)
    report.write([run], tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text()
    outside = [
        address
        for address in re.findall(r'(?:src|href)="([^"]*)"', text)
        if not address.startswith(("data:", "#"))
    ]
    assert outside == []
    assert "default-src 'none'" in text
    assert embedded(text)["runs"][0]["run"]["name"] == "speech"


def test_the_slow_rank_of_a_run_that_has_ended_is_named(tmp_path):
    run = synthetic.write(tmp_path / "speech", ranks=4, steps=100, slow=1, state="finished")
    report.write([run], tmp_path / "one.html")
    document = embedded((tmp_path / "one.html").read_text())["runs"][0]
    assert document["findings"][0]["text"].startswith("Rank 1 on node-0 computes")
    states = [row["state"] for row in document["ranks"]["rows"]]
    assert states == ["ended", "slow", "ended", "ended"]


def test_words_of_a_run_cannot_end_the_script_that_holds_them():
    text = report.render({"runs": [], "comparisons": [], "audio": {}, "words": NASTY})
    assert embedded(text)["words"] == NASTY
    assert "alert(1)" not in re.sub(r'<script id="documents".*?</script>', "", text, flags=re.S)


def test_recordings_are_inside_while_they_fit(tmp_path, monkeypatch):
    (tmp_path / "mistakes").mkdir()
    for name in range(3):
        (tmp_path / "mistakes" / f"{name}.flac").write_bytes(bytes(2000))
    monkeypatch.setattr(report, "AUDIO_BYTES", 5000)
    mistakes = [{"id": str(name), "audio": True} for name in range(3)]
    document = {"run": {"name": "speech"}, "examples": {"mistakes": mistakes}}
    kept = report.recordings([tmp_path], [document])["speech"]
    assert list(kept) == ["0", "1"]
    assert kept["0"].startswith("data:audio/flac;base64,")


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "events.jsonl", "metrics.jsonl", "ranks", "ranks/0.jsonl", "run.json"]
)
def test_nothing_outside_the_run_gets_into_its_report(tmp_path, name):
    run = synthetic.write(tmp_path / "run", ranks=1, steps=5, state="finished")
    outside = tmp_path / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    report.write([run], tmp_path / "report.html")
    after = embedded((tmp_path / "report.html").read_text())["runs"][0]
    parts = {
        "recipe.yaml": after["told"]["recipe"],
        "events.jsonl": after["evaluations"],
        "metrics.jsonl": after["curves"]["series"],
        "ranks": after["heat"]["step"][1:],
        "ranks/0.jsonl": after["heat"]["step"][1:],
        "run.json": after["run"]["created"],
    }
    assert not parts[name]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    run = synthetic.write(tmp_path / "speech", ranks=1, steps=5)
    (tmp_path / "file").write_text("")
    with pytest.raises(MusterError, match=r"file/one\.html: the report cannot be written"):
        report.write([run], tmp_path / "file" / "one.html")


def test_a_report_that_fails_is_one_warning_and_not_a_failed_run(tmp_path, caplog):
    run = Run(synthetic.write(tmp_path / "speech", ranks=1, steps=5, state="finished"))
    (run.path / report.REPORT).mkdir()
    report.write_at_end(run)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert [path.name for path in run.path.glob(".report*")] == []


def test_a_run_that_waits_to_go_on_has_no_report_yet(tmp_path):
    run = Run(synthetic.write(tmp_path / "speech", ranks=1, steps=5, state="queued"))
    report.write_at_end(run)
    assert not (run.path / report.REPORT).exists()


def test_a_folder_whose_name_is_no_text_is_shown(tmp_path):
    run = synthetic.write(tmp_path / os.fsdecode(b"speech-\xff"), ranks=1, steps=5)
    report.write([run], tmp_path / "one.html")
    assert "speech-?" in (tmp_path / "one.html").read_text()
    LiveRuns(tmp_path).list().whole().encode()


@pytest.mark.parametrize("supervised", [True, False])
def test_a_run_can_have_its_next_owner_while_its_report_is_written(
    tmp_path, monkeypatch, supervised
):
    run, claims = Run(synthetic.write(tmp_path / "speech", ranks=1, steps=5)), []
    monkeypatch.setattr(run_directory, "GRACE_S", 0.2)
    monkeypatch.setattr(report, "write_at_end", lambda run: claims.append(run.claim()))

    def train(*args):
        run.update(state="finished")
        return 0

    if supervised:
        monkeypatch.setattr(local, "set_up", lambda name: None)
        monkeypatch.setattr(local, "_supervise", train)
        assert local.main([str(run.path), "1"]) == 0
    else:
        run.update(state="finished")
        with run_ownership(run, run.claim(), 1):
            train()
    (claim,) = claims
    claim.close()


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory):
    """A run that finished, one that failed, and one without a report."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "sitecustomize.py").write_text(NO_OPTIMIZER)
    for name, words, code in (
        ("good", ["logging.report=true"], 0),
        ("bad", ["logging.report=true"], 1),
        ("quiet", [], 0),  # the recipe of these tests turns it off
    ):
        words = ["training.steps=3", "--run", name, *words]
        variables = python_path(folder) if code else {}
        muster("train", recipe, *words, folder=folder, code=code, env=variables)
        owner = run_directory.find(name, folder / "runs").info()["pid"]
        until(lambda owner=owner: not lives(owner))  # it writes the report last
    return folder / "runs"


@pytest.mark.guides
def test_a_run_that_finished_left_its_report(runs):
    assert Logging().report  # where nothing is said
    run = run_directory.find("good", runs)
    document = embedded((run.path / report.REPORT).read_text())["runs"][0]
    assert document["run"]["state"] == "finished"
    assert document["curves"]["step"] == [1, 2, 3]


def test_a_run_that_failed_left_its_report(runs):
    run = run_directory.find("bad", runs)
    document = embedded((run.path / report.REPORT).read_text())["runs"][0]
    assert document["run"]["state"] == "failed"
    assert "out of order" in document["run"]["words"]


def test_a_key_turns_the_report_off(runs):
    assert run_directory.find("quiet", runs).state() == "finished"
    assert not (runs / "quiet" / report.REPORT).exists()


def test_the_command_writes_runs_by_name_into_one_file(tmp_path):
    for name, lr in (("a", 1e-3), ("b", 1e-4)):
        synthetic.write(tmp_path / name, ranks=1, steps=10, state="finished", lr=lr)
    words = ["report", "a", "b", "--dir", str(tmp_path), "-o", str(tmp_path / "out" / "ab.html")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    document = embedded((tmp_path / "out" / "ab.html").read_text())
    assert [part["run"]["name"] for part in document["runs"]] == ["a", "b"]
    (comparison,) = document["comparisons"]
    assert [row["key"] for row in comparison["recipe"]] == ["training.lr"]


def test_more_runs_than_a_chart_can_show_are_refused(tmp_path):
    with pytest.raises(MusterError, match="4 runs at most, not 5"):
        report.write([tmp_path] * 5, tmp_path / "report.html")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_run_cannot_name_what_every_object_of_the_page_has():
    script = """
    const vm = require("vm"), page = vm.createContext({});
    vm.runInContext(require("fs").readFileSync(0, "utf8"), page);
    const found = '[named("constructor"), UNITS.constructor || 0, STATES.toString || 0, named("wer")]';
    console.log(JSON.stringify(vm.runInContext(found, page)));
    """
    told = subprocess.run(
        ["node", "-e", script], input=report.asset("dom.js"), capture_output=True, text=True
    )
    assert json.loads(told.stdout) == ["Constructor", 0, 0, "Word error rate"], told.stderr
