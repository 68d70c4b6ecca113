"""Inside a SLURM job, on its first node: start the tasks, forward signals, requeue the job.

    python -m muster.launch.slurm_job RUN_DIR srun …

SLURM signals in two ways. Before the time limit this process gets SIGUSR1, and forwards it to srun.
At a preemption the tasks get SIGTERM, and this process gets no signal. Either way the run saves at
its next step and ends as `stopped`; unless a user asked for that, the job is requeued.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from muster.launch import slurm
from muster.observe.results import STOP_FILE, complete_steps
from muster.observe.shapes import ERROR_REPORTS
from muster.page import report
from muster.recipe.load import from_resolved
from muster.run_directory import Run
from muster.writing import keep_to


def main(folder: str, *command: str) -> int:
    run, number = Run(Path(folder)), os.environ["SLURM_JOB_ID"]
    keep_to(run.path)
    again = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    if again and asked_by_user(run):
        run.update(state="stopped", ended=time.time(), exit_code=0)
        return 0
    run.own()
    run.begin(slurm_job=number)
    log = run.path / f"slurm-{number}.log"  # of earlier starts too
    offset = log.stat().st_size if log.is_file() else 0
    before, signals = complete_steps(run.path), list[int]()
    code = run_tasks(run, command, signals)
    progressed = complete_steps(run.path)[-1:] > before[-1:]
    text = log.read_bytes()[offset:].decode(errors="replace") if log.is_file() else ""
    code = finish(run, number, code, bool(signals), progressed, text)
    report.write_at_end(run)
    return code


def asked_by_user(run: Run) -> bool:
    return (run.path / STOP_FILE).exists() and not run.signalled()


def run_tasks(run: Run, command: tuple[str, ...], signals: list[int]) -> int:
    """Run srun until it ends, and forward signals to it: srun sends them to all tasks."""
    srun = subprocess.Popen(command)
    run.keep_alive()

    def forward(number: int, _: object) -> None:
        signals.append(number)
        srun.send_signal(signal.SIGUSR1)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, forward)
    while True:
        try:
            return srun.wait(5.0)
        except subprocess.TimeoutExpired:
            continue


def finish(run: Run, number: str, code: int, signalled: bool, progressed: bool, log: str) -> int:
    """Requeue the job or record how the run ended; returns the job's exit code."""
    info = run.info()
    facts = slurm.job_facts(number)
    preempted = facts.get("PreemptTime", "None") != "None"
    interrupted = signalled or preempted or info["state"] == "stopped"
    wanted = info["state"] != "finished" and not asked_by_user(run)
    if facts.get("JobState", "RUNNING") not in ("RUNNING", "SIGNALING"):
        return code  # SLURM itself ends it, or requeues it
    if wanted and any(
        '"StartAgain"' in p.read_text() for p in run.path.glob(f"ranks/{ERROR_REPORTS}")
    ):
        return queue_again(
            run, number
        )  # ranks that srun started have no supervisor to restart them
    if interrupted and wanted and from_resolved(run.path / "recipe.yaml").slurm.requeue:
        if preempted or progressed:
            return queue_again(run, number)
        slurm.note_failure(
            run, number, "signalled to stop before it had saved a step; raise slurm.time"
        )
    elif info["state"] not in ("finished", "stopped"):
        _record_failure(run, code, number, log)
    return int(run.info().get("exit_code") or 0)


def queue_again(run: Run, number: str) -> int:
    print(f"requeueing job {number}; the run resumes from its last checkpoint", flush=True)
    before = run.info()
    run.update(state="queued", failure=None, ended=None, exit_code=None)
    answer = slurm.ask("scontrol", "requeue", number)
    if answer.returncode == 0:
        return 0
    print(f"SLURM does not requeue it: {answer.stderr.strip()}", file=sys.stderr, flush=True)
    run.update(**{key: before.get(key) for key in ("state", "failure", "ended", "exit_code")})
    return 1


def _record_failure(run: Run, code: int, number: str, log: str) -> None:
    """Ranks that srun started have no supervisor: by srun's log, else by their error reports."""
    from muster.launch import failure

    info = run.info()
    killed = (
        first_killed(log) if from_resolved(run.path / "recipe.yaml").slurm.tasks == "gpu" else {}
    )
    if info["state"] == "failed" and not killed:
        return  # a rank, or a supervisor, has recorded it already
    if killed or any((run.path / "ranks").glob(ERROR_REPORTS)):
        found = failure.collect(run.path, killed, int(info.get("ranks") or 1))
        run.update(state="failed", failure=found, ended=time.time(), exit_code=1)
    else:
        slurm.note_failure(run, number, f"srun ended with exit code {code} before the run did")


def first_killed(log: str) -> dict[int, int]:
    """The task that srun named first, with its signal as an exit code below 0; none if it ended by
    itself. srun kills the others then, and they report a lost connection before."""
    found = re.search(r"^srun: error: \S+ tasks? (\d+)[^:]*: (.+)", log, re.MULTILINE)
    numbers = {signal.strsignal(number): number for number in signal.Signals}
    return {int(found[1]): -numbers[found[2]]} if found and found[2] in numbers else {}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
