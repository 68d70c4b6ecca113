"""Who failed first, and why: in logs of real torchrun runs, of other tools, and in runs of muster."""

from __future__ import annotations

import gzip
import io
import json
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

import tiny
from muster.cli.explain import explain as explain_command
from muster.diagnose.explain import (
    cause_and_cure,
    explain,
    explain_file,
    explain_run,
    explain_stream,
)
from muster.errors import MusterError
from muster.observe.results import complete_steps
from muster.run_directory import Run
from processes import muster, runs_module, start, until

LOGS = Path(__file__).with_name("logs")

RECORDED = [  # log, rank, host, signal, how its own words begin, the entry that explains it
    ("torchrun-nccl-oom", 2, "gpu-node-01", None, "OutOfMemoryError: CUDA", "cuda-out-of-memory"),
    ("torchrun-nccl-watchdog", 0, "gpu-node-01", None, "[Rank 0] Watchdog", "watchdog-timeout"),
    ("torchrun-nccl-duplicate-gpu", 0, "localhost", None, "DistBackendError", "duplicate-gpu"),
    ("torchrun-record-gloo", 1, "localhost", None, "ValueError: no label", None),
    ("torchrun-tee", 1, "localhost", None, "ValueError: vocabulary has 51", None),
    ("deepspeed-rank-killed", 1, None, "SIGKILL", None, "killed"),
    ("slurm-srun-label", 5, "node07", None, "OSError: [Errno 28]", "disk-full"),
    ("slurm-oom-kill", 2, "gcn14", "SIGKILL", None, "slurm-out-of-memory"),
    ("slurm-time-limit", None, None, None, "*** STEP 42221.0", "slurm-time-limit"),
    ("mpirun-segfault", 2, "compute-0-2.local", "SIGSEGV", None, "segmentation-fault"),
    ("kubernetes-oom-killed", None, None, "SIGKILL", None, "pod-out-of-memory"),
    ("nccl-infiniband", 4, "kp-ddp-worker-0", None, "NET/IB : Got completion", "ib-connection"),
    ("spawn-raises", 1, None, None, "ValueError: hidden size 510", None),
]


@pytest.mark.parametrize(
    ("log", "rank", "host", "killed_by", "words", "known"), RECORDED, ids=[r[0] for r in RECORDED]
)
def test_recorded_logs_name_the_first_failure_and_its_cause(
    log, rank, host, killed_by, words, known
):
    report = explain_file(LOGS / f"{log}.log")
    first = report.first
    assert first is not None
    assert (first.rank, first.host, first.signal) == (rank, host, killed_by)
    assert (first.message or "").startswith(words or "")
    assert bool(first.message) == bool(words)
    if known is None:
        assert report.cause is None  # honest: nothing known explains it
    else:
        assert report.known[0].known.id == known
        assert (report.cause, report.cure) == (
            report.known[0].known.cause,
            report.known[0].known.cure,
        )
    said = first.message.partition("\n")[0].partition(": ")[2] if first.message else ""
    assert first.line is not None
    assert said in (LOGS / f"{log}.log").read_text().splitlines()[first.line - 1]


@pytest.mark.parametrize("log", ["healthy-torchrun-nccl", "healthy-muster"])
def test_a_healthy_log_has_no_failure(log):
    report = explain_file(LOGS / f"{log}.log")
    assert report.first is None
    assert report.known == ()


SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: it first says what it has met
dist.init_process_group("gloo")
if os.environ["RANK"] == "1" and sys.argv[1] == "raise":
    raise LookupError("no row 7 in clips.parquet")
if os.environ["RANK"] == "1" and sys.argv[1] == "kill":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(2))
"""


def torchrun(folder: Path, *arguments: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    command = ["torchrun", "--nproc-per-node=2", *arguments]
    process = start(command, folder)
    said = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    return said


def test_torchrun_a_rank_that_raises_is_named_and_not_the_one_it_left_alone(tmp_path):
    report = explain(torchrun(tmp_path, "--standalone", "train.py", "raise"))
    assert report.first is not None
    assert report.first.rank == 1
    assert report.first.message == "LookupError: no row 7 in clips.parquet"
    assert report.cause is None
    assert "peer-gone" in [seen.known.id for seen in report.known]


@pytest.mark.full
def test_torchrun_a_killed_rank_is_named_with_its_signal(tmp_path):
    report = explain(torchrun(tmp_path, "--standalone", "train.py", "kill"))
    assert report.first is not None
    assert (report.first.rank, report.first.signal, report.first.exit_code) == (1, "SIGKILL", -9)
    assert report.known[0].known.id == "killed"
    assert "memory" in (report.cause or "")


def test_torchrun_a_busy_port_is_explained(tmp_path):
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        log = torchrun(tmp_path, f"--master-port={held.getsockname()[1]}", "train.py", "ok")
    report = explain(log)
    assert report.known[0].known.id == "address-in-use"
    assert report.cause == report.known[0].known.cause


def test_code_quoted_in_a_traceback_is_no_evidence():
    log = """[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 9, in <module>
[rank3]:     except RuntimeError as e: check(e, "CUDA out of memory")
[rank3]: KeyError: 'labels'
"""
    report = explain(log)
    assert report.first is not None
    assert (report.first.rank, report.first.message) == (3, "KeyError: 'labels'")
    assert report.known == ()


def test_a_rank_that_torchrun_saw_killed_comes_before_complaints_not_known_to_follow():
    log = """[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 9, in <module>
[rank0]: RuntimeError: the other half of the pipeline has not answered
Root Cause (first observed failure):
[0]:
  time      : 2026-11-16_03:57:44
  host      : node3
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 25777) (SIGKILL)
============================================================
"""
    first = explain(log).first
    assert first is not None
    assert (first.rank, first.host, first.signal) == (1, "node3", "SIGKILL")


def test_of_chained_exceptions_the_innermost_is_shown_and_the_outermost_explained():
    log = """Traceback (most recent call last):
  File "a.py", line 1, in get
socket.gaierror: [Errno -3] Temporary failure in name resolution

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
OSError: We couldn't connect to 'https://huggingface.co' to load the files.
"""
    report = explain(log)
    assert report.first is not None
    assert report.first.message == "gaierror: [Errno -3] Temporary failure in name resolution"
    assert report.first.chain[-1].startswith("OSError: We couldn't connect")
    assert report.known[0].known.id == "hub-unreachable"


def test_a_rank_of_a_logger_that_marks_only_the_first_line_of_a_traceback():
    log = """[Rank 2] Traceback (most recent call last):
  File "train.py", line 9, in <module>
    step()
ValueError: no voices
[Rank 0] step 12
"""
    first = explain(log).first
    assert first is not None
    assert (first.rank, first.message) == (2, "ValueError: no voices")


def test_an_error_behind_a_progress_bar_and_colours_is_found():
    log = " 24/1752 [01:08<2.88s/it]\r 25/1752 [01:09<2.88s/it][rank5]:\x1b[31m RuntimeError: No CUDA GPUs are available\x1b[0m"
    report = explain(log)
    assert report.first is not None
    assert report.first.rank == 5
    assert report.known[0].known.id == "no-gpus-visible"


class Endless(io.RawIOBase):
    """`blocks` of one healthy MiB each, then `last`; never in memory as a whole."""

    def __init__(self, line: bytes, blocks: int, last: bytes) -> None:
        self.block, self.left, self.last = line * ((1 << 20) // len(line)), blocks, last

    def read(self, size: int = -1) -> bytes:
        self.left -= 1
        if self.left >= 0:
            return self.block
        last, self.last = self.last, b""
        return last


@pytest.mark.guides
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            b"node1:41:43 [0] NCCL INFO Channel 07/0 : 6[6] -> 7[7] via P2P\n",
            marks=pytest.mark.full,
        ),
        b"no line end ",
    ],
)
def test_a_long_log_is_read_in_little_memory(line):
    end = b"\nValueError: the end\nTraceback (most recent call last):\n  File 'a'\nKeyError: 'z'\n"
    tracemalloc.start()
    try:
        report = explain_stream(Endless(line, 64, end), "pipe")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.first is not None
    assert report.first.message == "KeyError: 'z'"
    assert peak < 16 << 20, f"{peak >> 20} MiB for 64 MiB of log"


def test_words_of_one_error_have_a_cause_and_a_cure():
    assert "SIGKILL" in (cause_and_cure("exitcode: -9 (SIGKILL)") or ("", ""))[0]
    assert cause_and_cure("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert cause_and_cure("KeyError: 'labels'") is None


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory) -> Path:
    """A real run whose rank 1 was killed, with no restart allowed."""
    folder = tmp_path_factory.mktemp("killed")
    recipe = tiny.write(folder)
    words = [recipe, tiny.LONG, "distributed.max_restarts=0", "--gpus", "2", "--detach"]
    muster("train", *words, folder=folder)
    run = folder / "runs" / "latest"
    until((run / "metrics.jsonl").is_file)
    supervisor = psutil.Process(json.loads((run / "run.json").read_text())["pid"])
    ranks = [p for p in supervisor.children() if runs_module(p, "muster.worker")]
    max(ranks, key=lambda p: p.pid).kill()  # rank 1, which is started after rank 0
    until(lambda: json.loads((run / "run.json").read_text())["state"] == "failed")
    return run.resolve()


def test_a_run_of_muster_is_explained_from_its_folder(killed_run):
    report = explain_run(killed_run)
    assert report.first is not None
    assert (report.first.rank, report.first.signal, report.first.exit_code) == (1, "SIGKILL", -9)
    assert report.cause
    assert report.cure


@pytest.fixture(scope="module")
def survivor(tmp_path_factory) -> Path:
    """A real run whose rank 1 was killed after step 4 and that finished, from the checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("survivor")
    env = tiny.held_after(4, folder, folder / "go")
    words = ["checkpoint.every_steps=3", "training.steps=6", "--gpus", "2", "--detach"]
    muster("train", tiny.write(folder), *words, folder=folder, env=env)
    run = Run((folder / "runs" / "latest").resolve())
    until(lambda: run.last_metrics().get("step") == 4 and complete_steps(run.path) == [3])
    ranks = [p for p in run.processes() if runs_module(p, "muster.worker")]
    max(ranks, key=lambda p: p.pid).kill()
    until(lambda: "restarting" in (run.path / "events.jsonl").read_text())
    (folder / "go").touch()
    until(lambda: run.state() == "finished")
    return run.path


@pytest.mark.guides
def test_a_run_that_was_killed_and_went_on_says_so_and_nothing_else(survivor):
    (restart,) = explain_run(survivor).restarts
    assert (restart.kind, restart.step, restart.from_step) == ("restarted", 4, 3)
    said = " ".join(ask(str(survivor)).replace("│", "").split())
    assert "The run finished, after 1 restart:" in said
    assert "at step 4 rank 1 was killed by SIGKILL; went on from step 3" in said
    assert "likely cause" in said
    assert "o failure" not in said
    assert json.loads(ask(str(survivor), "--json"))["restarts"][0]["from_step"] == 3


def test_a_survived_kill_is_in_the_results_and_in_the_list_of_runs(survivor):
    results = Run(survivor).results()
    assert [(r["kind"], r["step"], r["from_step"]) for r in results["restarts"]] == [
        ("restarted", 4, 3)
    ]
    listed = muster("runs", folder=survivor.parent.parent, env={"COLUMNS": "80"}).stdout
    assert "│ finished  │" in listed
    assert "│ 1 restart │" in listed


def test_a_run_that_goes_on_has_not_failed_and_one_that_is_gone_is_not_blamed_on_an_old_kill(
    survivor,
):
    running = explain_run(survivor, "running")
    assert running.first is None
    gone = explain_run(survivor, "interrupted")
    assert gone.first is None
    assert gone.restarts


def run_folder(
    folder: Path, info: dict, errors: list[dict] = (), logs: dict[str, str] | None = None
):
    (folder / "ranks").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(info))
    for error in errors:
        (folder / "ranks" / f"{error['rank']}.error.json").write_text(json.dumps(error))
    for name, text in (logs or {}).items():
        (folder / name).write_text(text)
    return folder


def test_an_interrupted_run_is_explained_by_the_earliest_words_of_its_ranks(tmp_path):
    word = {"expected": False, "kind": "OSError", "message": "[Errno 28] No space left on device"}
    late = {"expected": False, "kind": "RuntimeError", "message": "Connection closed by peer"}
    errors = [{"rank": 0, "time": 9.0, **late}, {"rank": 1, "time": 5.0, **word}]
    report = explain_run(run_folder(tmp_path / "run", {"state": "interrupted"}, errors))
    assert report.first is not None
    assert (report.first.rank, report.first.location) == (1, "ranks/1.log")
    assert "no space left" in (report.cause or "")


def test_a_run_that_could_note_nothing_is_explained_from_its_logs(tmp_path):
    closed = "[Rank 0] Traceback (most recent call last):\n  File 'a'\nRuntimeError: Connection closed by peer\n"
    own = "[Rank 1] Traceback (most recent call last):\n  File 'a'\nKeyError: 'text'\n"
    logs = {"ranks/0.log": closed, "ranks/1.log": own}
    report = explain_run(run_folder(tmp_path / "run", {"state": "interrupted"}, logs=logs))
    assert report.first is not None
    assert (report.first.rank, report.first.message) == (1, "KeyError: 'text'")
    assert report.first.location == "ranks/1.log:3"


def test_a_sentence_meant_for_the_user_needs_no_other_cause(tmp_path):
    message = "data.train: clips has no column text; name it in data.text_column"
    error = {"rank": 0, "time": 1.0, "expected": True, "kind": "DataError", "message": message}
    failure = {"rank": 0, "exit_code": 1, "signal": None, "error": error}
    report = explain_run(run_folder(tmp_path / "run", {"state": "failed", "failure": failure}))
    assert report.first is not None
    assert report.first.sentence == f"Rank 0 failed first: {message}"
    assert report.cause == message


def test_a_stall_keeps_what_its_analysis_found(tmp_path):
    failure = {"rank": 1, "host": "b", "exit_code": 75, "signal": None, "error": None}
    failure |= {
        "what": "Rank 1 did not arrive in all_reduce.",
        "cause": None,
        "cure": "Look at it.",
    }
    failure |= {"hang": {"rank": 1}}
    report = explain_run(run_folder(tmp_path / "run", {"state": "failed", "failure": failure}))
    assert (report.cause, report.cure) == ("Rank 1 did not arrive in all_reduce.", "Look at it.")


def test_a_finished_run_has_no_failure(tmp_path):
    logs = {"ranks/0.log": "[Rank 0] RuntimeError: CUDA out of memory\n"}  # and it went on, smaller
    report = explain_run(run_folder(tmp_path / "run", {"state": "finished"}, logs=logs))
    assert report.first is None
    assert report.known[0].known.id == "cuda-out-of-memory"
    assert report.known[0].location == "ranks/0.log:1"
    said = ask(str(tmp_path / "run"))
    assert "The run finished, in spite of what its logs hold." in said
    assert "o failure" not in said


app = typer.Typer()
app.command()(explain_command)


def ask(*arguments: str, pipe: bytes | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=pipe, env={"COLUMNS": "100"})
    if result.exception:
        raise result.exception
    return result.output


def test_the_command_prints_a_panel_and_json(killed_run):
    log = LOGS / "torchrun-nccl-oom.log"
    shown = ask(str(log))
    assert "Rank 2 on gpu-node-01 failed first: OutOfMemoryError" in " ".join(shown.split())
    assert "likely cause" in shown
    assert "cure" in shown
    document = json.loads(ask(str(log), "--json"))
    assert document["first"]["rank"] == 2
    assert document["known"][0]["id"] == "cuda-out-of-memory"
    assert "Rank 2" in ask("-", pipe=log.read_bytes())
    by_name = ask("latest", "--dir", str(killed_run.parent))
    assert "Rank 1" in by_name
    assert "SIGKILL" in by_name


def test_an_unknown_error_is_called_unknown():
    assert "Not known" in ask(str(LOGS / "spawn-raises.log"))
    assert "No failure found" in ask(str(LOGS / "healthy-muster.log"))


def test_what_cannot_be_explained_is_refused_with_a_cure(tmp_path):
    (tmp_path / "empty.log").touch()
    (tmp_path / "core").write_bytes(b"\x7fELF" + bytes(5000))
    (tmp_path / "old.log.gz").write_bytes(gzip.compress(b"KeyError: 'a'"))
    refused = {
        "nowhere.log": "no log file of that name, and no run",
        str(tmp_path / "empty.log"): "is empty",
        str(tmp_path / "core"): "is a binary file",
        str(tmp_path / "old.log.gz"): "is compressed: zcat",
        str(tmp_path): "no log file of that name",
    }
    for target, words in refused.items():
        with pytest.raises(MusterError, match=words):
            ask(target, "--dir", str(tmp_path))


def test_explaining_a_log_needs_no_torch():
    script = (
        "import sys; from muster.cli.explain import explain; "
        f"explain({str(LOGS / 'torchrun-tee.log')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
