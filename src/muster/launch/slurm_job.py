"""Inside a SLURM job, on its first node: start the tasks, pass warnings on, decide what comes next.

    python -m muster.launch.slurm_job RUN_DIR srun …

SLURM warns in two ways. Before the time limit this process gets SIGUSR1, and hands it to srun. At a
preemption it is the tasks that get SIGTERM, and this process hears nothing. Either way the run saves
at its next step and ends as `stopped`; unless a user asked for that, the job is queued again.
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
from muster.launch.local import clear_last_words
from muster.observe.results import STOP_FILE, complete_steps
from muster.recipe.load import from_resolved
from muster.runs import Run


def main(folder: str, *command: str) -> int:
    run, number = Run(Path(folder)), os.environ["SLURM_JOB_ID"]
    again = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    if again and asked_by_user(run):
        run.update(state="stopped", ended=time.time(), exit_code=0)
        return 0
    (run.path / STOP_FILE).unlink(missing_ok=True)
    clear_last_words(run.path)
    run.own()
    run.update(state="starting", slurm_job=number)
    log = run.path / f"slurm-{number}.log"  # of earlier starts too
    said = log.stat().st_size if log.is_file() else 0
    before, warnings = complete_steps(run.path), list[int]()
    code = attend(run, command, warnings)
    got_on = complete_steps(run.path)[-1:] > before[-1:]
    words = log.read_bytes()[said:].decode(errors="replace") if log.is_file() else ""
    return conclude(run, number, code, bool(warnings), got_on, words)


def asked_by_user(run: Run) -> bool:
    return (run.path / STOP_FILE).exists() and not run.signalled()


def attend(run: Run, command: tuple[str, ...], warnings: list[int]) -> int:
    """Until srun ends. A warning is for the tasks: srun passes signals on to all of them."""
    srun = subprocess.Popen(command)
    run.keep_alive()

    def warn(number: int, _: object) -> None:
        warnings.append(number)
        srun.send_signal(signal.SIGUSR1)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, warn)
    while True:
        try:
            return srun.wait(5.0)
        except subprocess.TimeoutExpired:
            continue


def conclude(run: Run, number: str, code: int, warned: bool, got_on: bool, log: str) -> int:
    """The job's exit code, after the run has said how it ended or someone has said it in its place."""
    info = run.info()
    facts = slurm.job_facts(number)
    preempted = facts.get("PreemptTime", "None") != "None"
    interrupted = warned or preempted or info["state"] == "stopped"
    wanted = info["state"] != "finished" and not asked_by_user(run)
    if facts.get("JobState", "RUNNING") not in ("RUNNING", "SIGNALING"):
        return code  # SLURM itself ends it, or queues it again
    if wanted and any(
        '"StartSmaller"' in p.read_text() for p in run.path.glob("ranks/*.error.json")
    ):
        return queue_again(run, number)  # ranks that srun started have no one else to do it
    if interrupted and wanted and from_resolved(run.path / "recipe.yaml").slurm.requeue:
        if preempted or got_on:
            return queue_again(run, number)
        slurm.note_failure(run, number, "warned before it had done a step; raise slurm.time")
    elif info["state"] not in ("finished", "stopped"):
        _collect(run, code, number, log)
    return int(run.info().get("exit_code") or 0)


def queue_again(run: Run, number: str) -> int:
    print(f"queueing job {number} again; the run goes on from its last checkpoint", flush=True)
    before = run.info()
    run.update(state="queued", failure=None, ended=None, exit_code=None)
    answer = slurm.ask("scontrol", "requeue", number)
    if answer.returncode == 0:
        return 0
    print(f"SLURM does not queue it again: {answer.stderr.strip()}", file=sys.stderr, flush=True)
    run.update(**{key: before.get(key) for key in ("state", "failure", "ended", "exit_code")})
    return 1


def _collect(run: Run, code: int, number: str, log: str) -> None:
    """Ranks that srun started have no supervisor: what srun says of them, else what they said."""
    from muster.launch import failure

    info = run.info()
    killed = (
        first_killed(log) if from_resolved(run.path / "recipe.yaml").slurm.tasks == "gpu" else {}
    )
    if info["state"] == "failed" and not killed:
        return  # a rank, or a supervisor, has told it already
    if killed or any((run.path / "ranks").glob("*.error.json")):
        found = failure.collect(run.path, killed, int(info.get("ranks") or 1))
        run.update(state="failed", failure=found, ended=time.time(), exit_code=1)
    else:
        slurm.note_failure(run, number, f"srun ended with exit code {code} before the run did")


def first_killed(log: str) -> dict[int, int]:
    """The task that srun named first, with its signal as an exit code below 0; none if it ended by
    itself. srun kills the others then, and they complain of a lost connection before."""
    told = re.search(r"^srun: error: \S+ tasks? (\d+)[^:]*: (.+)", log, re.MULTILINE)
    numbers = {signal.strsignal(number): number for number in signal.Signals}
    return {int(told[1]): -numbers[told[2]]} if told and told[2] in numbers else {}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
