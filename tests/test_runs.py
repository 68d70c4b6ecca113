"""The run directory: made, found, judged alive or gone, cleared away."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from muster import runs
from muster.errors import MusterError


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def made(root: Path, name: str = "speech", state: str = "finished", **info) -> runs.Run:
    run = runs.create(root, name, {})
    run.update(state=state, **info)
    return run


def test_a_new_run_has_its_documents_and_is_the_latest(root):
    run = runs.create(root, "speech", {"recipe.yaml": "name: speech\n"})
    assert run.path.parent == root
    assert time.strftime("speech-%Y%m%d-") in run.name
    assert (run.path / "recipe.yaml").read_text() == "name: speech\n"
    assert (run.path / "ranks").is_dir()
    assert run.state() == "starting"
    assert abs(run.info()["created"] - time.time()) < 10
    assert (root / "latest").resolve() == run.path.resolve()
    assert os.readlink(root / "latest") == run.name, "a relative link survives a move"
    newer = runs.create(root, "speech", {})
    assert newer.path != run.path
    assert (root / "latest").resolve() == newer.path.resolve()
    assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []


def test_runs_of_the_same_second_get_folders_of_their_own(root, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20250101-000000")
    names = [runs.create(root, "a", {}).name for _ in range(3)]
    assert names == ["a-20250101-000000", "a-20250101-000000-2", "a-20250101-000000-3"]


@pytest.mark.parametrize("where", ["a file", "/proc"])
def test_a_place_where_no_run_can_be_made_names_the_key(tmp_path, where):
    root = Path(where)
    if where == "a file":
        root = tmp_path / "file"
        root.touch()
    with pytest.raises(MusterError, match=rf"^logging\.dir: cannot make a run in {root} \("):
        runs.create(root, "speech", {})


def test_a_run_is_found_by_folder_by_name_and_as_latest(root, monkeypatch):
    run, other = made(root, "one"), made(root, "two")
    assert runs.find(str(run.path)) == runs.Run(run.path.resolve())
    assert runs.find(run.name, root).name == run.name
    assert runs.find("latest", root).name == other.name
    monkeypatch.chdir(root.parent)
    assert runs.find(run.name).path == run.path.resolve()
    assert runs.find(f"runs/{run.name}").path == run.path.resolve()


def test_a_run_that_is_not_there_names_those_that_are(root):
    with pytest.raises(MusterError, match=r"no run 'x'; newest in .*: none"):
        runs.find("x", root)
    names = [made(root, f"n{i}").name for i in range(7)]
    with pytest.raises(MusterError) as error:
        runs.find("x", root)
    assert f"{names[6]}, {names[5]}, {names[4]}, {names[3]}, {names[2]}" in str(error.value)
    assert names[1] not in str(error.value)


def test_every_run_newest_first_without_links_and_strangers(root):
    old, new = made(root, "b"), made(root, "a")
    old.update(created=100.0)
    (root / "notes").mkdir()
    assert runs.every(root) == [new, old]
    assert runs.every(root / "none") == []


def test_updates_keep_what_they_do_not_touch(root):
    run = made(root, ranks=4)
    run.update(state="failed", exit_code=1)
    info = run.info()
    assert (info["ranks"], info["state"], info["exit_code"]) == (4, "failed", 1)


@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_run_whose_process_lives_is_what_it_says(root, state):
    run = made(root, state=state)
    run.own()
    assert run.state() == state
    run.own(os.getppid())
    assert run.state() == state
    assert run.info()["pid"] == os.getppid()


def test_a_run_whose_process_is_gone_is_interrupted(root, gone):
    run = made(root, state="running")
    run.update(pid=gone)
    assert run.state() == "interrupted"


def test_a_recycled_process_id_does_not_count(root):
    run = made(root, state="running")
    run.own()
    run.update(pid_created=psutil.Process().create_time() - 60)
    assert run.state() == "interrupted"


def test_a_process_nobody_has_buried_yet_does_not_count(root):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = made(root, state="running")
    run.own(process.pid)
    assert run.state() == "running"
    process.stdin.close()
    limit = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert run.state() == "interrupted"
    process.wait()


def test_a_start_that_failed_does_not_look_alive_for_ever(root, gone):
    code = f"from pathlib import Path; from muster import runs; runs.create(Path({str(root)!r}), 'a', {{}})"
    subprocess.run([sys.executable, "-c", code], check=True)
    (run,) = runs.every(root)
    assert run.info()["state"] == "starting"
    assert run.state() == "interrupted"


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_an_ended_run_stays_ended_without_its_process(root, gone, state):
    run = made(root, state=state)
    run.update(pid=gone)
    assert run.state() == state


def test_a_process_on_another_machine_is_believed(root, gone):
    run = made(root, state="running", pid=gone, host="elsewhere")
    assert run.state() == "running"


def test_a_damaged_run_file_is_no_stack_trace(root):
    run = made(root)
    (run.path / "run.json").write_text("{")
    assert run.info() == {}
    assert run.state() == "interrupted"
    assert runs.every(root) == [run]


def test_cleaning_takes_ended_and_interrupted_runs_and_never_living_ones(root, gone):
    finished, failed = made(root, "a"), made(root, "b", "failed")
    running, starting = made(root, "c", "running"), made(root, "d", "starting")
    interrupted = made(root, "e", "running")
    interrupted.update(pid=gone)
    assert runs.clean(root) == [interrupted, failed, finished]
    assert runs.clean(root, keep=1) == [failed, finished]
    assert runs.clean(root, keep=4) == [finished]
    assert runs.clean(root, keep=9) == []
    assert running.path.is_dir()
    assert starting.path.is_dir()


@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_living_run_is_never_removed(root, state):
    run = made(root, state=state)
    with pytest.raises(MusterError, match=f"still {state}; stop it first"):
        runs.remove(run)
    assert run.path.is_dir()


def test_removing_the_latest_points_to_the_newest_left(root):
    first, second, third = made(root, "a"), made(root, "b"), made(root, "c")
    runs.remove(first)
    assert (root / "latest").resolve() == third.path.resolve()
    runs.remove(third)
    assert not third.path.exists()
    assert (root / "latest").resolve() == second.path.resolve()
    runs.remove(second)
    assert list(root.iterdir()) == []


def test_the_last_line_of_metrics_and_the_results_are_read(root):
    run = made(root)
    assert run.last_metrics() == {}
    assert run.results() is None
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    (run.path / "training_results.json").write_text(json.dumps({"status": "finished"}))
    assert run.last_metrics() == {"step": 2}
    assert run.results() == {"status": "finished"}
