"""`--on slurm`: the run as a batch job that is requeued after a preemption.

`render` writes the script and `submit` calls sbatch. What happens inside the job, and whether it is
requeued, is in `slurm_job`, which the script's last line starts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable

from muster.errors import LaunchError, RecipeError
from muster.launch.job import ClusterJob
from muster.recipe.schema import Recipe
from muster.run_directory import ENDED, Run
from muster.writing import write

TIMEOUT_S = 60.0  # for SLURM's own commands
ASK_EVERY_S = 5.0
FORBIDDEN = "%\n\r"  # % starts a pattern in --output, and #SBATCH lines end where a line ends

# Patterns in sbatch's errors, and what to change. The first that matches counts.
CURES = (
    ("invalid partition", "set slurm.partition to one that `sinfo --summarize` lists"),
    ("account", "set slurm.account to one that `sacctmgr show associations user=$USER` lists"),
    ("qos", "set slurm.qos to one that `sacctmgr show qos` lists"),
    ("gres", "see what GPUs there are with `sinfo --format '%P %G'`; name a kind with "
     "slurm.options=['--gpus-per-node=a100:4']"),
    ("time limit", "lower slurm.time; `sinfo --summarize` shows each partition's limit"),
    ("memory", "give --mem in slurm.options, or choose another slurm.partition"),
    ("node configuration|cpu count|node count|more processors",
     "lower slurm.cpus_per_rank, --gpus or --nodes, or choose another slurm.partition; "
     "`sinfo --format '%P %D %c %G'` shows what their nodes have"),
    ("contact slurm controller|configuration source",
     "run this where SLURM's commands work, usually a login node; `scontrol ping` shows"),
    ("limit", "wait for other jobs to end, or choose another slurm.account or slurm.qos"),
)  # fmt: skip

# Why a job waits, by SLURM's reason code. Other codes are shown as they are.
REASONS = {
    "None": "SLURM has not scheduled it yet",
    "Resources": "not enough nodes are free",
    "Priority": "jobs of higher priority are ahead of it",
    "BeginTime": "a requeued job waits for two minutes",
    "Dependency": "another job must end first",
    "PartitionConfig": "the partition lacks the requested resources, so it will never start",
    "PartitionNodeLimit": "the partition allows fewer nodes, so it will never start",
    "PartitionTimeLimit": "slurm.time is above the partition's limit, so it will never start",
    "PartitionDown": "the partition is down",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "JobHeldUser": "it is held; release it with `scontrol release`",
    "JobHeldAdmin": "an administrator holds it",
}

# How jobs end, by SLURM's state.
ENDS = {
    "BOOT_FAIL": "its nodes did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended",
    "DEADLINE": "its deadline passed",
    "FAILED": "its script failed",
    "FORGOTTEN": "SLURM has no record of it any more",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more host memory than it asked for; give --mem in slurm.options",
    "PREEMPTED": "it was preempted by a job of higher priority",
    "TIMEOUT": "it reached its time limit before the run had saved; raise slurm.signal_s",
}


def render(job: ClusterJob) -> str:
    """The sbatch script; the same job gives the same text."""
    check(job.recipe, job.nodes, job.least)
    options = job.recipe.slurm
    folder, python = shlex.quote(str(job.run)), shlex.quote(job.python)
    if options.tasks == "node":
        tasks, worker = 1, f"{python} -m muster.launch.local {folder} {job.ranks}"
        worker += f" --nodes {job.asked_nodes}" if job.least else ""
    else:
        tasks, worker = job.ranks, f"{python} -m muster.worker {folder}"
    cpus = options.cpus_per_rank * job.ranks // tasks
    # srun takes no --cpus-per-task from sbatch since 22.05. GPUs are asked for by node alone, so that
    # each task sees all of them: NCCL cannot reach a peer that --gpus-per-task hides, and with
    # --gpu-bind=none SLURM leaves CUDA_VISIBLE_DEVICES out, and other jobs' GPUs in.
    ends = "--no-kill --kill-on-bad-exit=0 --wait=0" if job.least else "--kill-on-bad-exit=1"
    srun = f"srun --ntasks-per-node={tasks} --cpus-per-task={cpus} {ends}"
    lines = [
        "#!/bin/bash",
        f"# Run {job.name}, written by muster train --on slurm.",
        *(f"#SBATCH {option}" for option in _directives(job, tasks, cpus)),
        "set -e",
        "trap '' USR1  # until muster installs its handler",
        *options.setup,
        *(f"export {name}={shlex.quote(text)}" for name, text in sorted(job.environment.items())),
    ]
    if job.nodes > 1:
        lines += [
            'MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}',
            "export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        ]
    if job.least:
        words = f"a node of another job joins with: muster train {folder} --gpus {job.ranks}"
        words = shlex.quote(f"{words} --nodes {job.asked_nodes} --master-addr")
        lines.append(f'echo {words} "$MASTER_ADDR" --master-port "$MASTER_PORT"')
    lines.append(f"exec {python} -m muster.launch.slurm_job {folder} \\\n  {srun} \\\n  {worker}")
    return "\n".join(lines) + "\n"


def check(recipe: Recipe, nodes: int, least: int | None) -> None:
    if least is not None and recipe.slurm.tasks == "gpu":
        raise RecipeError(
            f"slurm.tasks: --nodes {least}:{nodes} needs a supervisor on each node, which starts its ranks again "
            "when nodes come and go; set slurm.tasks=node"
        )


def _directives(job: ClusterJob, tasks: int, cpus: int) -> list[str]:
    options = job.recipe.slurm
    path = str(job.run)
    if any(sign in path for sign in FORBIDDEN):
        raise LaunchError(
            f"logging.dir: SLURM cannot write a log into {path!r}; choose a folder without % in its name"
        )
    lines = [
        f"--job-name={_quoted(job.name)}",
        f"--nodes={job.asked_nodes.replace(':', '-')}",
        # With a number of tasks for each node, SLURM takes the fewest nodes of a range, not the most.
        "--no-kill" if job.least else f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
    ]
    if job.gpus and not any(re.match("--(gres=|gpus)", option) for option in options.options):
        lines.append(f"--gpus-per-node={job.ranks}")
    lines += [
        f"--output={_quoted(path + '/slurm-%j.log')}",
        "--open-mode=append",
        f"--signal=B:USR1@{options.signal_s}",
        "--requeue" if options.requeue else "--no-requeue",
    ]
    named = {name: getattr(options, name) for name in ("partition", "account", "qos", "time")}
    lines += [f"--{name}={_quoted(value)}" for name, value in named.items() if value is not None]
    return lines + options.options


def _quoted(text: str) -> str:
    """Quoted for sbatch, not for a shell."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def submit(job: ClusterJob) -> str:
    """Write RUN/job.sbatch and submit it. Returns the job's id."""
    script, run = job.run / "job.sbatch", Run(job.run)
    write(script, render(job))
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"--on slurm: there is no sbatch here; submit {script} where there is one, usually on a "
            "login node, or leave --on slurm out"
        )
    # Before, not after: the job may start while sbatch still returns.
    run.update(state="queued", slurm_job=None, failure=None, ended=None, exit_code=None)
    answer = ask("sbatch", "--parsable", str(script))
    if answer.returncode:
        run.update(state="starting")
        raise LaunchError(f"sbatch refused {script}: {_error(answer.stderr)}")
    number = answer.stdout.strip().split(";")[0]  # the cluster's name may follow
    run.update(slurm_job=number)
    return number


def _error(text: str) -> str:
    text = re.sub(r"^sbatch: (error|fatal): ", "", text.strip(), flags=re.MULTILINE)
    cures = (cure for pattern, cure in CURES if re.search(pattern, text, re.IGNORECASE))
    return "; ".join(filter(None, [text.replace("\n", "; "), next(cures, "")]))


def state(run: Run) -> str | None:
    """The state of the run's job, for people; None when there is none or SLURM does not answer."""
    number = run.info().get("slurm_job")
    facts = job_facts(number) if number else {}
    if not facts:
        return None
    name, reason = facts["JobState"], facts.get("Reason", "None")
    if name == "PENDING":
        limit = re.match("(QOS|Assoc)", reason)
        why = f"a limit of your account or QOS is reached ({reason})" if limit else reason
        return f"job {number} waits: {REASONS.get(reason, why)}"
    if name in ENDS:
        return f"job {number} is over: {ENDS[name]}"
    return f"job {number} is {name.lower()}"


def job_facts(number: str) -> dict[str, str]:
    """JobState, Reason, PreemptTime, Requeue … of a job; nothing when SLURM does not answer.

    scontrol drops a job some minutes after its end; sacct, where accounting is on, does not.
    """
    answer = ask("scontrol", "show", "job", "--oneliner", number)
    if answer.returncode == 0:
        return dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
    if "Invalid job id" not in answer.stderr:
        return {}
    answer = ask("sacct", "--allocations", "--noheader", "--format=State%40", "--jobs", number)
    return {"JobState": (answer.stdout.split() or ["FORGOTTEN"])[0]}


def cancel(run: Run) -> None:
    """End the job: a pending one at once; a running one saves first if SLURM lets it."""
    number = run.info().get("slurm_job")
    if not number:
        raise LaunchError(f"{run.name} has no SLURM job")
    answer = ask("scancel", number)
    if answer.returncode:
        raise LaunchError(f"scancel could not end job {number}: {answer.stderr.strip()}")
    settle(run)


def settle(run: Run) -> bool:
    """Whether the run's job is over. If the run has not recorded its own end, record how it ended."""
    number = run.info().get("slurm_job")
    facts = job_facts(number) if number else {}
    name = facts.get("JobState")
    comes_back = name in ("PREEMPTED", "NODE_FAIL") and facts.get("Requeue") == "1"
    if name not in ENDS or comes_back:
        return False
    if run.info().get("state") in ENDED:
        return True
    if name == "CANCELLED":
        run.update(state="stopped", ended=time.time(), exit_code=0)
    else:
        note_failure(run, number, ENDS[name])
    from muster.page import report

    report.write_at_end(run)
    return True


def note_failure(run: Run, number: object, why: str) -> None:
    """For a run that could not record it itself."""
    from muster.launch import failure

    text = f"SLURM job {number}: {why}; its log: {run.path}/slurm-{number}.log"
    found = failure.of_launcher(LaunchError(text), expected=True)
    run.update(state="failed", failure=found, ended=time.time(), exit_code=1)


class Follower:
    """`Run.state` for following a run on SLURM: it is not over before its job is.

    A preempted run is `stopped` for a moment before it is requeued. `on_change` gets the reason why a
    job waits whenever that changes.
    """

    def __init__(self, run: Run, on_change: Callable[[str], None] = lambda text: None) -> None:
        self.run, self.on_change = run, on_change
        self.next, self.text = 0.0, ""

    def __call__(self) -> str:
        state = self.run.state()
        if state in ("starting", "running"):
            return state
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + (ASK_EVERY_S if state == "queued" else 0.5)
            if settle(self.run):
                return self.run.state()
            self._check_job()
        return "queued" if state == "queued" else "running"

    def _check_job(self) -> None:
        text = state(self.run) or ""
        if text != self.text and "waits" in text:
            self.on_change(text)
        self.text = text


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands, without the SLURM_ variables of a job that this process is in."""
    env = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith("SLURM_")}
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"there is no {command[0]} here")
    except subprocess.TimeoutExpired:
        late = f"{command[0]} did not answer within {TIMEOUT_S:.0f} s"
        return subprocess.CompletedProcess(command, 124, "", late)
