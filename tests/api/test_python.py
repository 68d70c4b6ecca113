"""The Python API: the manual's page and notebook as they stand, and what they do not show."""

from __future__ import annotations

import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import muster
import processes
from muster import run_directory
from muster.cli import app
from muster.errors import LaunchError
from muster.recipe.load import load
from muster.recipe.overrides import as_texts, parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def examples() -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> tuple[Path, list[str]]:
    """The page's examples as one script, in the folder where it ran, and what it printed."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "script.py").write_text(examples())
    done = processes.run([sys.executable, "script.py"], folder)
    return folder, done.stdout.splitlines()


@pytest.mark.guides
def test_the_examples_of_the_page_do_what_it_says(page):
    lines = page[1]
    assert lines[0].startswith("training.learning: no such key")
    assert lines[1] == "finished 8 finished"
    assert re.fullmatch(r"perplexity (4 step-4|8 step-8)", lines[2])
    assert lines[3] == "asked stopped"
    assert lines[4] == "['stopped', 'finished']"
    assert lines[5].startswith("4 [")
    assert lines[5].endswith("False")
    assert "transcribing needs speech-ctc or speech-seq2seq" in lines[6]
    assert lines[7].startswith("2 ['distributed.strategy=")
    assert lines[8].startswith(("True fit to train on", "False not fit"))


def test_the_page_names_the_whole_public_api():
    text = PAGE.read_text()
    assert [name for name in muster.__all__ if f"muster.{name}" not in text] == []
    for prefix, kind in (("run", muster.Run), ("loaded", muster.Loaded)):
        public = [name for name in vars(kind) if not name.startswith("_")]
        assert [name for name in public if f"{prefix}.{name}" not in text] == []


@pytest.mark.guides
def test_the_command_line_and_python_give_the_same_runs(page):
    folder, _ = page
    found = muster.runs(folder / "runs")
    shown = CliRunner().invoke(app, ["runs", "--dir", str(folder / "runs")], env={"COLUMNS": "200"})
    names = [line.split("│")[1].strip() for line in shown.stdout.splitlines() if "small-" in line]
    assert names == [run.name for run in found]
    assert muster.Run("latest", folder / "runs") == found[0]


@pytest.mark.guides
def test_the_command_line_and_python_give_the_same_plan():
    shown = CliRunner().invoke(app, ["plan", "gpt-micro", "--gpu", "cpu", "--gpus", "2", "--json"])
    assert json.loads(shown.stdout) == json.loads(
        json.dumps(muster.plan("gpt-micro", gpu="cpu", gpus=2))
    )


@pytest.mark.guides
def test_a_run_in_a_notebook_shows_its_state_and_curves(page):
    run = muster.runs(page[0] / "runs")[-1]
    shown = run._repr_html_()
    assert f"<b>{run.name}</b>: finished, step 8, loss {run.last['loss']:.4f}" in shown
    for words in ("<svg", ">loss<", ">perplexity<", ">validation<"):
        assert words in shown
    assert "#222222" not in shown  # ink takes the page's colour, light or dark
    assert "currentColor" in shown


@pytest.mark.guides
def test_the_notebook_runs_and_its_outputs_are_of_such_a_run(tmp_path):
    out = tmp_path / "out.ipynb"
    tool = ROOT / "tools" / "run_notebook.py"
    processes.run([sys.executable, tool, NOTEBOOK, "--to", out], tmp_path)
    stored, found = (json.loads(path.read_text())["cells"] for path in (NOTEBOOK, out))
    assert [_kinds(cell) for cell in stored] == [_kinds(cell) for cell in found]
    assert ["text/html", "text/plain"] in [kind for cell in found for kind in _kinds(cell)]
    assert not re.search(r"/(home|tmp|work|root)\b", NOTEBOOK.read_text())


def _kinds(cell: dict) -> list[list[str]]:
    return [sorted(output.get("data", ["stdout"])) for output in cell.get("outputs", [])]


WITHOUT_TORCH = """
import sys
import muster
run = muster.train(RECIPE, {"training.steps": 100000}, gpus=1)
assert muster.runs() == [run] and run.state in ("starting", "running"), run
run.stop(now=True)
assert run.state == "stopped"
run._repr_html_()
assert "torch" not in sys.modules
"""


@pytest.mark.guides
def test_starting_and_stopping_a_run_imports_no_torch(recipe, tmp_path):
    script = WITHOUT_TORCH.replace("RECIPE", repr(str(recipe)))
    processes.run([sys.executable, "-c", script], tmp_path, real=True)


WAITING = """
import os, signal, sys, threading, time, traceback
import psutil
import muster
run = muster.train(RECIPE, {"training": {"steps": 100000}, "distributed.max_restarts": 0}, gpus=1)
while not run.last:
    time.sleep(0.05)
def press_ctrl_c():
    # while the run is waited for
    here, main = os.path.dirname(muster.__file__), threading.main_thread().ident
    def place(frame):
        return frame.name, frame.filename.startswith(here), (frame.line or "").partition("(")[0]
    while ("wait", True, "time.sleep") not in map(place, traceback.extract_stack(sys._current_frames()[main])):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press_ctrl_c, daemon=True).start()
try:
    run.wait()
except KeyboardInterrupt as error:
    print(error.__notes__[0])
print(run.state)
supervisor = psutil.Process(run.info["pid"])
for process in supervisor.children(recursive=True):
    if "muster.worker" in " ".join(process.cmdline()):
        process.kill()
try:
    run.wait(120)
except muster.MusterError as error:
    print(error)
"""


@pytest.mark.guides
def test_ctrl_c_ends_the_waiting_and_a_failure_is_raised_in_words(recipe, tmp_path):
    script = WAITING.replace("RECIPE", repr(str(recipe)))
    said = processes.run([sys.executable, "-c", script], tmp_path).stdout.splitlines()
    assert "goes on; muster.Run(" in said[0]
    assert said[1] == "running"
    assert re.search(r" failed: Rank 0 was killed by SIGKILL", said[2])
    assert any(line.startswith("what to do: ") for line in said)


def test_inside_torchrun_it_is_refused_before_a_run_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(LaunchError, match=r"has started 2 already, and this is rank 1"):
        muster.train("gpt-micro")
    with pytest.raises(LaunchError, match=r"muster.check starts the ranks itself"):
        muster.check()
    assert not (tmp_path / "runs").exists()


def _evaluated(root: Path, *scores: dict[str, float], split: str = "validation") -> muster.Run:
    folder = run_directory.create(root, "made", {})
    lines = [
        {"time": 0, "event": "evaluation", "step": 10 * i, "split": split, "scores": each}
        for i, each in enumerate(scores, 1)
    ]
    (folder.path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return muster.Run(folder.path)


def test_the_best_evaluation_is_by_the_tasks_own_score(tmp_path):
    words = _evaluated(
        tmp_path, {"wer": 0.5, "cer": 0.1}, {"wer": 0.3, "cer": 0.2}, {"wer": 0.4, "cer": 0}
    )
    assert words.best == muster.Best(20, "validation", "wer", 0.3, None)
    saved = words.path / "checkpoints" / "step-20"
    saved.mkdir(parents=True)
    assert words.best.checkpoint is None  # not whole
    (saved / "manifest.json").write_text("{}")
    assert words.best.checkpoint == saved
    images = _evaluated(tmp_path, {"loss": 1.0, "accuracy": 0.9}, {"loss": 0.5, "accuracy": 0.8})
    assert (images.best.step, images.best.name, images.best.score) == (10, "accuracy", 0.9)
    recall = _evaluated(tmp_path, {"loss": 1.0, "recall": 0.9}, {"loss": 0.5, "recall": 0.8})
    lines = [e | {"metric": "recall", "better": "max"} for e in recall.events()]
    (recall.path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    assert (recall.best.step, recall.best.name) == (10, "recall")
    listed = CliRunner().invoke(app, ["runs", "--dir", str(tmp_path)], env={"COLUMNS": "200"})
    assert re.search(rf"{words.name} .* 30\.00% at 20 +│", listed.output)
    assert re.search(rf"{images.name} .* 90\.00% at 10 \(not kept\) +│", listed.output)
    assert _evaluated(tmp_path).best is None
    assert _evaluated(tmp_path, {"harmony": 1.0}).best is None


def test_waiting_has_a_limit_and_says_what_became_of_a_run(tmp_path):
    folder = run_directory.create(tmp_path, "made", {})
    run = muster.Run(folder.path)
    assert run.results is None
    with pytest.raises(TimeoutError, match="is still starting after"):
        run.wait(0.1)
    folder.update(pid_started=-1)  # its process id is another's by now
    with pytest.raises(muster.MusterError, match="was interrupted: its process is gone"):
        run.wait()
    folder.update(state="stopped")
    assert run.wait() is run
    with pytest.raises(muster.MusterError, match="is not running: it is stopped"):
        run.stop()
    with pytest.raises(muster.MusterError, match="no log of rank 3; ranks with a log: none yet"):
        run.log(3)


def test_no_module_has_the_name_of_a_public_function():
    """Importing it would put the module in the function's place."""
    modules = {module.name for module in pkgutil.iter_modules(muster.__path__)}
    assert modules & set(muster.__all__) == set()
    assert sorted(muster._HOMES) == muster.__all__
    for name in muster.__all__:
        assert getattr(muster, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = muster.trian


TEXTS = [
    "a",
    "5",
    "it's",
    "a b",
    "C:\\x\\",
    "\\'",
    "true",
    "",
    "a,b",
    "[x]",
    "x=y",
    "é",
    "1e-3",
    "null",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_in_a_dict_of_overrides_stays_the_same_text(text):
    (override,) = as_texts({"name": text})
    assert parse(override) == ("name", text, False)


def test_a_dict_is_a_recipe_and_overrides_may_be_nested():
    recipe = load(
        {"defaults": ["gpt-micro"], "training": {"steps": 7}, "data": {"train": Path("a b")}},
        as_texts({"training": {"betas": (0.8, 0.9), "lr": 0.5}, "evaluation.every_steps": None}),
    )
    assert (recipe.training.steps, recipe.training.lr, recipe.training.betas) == (
        7,
        0.5,
        (0.8, 0.9),
    )
    assert (recipe.data.train, recipe.data.sequence_length) == ("a b", 256)
    with pytest.raises(muster.RecipeError, match="no such recipe; nearest is gpt-micro"):
        load({"defaults": ["gpt-micor"]})
    with pytest.raises(muster.RecipeError, match=r"expected a list: \['training.steps=1'\]"):
        as_texts("training.steps=1")
