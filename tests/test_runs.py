"""The run directory: made, found, judged alive or gone, cleared away."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from muster import run_directory
from muster.entrypoints.open_run import await_lost_owner, existing_run, open_run
from muster.errors import LaunchError, MusterError
from muster.observe.results import STOP_FILE
from muster.recipe.load import load
from processes import lives, until


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def made(root: Path, name: str = "speech", state: str = "finished", **info) -> run_directory.Run:
    run = run_directory.create(root, name, {})
    run.update(state=state, **info)
    return run


def test_a_new_run_has_its_documents_and_is_the_latest(root):
    before = time.time()
    run = run_directory.create(root, "speech", {"recipe.yaml": "name: speech\n"})
    assert run.path.parent == root
    assert time.strftime("speech-%Y%m%d-") in run.name
    assert (run.path / "recipe.yaml").read_text() == "name: speech\n"
    assert (run.path / "ranks").is_dir()
    assert run.state() == "starting"
    assert before <= run.info()["created"] <= time.time()
    assert (root / "latest").resolve() == run.path.resolve()
    assert os.readlink(root / "latest") == run.name, "a relative link survives a move"
    newer = run_directory.create(root, "speech", {})
    assert newer.path != run.path
    assert (root / "latest").resolve() == newer.path.resolve()
    assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []


def test_runs_of_the_same_second_get_folders_of_their_own(root, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20250101-000000")
    names = [run_directory.create(root, "a", {}).name for _ in range(3)]
    assert names == ["a-20250101-000000", "a-20250101-000000-2", "a-20250101-000000-3"]


@pytest.mark.parametrize("where", ["a file", "/proc"])
def test_a_place_where_no_run_can_be_made_names_the_key(tmp_path, where):
    root = Path(where)
    if where == "a file":
        root = tmp_path / "file"
        root.touch()
    with pytest.raises(MusterError, match=rf"^logging\.dir: cannot make a run in {root} \("):
        run_directory.create(root, "speech", {})


@pytest.mark.parametrize(
    "name",
    [
        *("../../escape", "..", ".", "", "/tmp/escape", "a/b", "a\\b", "a/", ".hidden", "-v"),
        *("a\n", "a\0b", "a b", "~", "a\u2215b", "a\uff0fb", "\u0430", "latest"),
    ],
)
def test_a_name_that_leads_out_of_the_folder_of_runs_is_refused(tmp_path, name):
    recipe = load("gpt-micro", [f"logging.dir={tmp_path / 'work' / 'runs'}"])
    with pytest.raises(
        MusterError, match=r"^--run: .* cannot be the name of a run; .*logging\.dir"
    ):
        open_run(recipe, 1, 1, None, name)
    with pytest.raises(MusterError, match="--run"):
        run_directory.create(tmp_path / "work" / "runs", "a", {}, exact=name)
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_name_is_a_folder_of_runs(tmp_path):
    assert (
        run_directory.create(tmp_path, "a", {}, exact="Mine-1.2_b").path == tmp_path / "Mine-1.2_b"
    )


def test_a_run_is_found_by_folder_by_name_and_as_latest(root, monkeypatch):
    run, other = made(root, "one"), made(root, "two")
    assert run_directory.find(str(run.path)) == run_directory.Run(run.path.resolve())
    assert run_directory.find(run.name, root).name == run.name
    assert run_directory.find("latest", root).name == other.name
    monkeypatch.chdir(root.parent)
    assert run_directory.find(run.name).path == run.path.resolve()
    assert run_directory.find(f"runs/{run.name}").path == run.path.resolve()


def test_a_run_that_is_not_there_names_those_that_are(root):
    with pytest.raises(MusterError, match=r"no run 'x'; newest in .*: none"):
        run_directory.find("x", root)
    names = [made(root, f"n{i}").name for i in range(7)]
    with pytest.raises(MusterError) as error:
        run_directory.find("x", root)
    assert f"{names[6]}, {names[5]}, {names[4]}, {names[3]}, {names[2]}" in str(error.value)
    assert names[1] not in str(error.value)


def test_a_mistyped_run_names_the_nearest(root):
    name = made(root, "speech").name
    made(root, "images")
    for text in ("speech", name[:-1], name.replace("speech", "spech")):
        with pytest.raises(MusterError, match=f"no run '{text}'; did you mean {name}[,?]"):
            run_directory.find(text, root)


def test_every_run_newest_first_without_links_and_strangers(root):
    old, new = made(root, "b"), made(root, "a")
    old.update(created=100.0)
    (root / "notes").mkdir()
    assert run_directory.every(root) == [new, old]
    assert run_directory.every(root / "none") == []


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
    run.update(pid_started=run.info()["pid_started"] - 60)
    assert run.state() == "interrupted"


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_an_owner_elsewhere_is_judged_by_whether_its_signs_go_on_and_not_by_its_clock(
    root, monkeypatch, ahead_s
):
    monkeypatch.setattr(run_directory, "STALE_S", 1.0)
    run = made(root, state="running", host="elsewhere", owned=0.0)
    ended = threading.Event()

    def sign() -> None:
        moment = time.time() + ahead_s
        (run.path / "alive").touch()
        os.utime(run.path / "alive", (moment, moment))

    def live() -> None:
        while not ended.wait(0.1):
            sign()

    sign()
    owner = threading.Thread(target=live)
    owner.start()
    try:
        await_lost_owner(str(run.path))
        with pytest.raises(LaunchError, match="is still running"):
            existing_run(str(run.path))
    finally:
        ended.set()
        owner.join()
    await_lost_owner(str(run.path))
    assert existing_run(str(run.path)) == run
    assert run.state() == "interrupted"


def test_a_machine_that_was_started_again_leaves_its_runs_interrupted(root):
    """Even where the same process id, started at the same tick, is there again."""
    run = made(root, state="running")
    run.own()
    (run.path / "alive").touch()
    assert run.state() == "running"
    run.update(boot="another")
    assert run.state() == "interrupted"


def test_a_process_that_was_gone_when_it_was_noted_does_not_live(root, gone):
    run = made(root, state="running")
    run.own(gone)
    assert run.state() == "interrupted"


def test_a_process_nobody_has_buried_yet_does_not_count(root):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = made(root, state="running")
    run.own(process.pid)
    assert run.state() == "running"
    process.stdin.close()
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert run.state() == "interrupted"
    process.wait()


def test_an_ended_run_is_left_when_its_owner_has_written_the_last_file(root):
    """Which is the report: who copies the run after `muster train` finds nothing half-written."""
    run = made(root, state="finished")
    code = "import sys, time; time.sleep(0.4); open(sys.argv[1], 'w').write('whole')"
    with subprocess.Popen([sys.executable, "-c", code, run.path / "report.html"]) as owner:
        run.own(owner.pid)
        run.wait_for_owner()
        assert (run.path / "report.html").read_text() == "whole"


def test_an_owner_that_stays_is_not_waited_for_without_end(root):
    run = made(root, state="finished")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        run.own(owner.pid)
        run.wait_for_owner(within_s=0.2)
        assert owner.poll() is None
        owner.stdin.close()
    run.own()
    run.wait_for_owner(within_s=60)  # this process


def test_a_start_that_failed_does_not_look_alive_for_ever(root, gone):
    code = f"from pathlib import Path; from muster import run_directory; run_directory.create(Path({str(root)!r}), 'a', {{}})"
    subprocess.run([sys.executable, "-c", code], check=True)
    (run,) = run_directory.every(root)
    assert run.info()["state"] == "starting"
    assert run.state() == "interrupted"


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_an_ended_run_stays_ended_without_its_process(root, gone, state):
    run = made(root, state=state)
    run.update(pid=gone)
    assert run.state() == state


@pytest.mark.parametrize("where", [{"host": "elsewhere", "boot": "b"}, {"pids": "pid:[1]"}])
def test_a_run_of_another_machine_or_container_lives_while_it_shows_signs_of_life(
    root, gone, where
):
    run = made(root, state="running", pid=gone, **where)
    old = time.time() - run_directory.STALE_S - 1
    assert run.state() == "running", "it was taken over a moment ago"
    run.update(owned=old)
    assert run.state() == "interrupted"
    (run.path / "alive").touch()
    assert run.state() == "running"
    os.utime(run.path / "alive", (old, old))
    assert run.state() == "interrupted"


def test_a_queued_run_has_no_process_and_is_not_removed(root, gone):
    run = made(root, state="queued", pid=gone)
    assert run.state() == "queued"
    assert run_directory.clean(root) == []
    with pytest.raises(MusterError, match="still queued"):
        run_directory.remove(run)


WRITER = """
import sys
from pathlib import Path
from muster.run_directory import Run
for i in range(60):
    Run(Path(sys.argv[1])).update(**{f"{sys.argv[2]}-{i}": i})
"""


def test_writers_at_the_same_time_lose_nothing_of_each_other(root):
    run = made(root)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(run.path), name]) for name in "abcd"
    ]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    info = run.info()
    assert [name for name in "abcd" for i in range(60) if info.get(f"{name}-{i}") != i] == []


def test_a_damaged_run_file_is_no_stack_trace(root):
    run = made(root)
    (run.path / "run.json").write_text("{")
    assert run.info() == {}
    assert run.state() == "interrupted"
    assert run_directory.every(root) == [run]


def test_cleaning_takes_ended_and_interrupted_runs_and_never_living_ones(root, gone):
    finished, failed = made(root, "a"), made(root, "b", "failed")
    running, starting = made(root, "c", "running"), made(root, "d", "starting")
    interrupted = made(root, "e", "running")
    interrupted.update(pid=gone)
    assert run_directory.clean(root) == [interrupted, failed, finished]
    assert run_directory.clean(root, keep=1) == [failed, finished]
    assert run_directory.clean(root, keep=4) == [finished]
    assert run_directory.clean(root, keep=9) == []
    assert running.path.is_dir()
    assert starting.path.is_dir()


@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_living_run_is_never_removed(root, state):
    run = made(root, state=state)
    with pytest.raises(MusterError, match=f"still {state}; stop it first"):
        run_directory.remove(run)
    assert run.path.is_dir()


def test_removing_the_latest_points_to_the_newest_left(root):
    first, second, third = made(root, "a"), made(root, "b"), made(root, "c")
    run_directory.remove(first)
    assert (root / "latest").resolve() == third.path.resolve()
    run_directory.remove(third)
    assert not third.path.exists()
    assert (root / "latest").resolve() == second.path.resolve()
    run_directory.remove(second)
    assert list(root.iterdir()) == []


def test_the_last_line_of_metrics_and_the_results_are_read(root):
    run = made(root)
    assert run.last_metrics() == {}
    assert run.results() is None
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    (run.path / "training_results.json").write_text(json.dumps({"status": "finished"}))
    assert run.last_metrics() == {"step": 2}
    assert run.results() == {"status": "finished"}


def test_of_long_metrics_only_the_end_is_read(root):
    run = made(root)
    with (run.path / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
        file.write('{"step": 20000, "lo\n')
    before = psutil.Process().io_counters().read_chars
    assert run.last_metrics() == {"step": 19_999, "loss": 1.0}
    assert psutil.Process().io_counters().read_chars - before < 50_000


STUBBORN = """
import signal, subprocess, sys, time
from pathlib import Path
from muster.run_directory import Run
run, kind = Run(Path(sys.argv[1])), sys.argv[2]
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
run.own()
run.update(state="running", child=child.pid)
while kind != "obedient" or not (run.path / "stop-requested").exists():
    time.sleep(0.02)
child.kill()
run.update(state="stopped")
"""


@pytest.fixture
def started(root):
    """Stands for a run: `obedient` ones end when asked, others on SIGTERM, `deaf` ones on neither."""
    processes = []

    def start(kind: str) -> run_directory.Run:
        run = made(root, state="starting")
        process = subprocess.Popen([sys.executable, "-c", STUBBORN, str(run.path), kind])
        processes.append(process)
        while "child" not in run.info():
            time.sleep(0.02)
        return run

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for_ends(ending: list[psutil.Process], timeout: float) -> None:
    """In place of psutil's: killed processes are given the time that they need."""
    until(lambda: not any(lives(process.pid) for process in ending))


@pytest.mark.parametrize(
    ("kind", "now", "how", "code"),
    [
        ("obedient", False, "asked", None),
        ("busy", False, "terminated", 143),
        ("deaf", False, "killed", 137),
        ("obedient", True, "terminated", 143),
    ],
)
def test_stopping_asks_then_tells_then_kills(started, monkeypatch, kind, now, how, code):
    """It waits in vain only where it is to, however late a process comes to its turn."""
    patience, in_vain = 90.0, 0.5
    monkeypatch.setattr(run_directory, "GRACE_S", in_vain if kind == "deaf" else patience)
    monkeypatch.setattr(run_directory.psutil, "wait_procs", wait_for_ends)
    run = started(kind)
    first, child = run.processes()
    assert child.pid == run.info()["child"]
    asked = patience if kind == "obedient" else in_vain
    assert run_directory.stop(run, asked, now=now) == how
    assert run.state() == "stopped"
    assert run.info().get("exit_code") == code
    assert (run.path / "stop-requested").exists() is not now
    until(lambda: not lives(first.pid) and not lives(child.pid))


def test_a_run_of_another_host_is_asked_but_never_signalled(root, gone):
    run = made(root, state="running", host="elsewhere", pid=os.getpid())
    with pytest.raises(MusterError, match="processes are on elsewhere"):
        run_directory.stop(run, 0.1)
    assert (run.path / "stop-requested").exists()
    assert run.processes() == []


def test_a_run_has_one_owner_at_a_time(tmp_path):
    run = run_directory.create(tmp_path, "speech", {})
    words = rf"by process {os.getpid()} on .*`muster stop`"
    with run.claim(), pytest.raises(LaunchError, match=words):
        run_directory.Run(run.path).claim()
    run_directory.Run(run.path).claim().close()


def test_the_owner_of_a_run_that_has_ended_may_take_a_moment_to_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "GRACE_S", 90.0)
    run = run_directory.create(tmp_path, "speech", {})
    claim = run.claim()
    run.update(state="finished")
    threading.Timer(0.3, claim.close).start()
    run.claim().close()


def test_the_latest_run_is_one_to_go_on_with(tmp_path, monkeypatch):
    from muster.entrypoints.open_run import existing_run

    monkeypatch.chdir(tmp_path)
    assert existing_run("latest") is None
    made = run_directory.create(Path("runs"), "a", {})
    made.update(state="stopped")
    found = existing_run("latest")
    assert found is not None
    assert found.path == made.path.resolve()


def test_what_could_not_be_read_is_not_lost(root, monkeypatch):
    run = run_directory.create(root, "a", {"recipe.yaml": "name: a\n"})
    before = (run.path / "run.json").read_bytes()

    def stale(path, **options):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(run_directory.json_file, "read", stale)
    assert run.info() == {}
    with pytest.raises(OSError, match="Stale file handle"):
        run.update(state="running")
    assert (run.path / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "[" * 500 + "]" * 500,
        '{"created": "x", "owned": [], "pid": {}, "state": "running"}',
    ],
)
def test_a_run_json_of_another_kind_takes_no_list_of_runs_away(root, text):
    good = run_directory.create(root, "good", {"recipe.yaml": "name: good\n"})
    odd = run_directory.create(root, "odd", {"recipe.yaml": "name: odd\n"})
    (odd.path / "run.json").write_text(text)
    assert {run.name for run in run_directory.every(root)} == {good.name, odd.name}
    assert odd.state() in ("unknown", "interrupted")


def test_links_and_pipes_at_any_depth_are_refused_but_a_moved_folder_of_checkpoints(root, tmp_path):
    run = run_directory.create(root, "a", {"recipe.yaml": "name: a\n"})
    (tmp_path / "elsewhere").mkdir()
    (run.path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (run.path / "profile").mkdir()
    run.refuse_links()
    (run.path / "profile" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=r"profile/checkpoints is a link"):
        run.refuse_links()
    (run.path / "profile" / "checkpoints").unlink()
    os.mkfifo(run.path / "events.jsonl")
    with pytest.raises(LaunchError, match=r"events\.jsonl is a pipe"):
        run.refuse_links()


def test_a_run_that_says_nothing_of_itself_begins(root):
    run = made(root)
    (run.path / "run.json").write_text("{}")
    (run.path / "events.jsonl").write_text("")
    (run.path / STOP_FILE).write_bytes(b"\xff\xfe")
    assert not run.signalled()
    run.begin()
    assert run.info()["state"] == "starting"
    (run.path / STOP_FILE).write_text("SIGTERM")
    assert run.signalled()


def test_the_time_between_two_starts_is_not_time_in_which_a_run_ran(root):
    run, now = made(root), time.time()
    run.update(created=now - 1000.0, begun=now - 1000.0, ended=now - 900.0, state="stopped")
    run.begin()
    assert run.ran_s(run.info(), time.time() + 7.0) == pytest.approx(107.0, abs=1.0)
    run.update(begun=now - 50.0)  # killed, and alive until now
    (run.path / run_directory.ALIVE_FILE).touch()
    assert run.ran_s(run.info()) == pytest.approx(150.0, abs=1.0)
    run.begin()
    assert run.ran_s(run.info(), time.time()) == pytest.approx(150.0, abs=1.0)
    run.update(begun=now - 800.0)
    os.utime(run.path / run_directory.ALIVE_FILE, (now - 790.0, now - 790.0))
    run.update(state="queued")
    run.update(state="stopped", ended=now)  # cancelled in a queue, where it was not alive
    alive = run_directory.ALIVE_EVERY_S  # and up to as long after its last sign of life
    assert run.ran_s(run.info()) == pytest.approx(160.0 + alive, abs=1.0)
    run.update(ended=now - 787.0)
    assert run.ran_s(run.info()) == pytest.approx(163.0, abs=1.0)
