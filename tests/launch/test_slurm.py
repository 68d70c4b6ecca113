"""Jobs for SLURM: their script, and their life on a real SLURM of two nodes on this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import slurm as one_machine
from muster.errors import LaunchError, RecipeError
from muster.launch import slurm
from muster.launch.job import ClusterJob
from muster.observe import heartbeats
from muster.observe.results import STOP_FILE, read_lines
from muster.recipe.describe import to_yaml
from muster.recipe.load import load
from muster.run_directory import ALIVE_FILE, Run
from tiny import LONG, losses, slow_steps

STEPS = 40


def job(
    folder: Path,
    *words: str,
    recipe: str = "speech",
    gpus: bool = False,
    nodes: int = 2,
    ranks: int = 1,
) -> ClusterJob:
    """A run directory ready to be handed in, as `muster train --on slurm` makes it."""
    few = ["slurm.cpus_per_rank=1", f"training.steps={STEPS}", "checkpoint.every_steps=100"]
    loaded = load(recipe, [*few, *words])
    (folder / "ranks").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(loaded))
    run = Run(folder)
    run.update(state="starting", created=time.time())
    run.own()
    return ClusterJob(folder, loaded, nodes, ranks, gpus)


def until(condition, run: Run, limit: float = 200.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(path.read_text() for path in run.path.glob("*.log"))
            pytest.fail(f"waited too long; {run.info()}\n{logs}")
        time.sleep(0.05)


class TestScript:
    def test_one_task_per_node_sees_all_its_gpus(self, tmp_path):
        text = slurm.render(job(tmp_path / "r", nodes=2, ranks=4, gpus=True))
        for option in ("nodes=2", "ntasks-per-node=1", "cpus-per-task=4", "gpus-per-node=4"):
            assert f"#SBATCH --{option}\n" in text
        assert "srun --ntasks-per-node=1 --cpus-per-task=4 --kill-on-bad-exit=1" in text
        assert text.endswith(f"-m muster.launch.local {tmp_path}/r 4\n")

    def test_one_task_per_gpu_still_sees_its_peers(self, tmp_path):
        text = slurm.render(job(tmp_path / "r", "slurm.tasks=gpu", ranks=4, gpus=True))
        for option in ("ntasks-per-node=4", "cpus-per-task=1", "gpus-per-node=4"):
            assert f"#SBATCH --{option}\n" in text
        assert "gpus-per-task" not in text
        assert text.endswith(f"-m muster.worker {tmp_path}/r\n")

    def test_cpu_ranks_ask_for_no_gpu(self, tmp_path):
        assert "--gpu" not in slurm.render(job(tmp_path / "r"))

    def test_the_same_job_gives_the_same_text(self, tmp_path):
        one = job(tmp_path / "r", nodes=2)
        forward, backward = ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
        texts = {
            slurm.render(ClusterJob(one.run, one.recipe, 2, 1, False, environment=env))
            for env in (forward, backward)
        }
        assert len(texts) == 1

    def test_options_of_the_recipe_are_told_to_sbatch(self, tmp_path):
        words = ["partition=long", "account=lab", "qos=high", "time=2-00:00:00", "signal_s=300"]
        words += ["requeue=false", 'options=["--mem=64G","--exclusive"]']
        text = slurm.render(job(tmp_path / "r", *(f"slurm.{word}" for word in words)))
        for option in (
            '--partition="long"',
            '--account="lab"',
            '--qos="high"',
            '--time="2-00:00:00"',
            "--signal=B:USR1@300",
            "--no-requeue",
            "--mem=64G",
            "--exclusive",
        ):
            assert f"#SBATCH {option}\n" in text

    def test_a_kind_of_gpu_in_the_options_replaces_the_plain_number(self, tmp_path):
        option = 'slurm.options=["--gres=gpu:a100:4"]'
        text = slurm.render(job(tmp_path / "r", option, ranks=4, gpus=True))
        assert "#SBATCH --gres=gpu:a100:4\n" in text
        assert "--gpus-per-node" not in text

    def test_setup_and_environment_come_before_training_and_keep_their_quotes(self, tmp_path):
        one = job(tmp_path / "r", "slurm.setup=['greet() { echo \"$1\"; }']")
        awkward = 'it\'s $HOME; "x"\n2'
        text = slurm.render(
            ClusterJob(one.run, one.recipe, 1, 1, False, environment={"WORDS": awkward})
        )
        shell = text.partition("exec ")[0] + 'greet "$WORDS"\n'
        said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        assert said.stdout == awkward + "\n"

    def test_a_folder_that_sbatch_would_take_for_a_pattern_is_refused(self, tmp_path):
        with pytest.raises(LaunchError, match=r"logging\.dir"):
            slurm.render(job(tmp_path / "50%" / "r"))

    def test_without_sbatch_the_script_is_there_and_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(LaunchError, match=r"no sbatch here; submit .*/r/job\.sbatch"):
            slurm.submit(job(tmp_path / "r"))
        assert (tmp_path / "r" / "job.sbatch").read_text().startswith("#!/bin/bash")

    def test_an_elastic_job_takes_what_there_is_and_outlives_a_node(self, tmp_path):
        one = replace(job(tmp_path / "it's" / "r", nodes=4, ranks=2), least=2)
        text = slurm.render(one)
        for option in ("nodes=2-4", "no-kill"):
            assert f"#SBATCH --{option}\n" in text
        assert "#SBATCH --ntasks" not in text  # SLURM would take the fewest nodes
        assert "--no-kill --kill-on-bad-exit=0 --wait=0" in text
        assert text.endswith(f"-m muster.launch.local {shlex.quote(str(one.run))} 2 --nodes 2:4\n")
        shell = "MASTER_ADDR=node1 MASTER_PORT=20007\n"
        shell += next(line for line in text.splitlines() if line.startswith("echo "))
        said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        words = shlex.split(said.stdout.partition(": ")[2])
        assert words[:5] == ["muster", "train", str(one.run), "--gpus", "2"]
        assert words[5:] == [
            *("--nodes", "2:4"),
            *("--master-addr", "node1"),
            *("--master-port", "20007"),
        ]

    def test_without_a_supervisor_on_each_node_no_job_is_elastic(self, tmp_path):
        one = replace(job(tmp_path / "r", "slurm.tasks=gpu", nodes=4), least=2)
        with pytest.raises(RecipeError, match=r"--nodes 2:4 needs .* set slurm\.tasks=node"):
            slurm.render(one)


class TestRecipe:
    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            ('options=["--gpus-per-task=1"]', "must see its peers' GPUs"),
            ('options=["-N 4"]', "say --nodes"),
            ('options=["--no-kill"]', "say --nodes MIN:MAX"),
            ('options=["exclusive"]', "expected one sbatch option"),
            ("time=tomorrow", "write 24:00:00"),
            ("time=1440", "in quotes"),
            ("time='2'", "leaves no time to train"),
            ("partition='a b'", "no spaces"),
            ("signal_s=70000", "65535"),
        ],
    )
    def test_what_sbatch_would_misread_is_refused_by_name(self, words, complaint):
        with pytest.raises(RecipeError, match=complaint) as error:
            load("speech", [f"slurm.{words}"])
        assert "slurm" in str(error.value)

    @pytest.mark.parametrize("limit", ["200", "5:00", "0:10:00", "1-0", "1-00:00", "infinite"])
    def test_every_form_of_time_limit_is_understood(self, limit):
        assert load("speech", [f"slurm.time='{limit}'"]).slurm.time == limit


@pytest.fixture(scope="module")
def cluster() -> Iterator[one_machine.Slurm]:
    if reason := one_machine.missing():
        pytest.skip(reason)
    with one_machine.start() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.variables.items():
            patch.setenv(name, value)
        patch.setattr(slurm, "ASK_EVERY_S", 0.5)
        yield started


def follow(run: Run, limit: float = 200.0) -> list[str]:
    """As `muster train` does, until the run is over; returns what was said while it waited."""
    said: list[str] = []
    follower = slurm.Follower(run, said.append)
    until(lambda: follower() not in ("queued", "starting", "running"), run, limit)
    return said


def warn_batch_script(cluster: one_machine.Slurm, run: Run) -> None:
    """What SLURM does `slurm.signal_s` before the time limit, which is at least a minute away."""
    cluster("scancel", "--batch", "--signal=USR1", run.info()["slurm_job"])


def preempt(cluster: one_machine.Slurm, run: Run) -> None:
    """A job of higher priority that wants both nodes for a moment."""
    command = ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    cluster(*command, "--wrap", "sleep 1")


def restarts(cluster: one_machine.Slurm, run: Run) -> int:
    facts = cluster("scontrol", "show", "job", run.info()["slurm_job"])
    return int(re.search(r"Restarts=(\d+)", facts)[1])


@pytest.mark.parametrize(
    ("interrupt", "tasks", "steps"),
    [
        pytest.param(preempt, "node", 2, marks=pytest.mark.guides),  # by a real srun
        pytest.param(warn_batch_script, "gpu", 2, marks=pytest.mark.full),
        pytest.param(warn_batch_script, "node", 2, marks=pytest.mark.full),
        pytest.param(preempt, "gpu", 2, marks=pytest.mark.full),
        pytest.param(preempt, "gpu", 0, marks=pytest.mark.full),
        pytest.param(preempt, "node", 0, marks=pytest.mark.full),
    ],
)
def test_an_interrupted_run_saves_is_queued_again_and_ends_at_the_same_losses(
    cluster, recipe, undisturbed, tmp_path, interrupt, tasks, steps
):
    """At a preemption the tasks are told, near the time limit the batch script."""
    folder = tmp_path / 'a run\'s "own" folder' / "r"
    slow = slow_steps(tmp_path)
    one = replace(job(folder, f"slurm.tasks={tasks}", recipe=recipe), environment=slow)
    run = Run(one.run)
    number = slurm.submit(one)
    until(lambda: run.info()["state"] != "queued" and len(losses(run)) >= steps, run)
    interrupt(cluster, run)
    follow(run)
    assert run.state() == "finished", run.info()
    assert restarts(cluster, run) == 1
    if steps:  # earlier, SLURM may preempt the job before its script listens
        assert f"requeueing job {number}" in (run.path / f"slurm-{number}.log").read_text()
    resumed = [event["step"] for event in of_kind(run, "resumed")]
    assert resumed or not steps, "it did not save before it went"
    assert losses(run) == [line["loss"] for line in undisturbed(2)]


def of_kind(run: Run, name: str) -> list[dict]:
    return [e for e in read_lines(run.path / "events.jsonl") if e["event"] == name]


def end_all_on(node: str) -> None:
    """Its slurmstepd, tasks and ranks, as when its power fails."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == node:
                process.kill()


@pytest.mark.guides
def test_an_elastic_run_outlives_a_node(cluster, recipe, undisturbed, tmp_path):
    slow = slow_steps(tmp_path, 0.5)
    keys = ["training.steps=40", "checkpoint.every_steps=4"]
    one = replace(job(tmp_path / "r", *keys, recipe=recipe), environment=slow, least=1)
    run = Run(one.run)
    slurm.submit(one)
    until(lambda: run.info().get("nodes") == ["node1", "node2"], run)
    before = of_kind(run, "world")
    reached = len(losses(run))
    until(lambda: len(losses(run)) >= reached + 2, run)
    try:
        end_all_on("node2")
        cluster("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        until(lambda: len(of_kind(run, "world")) > len(before), run)
    finally:
        with suppress(AssertionError):  # it may have registered again by itself
            cluster("scontrol", "update", "NodeName=node2", "State=RESUME")
    follow(run)
    assert run.state() == "finished", run.info()
    assert restarts(cluster, run) == 0
    hosts = [event["hosts"] for event in of_kind(run, "world")[len(before) :]]
    assert hosts == [["node1"]]
    assert losses(run) == pytest.approx([line["loss"] for line in undisturbed(1)], rel=1e-5)


@pytest.mark.full
def test_a_run_that_its_user_stops_is_not_queued_again(cluster, recipe, tmp_path):
    one = job(tmp_path / "r", LONG, recipe=recipe, nodes=1, ranks=2)
    run = Run(one.run)
    number = slurm.submit(one)
    until(lambda: len(losses(run)) >= 2, run)
    (run.path / STOP_FILE).touch()
    follow(run)
    assert run.state() == "stopped"
    assert slurm.state(run) == f"job {number} is over: it ended"
    assert restarts(cluster, run) == 0


@pytest.mark.full
def test_a_run_that_fails_is_told_by_its_rank_and_not_queued_again(cluster, tmp_path):
    words = ["slurm.tasks=gpu", "data.tokenizer.characters=abc", "data.max_parquet_files=1"]
    one = job(tmp_path / "r", *words, nodes=1, ranks=2)
    run = Run(one.run)
    slurm.submit(one)
    follow(run)
    assert run.state() == "failed"
    assert "outside the vocabulary" in run.info()["failure"]["what"]
    assert restarts(cluster, run) == 0


@pytest.mark.full
def test_a_rank_killed_under_srun_is_named_and_not_those_that_lost_their_connection_to_it(
    cluster, recipe, tmp_path
):
    one = job(tmp_path / "r", "slurm.tasks=gpu", LONG, recipe=recipe, nodes=1, ranks=2)
    run = Run(one.run)
    slurm.submit(one)
    until(lambda: len(losses(run)) >= 2, run)
    rank = heartbeats.read(run.path / "ranks")[1]
    os.kill(rank["pid"], signal.SIGKILL)
    follow(run)
    assert run.state() == "failed"
    assert run.info()["failure"]["rank"] == 1
    assert run.info()["failure"]["signal"] == "SIGKILL"


@pytest.mark.full
def test_a_warning_before_the_first_step_ends_the_run_instead_of_queueing_it_for_ever(
    cluster, tmp_path
):
    one = job(tmp_path / "r", "data.max_parquet_files=1", nodes=1)
    run = Run(one.run)
    slurm.submit(one)
    until(lambda: (run.path / ALIVE_FILE).exists(), run)
    time.sleep(0.2)  # the signals are listened to
    warn_batch_script(cluster, run)
    follow(run)
    assert run.state() == "failed"
    assert "raise slurm.time" in run.info()["failure"]["what"]


def test_a_script_that_fails_before_training_is_told_with_its_log(cluster, tmp_path):
    one = job(tmp_path / "r", "slurm.setup=['module load nothing']")
    run = Run(one.run)
    number = slurm.submit(one)
    follow(run)
    assert run.state() == "failed"
    assert f"its script failed; its log: {run.path}/slurm-" in run.info()["failure"]["what"]
    assert "module" in (run.path / f"slurm-{number}.log").read_text()


@pytest.mark.parametrize("tasks", ["node", "gpu"])
def test_every_rank_sees_all_gpus_of_its_node(cluster, tmp_path, tasks):
    """NCCL cannot use NVLink between GPUs of which a rank sees only its own."""
    text = slurm.render(job(tmp_path / "r", f"slurm.tasks={tasks}", ranks=2, nodes=1, gpus=True))
    asked = re.findall(r"#SBATCH (--(?:nodes|gpus)[^\s]*)", text)
    options = re.search(r"srun (.*) \\\n", text)[1].split()
    seen = cluster("srun", *asked, *options, "printenv", "CUDA_VISIBLE_DEVICES").split()
    assert seen == ["0,1"] * (1 if tasks == "node" else 2)


def test_a_job_that_waits_says_why_and_can_be_cancelled(cluster, tmp_path):
    cluster("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 60")
    one = job(tmp_path / "r")
    run = Run(one.run)
    slurm.submit(one)
    until(lambda: "not enough nodes are free" in slurm.state(run), run)
    assert run.info()["state"] == "queued"
    slurm.cancel(run)
    assert follow(run) == []
    assert run.state() == "stopped"
    cluster("scancel", "--user=root")


def test_a_job_that_can_never_start_says_so(cluster, tmp_path):
    one = job(tmp_path / "r", nodes=9)
    run = Run(one.run)
    slurm.submit(one)
    until(lambda: "it will never start" in slurm.state(run), run)
    slurm.cancel(run)


@pytest.mark.parametrize(
    ("words", "gpus", "cure"),
    [
        (["slurm.partition=nowhere"], False, "set slurm.partition to one that `sinfo"),
        (['slurm.options=["--constraint=moon"]'], False, "feature"),
        (['slurm.options=["--gres=moon:1"]'], True, "see what GPUs there are"),
        (['slurm.options=["--gres=gpu:9"]'], True, "lower slurm.cpus_per_rank, --gpus"),
    ],
)
def test_what_sbatch_refuses_is_told_with_the_key_to_change(cluster, tmp_path, words, gpus, cure):
    with pytest.raises(LaunchError, match=cure):
        slurm.submit(job(tmp_path / "r", *words, gpus=gpus))


def test_a_cluster_that_does_not_answer_is_told(tmp_path, monkeypatch):
    if one_machine.missing():
        pytest.skip(one_machine.missing())
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=x\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(slurm, "TIMEOUT_S", 1.0)
    with pytest.raises(LaunchError, match="sbatch"):
        slurm.submit(job(tmp_path / "r"))
