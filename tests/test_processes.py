"""A forked program is a program: its arguments, variables, folder, streams, exit code and children."""

from __future__ import annotations

import json
import os
import signal
import sys

import psutil
import pytest

from processes import python_path, run, start, until

LOOK = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "word": os.environ.get("WORD"), "path": sys.path[0],
    "parent": os.getppid(), "pid": os.getpid(), "threads": torch.get_num_threads(),
    "main": __name__, "home": os.environ.get("HOME"), "names": sorted(globals()),
    "said": sys.stdin.read(), "handler": str(signal.getsignal(signal.SIGTERM)),
}))
print("and an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "real",
    [
        pytest.param(False, id="forked"),
        pytest.param(True, id="new interpreter", marks=pytest.mark.guides),
    ],
)
def test_a_program_finds_what_it_was_given(tmp_path, real):
    script = tmp_path / "look.py"
    script.write_text("import signal, torch\n" + LOOK)
    (tmp_path / "elsewhere").mkdir()
    env = {"WORD": "it's \n $HOME", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, script, "a b", "--flag"]
    folder = tmp_path / "elsewhere"
    done = run(command, folder, code=7, stdin="told", env=env, real=real)
    found = json.loads(done.stdout)
    assert found["argv"] == [str(script), "a b", "--flag"]
    assert (found["folder"], found["path"]) == (str(folder), str(tmp_path))
    assert (found["word"], found["home"]) == (env["WORD"], os.environ.get("HOME"))
    assert (found["threads"], found["main"], found["said"]) == (2, "__main__", "told")
    assert found["handler"] == str(signal.SIG_DFL)
    own = [name for name in found["names"] if not name.startswith("__")]
    assert own == ["json", "os", "signal", "sys", "torch"]
    assert done.stderr == "and an error\n"


@pytest.mark.parametrize(
    "real",
    [
        pytest.param(False, id="forked"),
        pytest.param(True, id="new interpreter", marks=pytest.mark.guides),
    ],
)
def test_an_uncaught_error_is_shown_as_python_shows_it(tmp_path, real):
    (tmp_path / "fails.py").write_text("def inner():\n    1 / 0\n\n\ninner()\n")
    done = run([sys.executable, "fails.py"], tmp_path, code=1, real=real)
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert [line for line in done.stderr.splitlines() if 'File "' in line][1:] == [
        line for line in done.stderr.splitlines() if line.endswith("in inner")
    ]
    assert "fork_server" not in done.stderr


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time, sys; time.sleep(600)"])
print(child.pid, flush=True)
sys.exit(-child.wait())
"""


def test_what_a_program_starts_is_its_child_and_its_end_is_seen(tmp_path):
    parent = start([sys.executable, "-c", PARENT], tmp_path)
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.ppid() == parent.pid
    child.send_signal(signal.SIGTERM)
    assert parent.wait(60) == signal.SIGTERM
    assert not child.is_running()


def test_a_signal_ends_a_program_and_is_its_code(tmp_path):
    process = start([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"])
    process.stdout.readline()
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(process.pid))


def test_modules_of_a_parent_hold_no_state_for_its_children(tmp_path):
    """A supervisor forks its ranks; a new interpreter would know nothing of what it did."""
    code = "import muster.errors as e; print(hasattr(e, 'mark')); e.mark = 1\n"
    again = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"
    done = run([sys.executable, "-c", f"{code}{again}"], tmp_path)
    assert done.stdout.split() == ["False", "False"]


def test_a_sitecustomize_is_run_in_every_process(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.planted = sys.orig_argv[-1]")
    code = "import sys; print(sys.planted, flush=True)"
    nested = f"{code}\nimport subprocess; subprocess.run([sys.executable, '-c', {code!r}, 'b'])"
    done = run([sys.executable, "-c", nested, "a"], tmp_path, env=python_path(tmp_path))
    assert done.stdout.split() == ["a", "b"]


def test_a_child_does_not_clean_up_after_its_parent(tmp_path):
    code = """
import os, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    print(os.path.isdir(folder))
"""
    assert run([sys.executable, "-c", code], tmp_path).stdout == "True\n"


def test_processes_of_multiprocessing_are_children_that_import_nothing_again(tmp_path):
    code = """
import os, torch, torch.multiprocessing as mp
def child(rank, parent):
    print(rank, parent == os.getppid(), hasattr(torch, "planted"), flush=True)
if __name__ == "__main__":
    torch.planted = True
    mp.spawn(child, (os.getpid(),), 1)
"""
    (tmp_path / "spawns.py").write_text(code)
    assert run([sys.executable, "spawns.py"], tmp_path).stdout == "0 True True\n"
