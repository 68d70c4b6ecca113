"""Trackers: what each is sent, what a resumed run sends again, and that none can hold up a run."""

import json
import logging
import math
import threading
import time
from pathlib import Path

import pytest

from muster.errors import RecipeError
from muster.observe.trackers import Tracker, TrackerRun, Trackers
from muster.observe.trackers import sender as sender_module
from muster.observe.trackers import sent as sent_module
from muster.observe.trackers import trackers as trackers_module
from muster.observe.trackers.named import BUILT_IN, refuse_missing
from muster.recipe.load import from_resolved, load, to_yaml
from processes import until

RECIPE = {"name": "small", "training": {"lr": 1e-3, "steps": 6}, "logging": {"to": ["x"]}}
OWN = '''
import json
import muster

class Lines(muster.Tracker):
    """Every call as a line of a file."""

    def start(self, run):
        self.file = open(run.folder / "calls.jsonl", "a", buffering=1)
        self._write("start", run.name, run.id, run.step, run.recipe["name"])
        return run.id or "first"

    def metrics(self, step, values):
        self._write("metrics", step, values)

    def evaluation(self, step, split, scores):
        self._write("evaluation", step, split, scores)

    def text(self, step, name, text):
        self._write("text", step, name, text)

    def finish(self, status):
        self._write("finish", status)

    def _write(self, *what):
        print(json.dumps(what), file=self.file)
'''


@pytest.fixture
def quick(monkeypatch):
    """Threads that call their tracker fifty times a second."""
    monkeypatch.setattr(sender_module, "EVERY_S", 0.02)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.py"
    path.write_text(OWN)
    return f"{path}:Lines"


def line(step: int, **changes) -> dict:
    return {"step": step, "time": 1.8e9, "epoch": 0, "loss": 1 / step, "lr": 1e-3, **changes}


def calls(folder) -> list[list]:
    return [json.loads(text) for text in (folder / "calls.jsonl").read_text().splitlines()]


def train(names, folder, steps, *, start=0, status="finished") -> Trackers:
    made = Trackers(names, folder, RECIPE, start)
    for step in steps:
        made.metrics(step, "train", line(step))
    made.close(status)
    return made


def use(monkeypatch, kind: type[Tracker], name: str = "wandb") -> None:
    """`kind` in place of a tracker of muster's own."""
    module = __import__(__name__)
    monkeypatch.setattr(module, "Substitute", kind, raising=False)
    monkeypatch.setitem(BUILT_IN, name, (__name__, "Substitute"))


def test_a_tracker_of_ones_own_gets_every_value_in_order(tmp_path, lines):
    folder = tmp_path / "small-1"
    folder.mkdir()
    made = Trackers([lines], folder, RECIPE, 0)
    made.metrics(1, "train", line(1, skipped=True, loss=None, grad_norm=math.inf))
    made.metrics(2, "train", line(2))
    made.evaluation(2, "validation", {"wer": 0.5, "words": 12, "word_insertions": 2}, ["a", "b"])
    made.close()
    assert calls(folder) == [
        ["start", "small-1", None, 0, "small"],
        ["metrics", 1, {"train/epoch": 0, "train/lr": 1e-3}],
        ["metrics", 2, {"train/epoch": 0, "train/loss": 0.5, "train/lr": 1e-3}],
        ["evaluation", 2, "validation", {"wer": 0.5}],
        ["text", 2, "validation/remarks", "a\nb"],
        ["finish", "finished"],
    ]


def test_a_resumed_run_goes_on_with_its_id_and_repeats_no_step(tmp_path, lines):
    made = Trackers([lines], tmp_path, RECIPE, 0)
    for step in range(1, 6):
        made.metrics(step, "train", line(step))
    made.evaluation(4, "validation", {"wer": 0.5})
    made.close("failed")
    (tmp_path / "calls.jsonl").unlink()

    made = Trackers([lines], tmp_path, RECIPE, 3)
    for step in range(4, 8):
        made.metrics(step, "train", line(step))
        if step % 2 == 0:
            made.evaluation(step, "validation", {"wer": 1 / step})
    made.close()
    first, *rest, last = calls(tmp_path)
    assert first[2:4] == ["first", 3]
    assert [(c[0], c[1]) for c in rest] == [("metrics", 6), ("evaluation", 6), ("metrics", 7)]
    assert last == ["finish", "finished"]


def test_values_are_noted_as_sent_before_they_are(tmp_path, monkeypatch, quick):
    """Else a run killed in between would send them twice."""
    noted = []

    class Reads(Tracker):
        def start(self, run):
            return None

        def metrics(self, step, values):
            noted.append(json.loads((tmp_path / "trackers.json").read_text())["wandb"]["steps"])

    use(monkeypatch, Reads)
    train(["wandb"], tmp_path, [1, 2])
    assert [n["train"] for n in noted] in ([2, 2], [1, 2])


def test_a_tracker_that_hangs_neither_slows_training_nor_its_end(tmp_path, monkeypatch, caplog):
    begun, never = threading.Event(), threading.Event()

    class Hangs(Tracker):
        def start(self, run):
            return None

        def metrics(self, step, values):
            begun.set()
            never.wait()

    use(monkeypatch, Hangs)
    monkeypatch.setattr(sender_module, "EVERY_S", 0.02)
    monkeypatch.setattr(sender_module, "QUEUE", 100)
    made = Trackers(["wandb"], tmp_path, RECIPE, 0)
    made.metrics(1, "train", line(1))
    assert begun.wait(10)
    before = time.thread_time()
    for step in range(2, 10_002):
        made.metrics(step, "train", {"loss": 1.0})
    assert time.thread_time() - before < 0.5
    began = time.monotonic()
    made.close(limit_s=0.3)
    assert 0.25 < time.monotonic() - began < 3
    never.set()
    (record,) = caplog.records
    assert record.message == (
        "logging.to: wandb did not get all of 10001 points: 9900 came while its queue was full, it did "
        "not end within 0.3 s, with 100 in its queue"
    )


def test_a_tracker_that_fails_is_told_once_and_counted_at_the_end(
    tmp_path, monkeypatch, caplog, quick
):
    class Fails(Tracker):
        def start(self, run):
            return None

        def metrics(self, step, values):
            if step != 3:
                raise ConnectionError("no route\nto host")

        def finish(self, status):
            raise SystemExit(2)

    use(monkeypatch, Fails)
    train(["wandb"], tmp_path, range(1, 6))
    assert [r.message for r in caplog.records] == [
        "logging.to: wandb failed, and the run goes on: ConnectionError: no route to host",
        "logging.to: wandb did not get all of 5 points: 4 failed (last error: SystemExit: 2)",
    ]


def test_a_disk_that_is_full_for_a_while_loses_those_points_alone(
    tmp_path, monkeypatch, caplog, quick, lines
):
    made = Trackers([lines], tmp_path, RECIPE, 0)
    until(lambda: (tmp_path / "trackers.json").exists())
    full = threading.Event()

    def write_json(path, document):
        full.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sent_module, "write_json", write_json)
        made.metrics(1, "train", line(1))
        assert full.wait(10)
        until(lambda: "No space left" in caplog.text)
    made.metrics(2, "train", line(2))
    made.close()
    assert [call[1] for call in calls(tmp_path) if call[0] == "metrics"] == [2]
    assert "lines.py:Lines did not get all of 2 points: 1 failed" in caplog.text


def test_a_tracker_that_cannot_start_leaves_the_others_alone(tmp_path, caplog, lines):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    train([f"{broken}:X", f"{lines}x", lines], tmp_path, [1, 2])
    told = sorted(r.message for r in caplog.records if r.levelno >= logging.WARNING)
    assert told == [
        "logging.to: broken.py:X could not start, and the run goes on without it: ModuleNotFoundError: "
        "No module named 'no_such_package'",
        f"logging.to: lines.py:Linesx could not start, and the run goes on without it: RecipeError: "
        f"logging.to: {tmp_path}/lines.py has no class Linesx",
    ]
    assert [c[1] for c in calls(tmp_path) if c[0] == "metrics"] == [1, 2]


def test_a_tracker_that_hangs_in_its_start_does_not_hold_up_the_end(tmp_path, monkeypatch, caplog):
    never = threading.Event()

    class Hangs(Tracker):
        def start(self, run):
            never.wait()

    use(monkeypatch, Hangs)
    made = Trackers(["wandb"], tmp_path, RECIPE, 0)
    made.metrics(1, "train", line(1))
    made.close(limit_s=0.1)
    never.set()
    assert "did not end within 0.1 s, with 1 in its queue" in caplog.text


def test_a_run_that_failed_waits_less_for_its_trackers(tmp_path, monkeypatch, caplog):
    never = threading.Event()

    class Hangs(Tracker):
        def start(self, run):
            never.wait(30)

    use(monkeypatch, Hangs)
    monkeypatch.setattr(trackers_module, "FAILED_S", 0.1)
    Trackers(["wandb"], tmp_path, RECIPE, 0).close("failed")
    never.set()
    assert "it did not end within 0.1 s" in caplog.text


def test_recipes_name_trackers_and_older_ones_say_it_in_their_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "name: x\ntask: causal-lm\ntraining: {steps: 1}\n"
    (tmp_path / "lines.py").write_text(OWN)
    (tmp_path / "mine.yaml").write_text(base + "logging: {to: [mlflow, 'lines.py:Lines']}\n")
    assert load("gpt-micro").logging.to == ["tensorboard"]
    assert load("mine.yaml").logging.to == ["mlflow", f"{tmp_path}/lines.py:Lines"]
    assert load("mine.yaml", ["logging.tensorboard=false"]).logging.to == []
    assert load("gpt-micro", ["logging.tensorboard=true"]).logging.to == ["tensorboard"]
    old = to_yaml(load("gpt-micro")).replace("to: [tensorboard]", "tensorboard: false")
    (tmp_path / "recipe.yaml").write_text(old)
    assert from_resolved(tmp_path / "recipe.yaml").logging.to == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[wandbb]", "logging.to: got [wandbb], expected a list of tensorboard, wandb, mlflow"),
        ("wandb", "logging.to: got 'wandb', expected a list of tensorboard, wandb, mlflow"),
        ("[wandb,wandb]", "logging.to: wandb is there twice; name it once"),
        ("[gone.py:X]", "logging.to: no file gone.py in "),
    ],
)
def test_wrong_names_are_answered(given, said):
    with pytest.raises(RecipeError) as caught:
        load("gpt-micro", [f"logging.to={given}"])
    assert str(caught.value).startswith(said)


def test_a_tracker_whose_package_is_missing_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        refuse_missing(["wandb", "x.py:Y"])
    assert str(caught.value) == (
        "logging.to: wandb is not installed; pip install 'muster-train[wandb]', or leave it out"
    )


def test_a_class_that_its_file_does_not_name_is_refused(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("class Own: ...")
    refuse_missing([f"{file}:Own"])
    with pytest.raises(RecipeError, match=rf"logging.to: {file} has no class Wrong"):
        refuse_missing([f"{file}:Wrong"])


def test_the_tracker_of_the_manual_is_the_file_beside_it_and_works(tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    example = docs / "examples" / "line_tracker.py"
    assert f"```python\n{example.read_text()}```" in (docs / "trackers.md").read_text()
    train([f"{example}:Lines"], tmp_path, [1, 2])
    written = [json.loads(text) for text in (tmp_path / "lines.txt").read_text().splitlines()]
    assert [(one["step"], one["train/loss"]) for one in written] == [(1, 1.0), (2, 0.5)]
    ids = json.loads((tmp_path / "trackers.json").read_text())
    assert ids["line_tracker.py:Lines"]["id"] == tmp_path.name


def test_dotted_keys_of_the_recipe():
    run = TrackerRun("r", None, {"a": {"b": {"c": 1}, "d": {}}, "e": [1]}, 0)
    assert run.flat_recipe() == {"a.b.c": 1, "a.d": {}, "e": [1]}
