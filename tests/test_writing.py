"""Files of a run: who may read them, and what a planted link can do."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster import run_directory, writing
from muster.entrypoints.open_run import open_run
from muster.errors import LaunchError
from muster.observe.events import write_event
from muster.observe.observer import Observer
from muster.observe.results import STOP_FILE
from muster.recipe.load import load


def modes(folder: Path) -> dict[str, int]:
    """Of the folder and of all in it, by path; links have none."""
    found = [folder, *folder.rglob("*")]
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in found
        if not path.is_symlink()
    }


def wider(folder: Path, mode: int) -> dict[str, str]:
    """What is not as wide as asked."""
    return {
        name: oct(found)
        for name, found in modes(folder).items()
        if found != (mode if (folder / name).is_dir() else mode & 0o666)
    }


@pytest.fixture
def target(tmp_path) -> Path:
    """A file of the user's that nothing may touch."""
    path = tmp_path / "mine"
    path.write_text("precious")
    return path


@pytest.fixture
def run(tmp_path) -> run_directory.Run:
    return run_directory.create(tmp_path / "runs", "speech", {"plan.json": "{}"})


def test_a_run_directory_is_as_wide_as_asked(tmp_path):
    """In a process of its own: the umask belongs to all of its threads."""
    code = f"""
import os
from pathlib import Path
from muster import run_directory, writing
for umask in (0o000, 0o022, 0o077):
    for mode in ("private", "group", "umask"):
        os.umask(umask)
        run = run_directory.create(Path({str(tmp_path)!r}), "a", {{"plan.json": "{{}}"}}, f"{{mode}}-{{umask}}", mode)
        writing.keep_to(run.path)
        (run.path / "library").mkdir()
        (run.path / "library" / "x").write_text("")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for umask in (0o000, 0o022, 0o077):
        assert wider(tmp_path / f"private-{umask}", 0o700) == {}
        assert wider(tmp_path / f"group-{umask}", 0o750) == {}
    assert wider(tmp_path / "umask-18", 0o755) == {}
    assert wider(tmp_path / "umask-63", 0o700) == {}
    # What libraries make is never for everybody to write.
    assert wider(tmp_path / "umask-0", 0o777) == {"library": "0o775", "library/x": "0o664"}


def test_going_on_gives_a_run_the_mode_of_its_recipe(tmp_path, target):
    recipe = load("speech", [f"logging.dir={tmp_path}", "logging.mode=group"])
    run, claim, _ = open_run(recipe, 1, 1, None, "r")
    claim.close()
    assert wider(run.path, 0o750) == {}
    elsewhere = tmp_path / "large disk"
    elsewhere.mkdir(mode=0o755)
    (run.path / "checkpoints").symlink_to(elsewhere)
    run.update(state="finished")
    recipe = load("speech", [f"logging.dir={tmp_path}"])
    run, claim, _ = open_run(recipe, 1, 1, run, None)
    claim.close()
    assert wider(run.path, 0o700) == {}
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755, "a link was followed"
    (run.path / "events.jsonl").symlink_to(target)
    run.update(state="finished")
    with pytest.raises(LaunchError, match=r"events\.jsonl is a link, .* remove it"):
        open_run(recipe, 1, 1, run, None)


def test_a_file_is_no_wider_than_its_folder_and_than_the_umask_lets(tmp_path):
    before = os.umask(0o022)
    try:
        tmp_path.chmod(0o770)
        writing.write(tmp_path / "a", "x")
        os.umask(0o077)
        writing.write(tmp_path / "b", "x")
        assert writing.current_umask() == 0o077
    finally:
        os.umask(before)
    assert (modes(tmp_path)["a"], modes(tmp_path)["b"]) == (0o640, 0o600)


WRITERS = {
    "run.json": lambda run: run.update(state="running"),
    ".run.lock": lambda run: run.update(state="running"),
    ".owner.lock": lambda run: run.claim(),
    "alive": lambda run: writing.touch(run.path / "alive"),
    "events.jsonl": lambda run: write_event(run.path, "x"),
    "metrics.jsonl": lambda run: Observer(run.path, 0, every_steps=1, start=0).close(),
    STOP_FILE: lambda run: run_directory.stop(run, 0.0, now=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_place_of_a_file_of_the_run_does_not_reach_its_target(run, target, name):
    """A run directory may come from a stranger, in an archive."""
    run.update(state="finished")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(target)
    refused = False
    try:
        WRITERS[name](run)
    except OSError as error:
        refused = error.errno == errno.ELOOP
    assert refused or not (run.path / name).is_symlink()
    assert target.read_text() == "precious"


def test_the_temporary_name_cannot_be_guessed_and_is_never_taken_over(run, target, monkeypatch):
    seen = set()
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.add(Path(a).name), real(a, b)))
    for number in range(3):
        run.update(number=number)
    assert len(seen) == 3
    assert all(re.fullmatch(r"\.run\.json\.[0-9a-f]{16}\.part", name) for name in seen)
    monkeypatch.setattr("secrets.token_hex", lambda n: "guessed")
    (run.path / ".run.json.guessed.part").symlink_to(target)
    with pytest.raises(FileExistsError):
        run.update(number=4)
    assert target.read_text() == "precious"
    assert run.info()["number"] == 2


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    writing.write_json(path, [1])
    with pytest.raises(TypeError):
        writing.write_json(path, object())
    with pytest.raises(FileNotFoundError), writing.temporary(path) as part:
        part.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").unlink()
    assert path.read_text() == "[\n  1\n]\n"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_killed_writers_left_is_removed_when_the_run_starts_again(run):
    old, new = run.path / ".run.json.aaaa.part", run.path / "ranks" / ".0.error.json.bbbb.part"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 100, time.time() - 100))
    run.begin()
    assert not old.exists()
    assert new.exists(), "its writer may still be at work"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_latest_that_is_no_link_stays_and_a_run_is_made_all_the_same(tmp_path, caplog, kind):
    latest = tmp_path / "latest"
    if kind == "folder":
        latest.mkdir()
        (latest / "notes").write_text("precious")
    else:
        latest.write_text("precious")
    run = run_directory.create(tmp_path, "speech", {})
    assert run.state() == "starting"
    assert not latest.is_symlink()
    kept = latest / "notes" if kind == "folder" else latest
    assert kept.read_text() == "precious"
    assert "is no link of muster's and stays as it is" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
