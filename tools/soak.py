"""A run on four ranks that is killed, stalled, starved of disk, stopped and resumed at random.

    python tools/soak.py 1                   # an hour, then the same steps undisturbed
    python tools/soak.py 0.01 --seed 3       # half a minute

What happens, and when, follows from the seed. Sampled are the memory, file handles and threads of ranks and
supervisor, the files in the run directory and the time per step; a table says which of them grow. In the end
the same recipe trains as many steps undisturbed: all losses and gradient norms must be the same numbers. The
exit code is 0 where they are, every start went on, all was sampled and nothing grows. The wall time per step counts only with
--alone: other programs on this machine change it.

The run directory is on a small tmpfs of a mount namespace of its own, which is then filled (`unshare`; no root
is needed where users may make namespaces). Elsewhere the ranks' files may not grow for a while
(RLIMIT_FSIZE).
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from soak_samples import WARM_S, Sampler, ranks_of, table

from muster.observe.results import read_lines
from muster.run_directory import ALIVE, Run

RANKS = 4
SAMPLE_S = 2.0
MEAN_S = 60.0  # between disturbances
STALL_S = 15.0
PATIENCE_S = 300.0  # for a run to train again
MIB = 2**20
RECIPE = """
name: soak
task: causal-lm
model: {{preset: gpt2-micro}}
data: {{train: {text}, sequence_length: 16}}
training: {{steps: 10000000, global_batch_size: 8, lr: 1.0e-4, precision: fp32,
  schedule: constant, warmup_steps: 0}}
distributed: {{stall_s: {stall}, max_restarts: 20}}
checkpoint: {{every_steps: 100, keep: 2}}
evaluation: {{every_steps: null, final: false}}
logging: {{to: [], dir: {runs}}}
"""


class SoakError(Exception):
    """The run did not go on."""


class Soak:
    def __init__(self, folder: Path, seed: int, *, mounted: bool) -> None:
        self.folder, self.runs, self.mounted = folder, folder / "runs", mounted
        self.random = random.Random(seed)
        self.begin = time.monotonic()
        self.counts: dict[str, int] = {}
        self.sentences: dict[str, int] = {}
        text = folder / "train.txt"
        text.write_text(Path(str(textwrap.__file__)).read_text())
        self.recipe = folder / "soak.yaml"
        self.recipe.write_text(RECIPE.format(text=text, stall=STALL_S, runs=self.runs))
        self._bag: list[Callable[[Run], None]] = []

    def disturb(self, seconds: float) -> tuple[Run, Sampler]:
        """Train for so long, disturbed."""
        run = self.start("soak")
        sampler = Sampler(run, min(WARM_S, seconds / 20))
        end, mean = time.monotonic() + seconds, min(MEAN_S, seconds / 8)
        while time.monotonic() < end:
            pause = min(self.random.expovariate(1 / mean), end - time.monotonic())
            self.watch(sampler, time.monotonic() + pause)
            if time.monotonic() < end:
                sampler.sample_files(time.time())
                self.happen(run)
        self.command("stop", str(run.path))
        return run, sampler

    def undisturbed(self, steps: int, warm_s: float) -> tuple[Run, Sampler]:
        run = self.start("undisturbed", f"training.steps={steps}")
        sampler = Sampler(run, warm_s)
        while run.state() in ALIVE:
            self.watch(sampler, time.monotonic() + SAMPLE_S)
            sampler.sample_files(time.time())
        if run.state() != "finished":
            raise SoakError(f"the undisturbed run ended: {run.info().get('failure')}")
        return run, sampler

    def start(self, name: str, *words: str) -> Run:
        self.command(
            "train", str(self.recipe), "--gpus", str(RANKS), "--detach", "--run", name, *words
        )
        run = Run(self.runs / name)
        self.until(lambda: run.last_metrics(), "the first step", run)
        return run

    def happen(self, run: Run) -> None:
        """Something, and wait until the run trains again."""
        if not self._bag:
            self._bag = [self.kill_rank, self.kill_all, self.kill_supervisor, self.pause_rank]
            self._bag += [self.stall_rank, self.stop, self.fill_disk]
            self.random.shuffle(self._bag)
        action = self._bag.pop()
        name = action.__name__.replace("_", " ")
        self.say(f"step {run.last_metrics().get('step')}: {name}")
        self.counts[name] = self.counts.get(name, 0) + 1
        action(run)
        before = run.last_metrics().get("time", 0.0)
        self.until(lambda: run.last_metrics().get("time", 0.0) > before, f"after: {name}", run)

    def until(self, done: Callable[[], object], what: str, run: Run) -> None:
        """Resume the run whenever it has ended."""
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise SoakError(f"no step within {PATIENCE_S:.0f} s ({what}; {run.state()})")
            if run.state() not in ALIVE and not done():
                failure = run.info().get("failure") or {}
                words = str(failure.get("what") or run.state()).split("\n")[0]
                self.sentences[words] = self.sentences.get(words, 0) + 1
                self.say(f"  {run.state()}: {words}")
                self.command("train", str(run.path), "--gpus", str(RANKS), "--detach")
            time.sleep(0.2)

    # what happens

    def kill_rank(self, run: Run) -> None:
        self.send(signal.SIGKILL, self.one(run))

    def kill_all(self, run: Run) -> None:
        self.send(signal.SIGKILL, *run.processes())
        self.gone(run)

    def kill_supervisor(self, run: Run) -> None:
        self.send(signal.SIGKILL, *run.processes()[:1])
        self.gone(run)

    def pause_rank(self, run: Run) -> None:
        """Shorter than a stall."""
        rank = self.one(run)
        self.send(signal.SIGSTOP, rank)
        time.sleep(self.random.uniform(1, STALL_S / 3))
        self.send(signal.SIGCONT, rank)

    def stall_rank(self, run: Run) -> None:
        """Until the run has ended."""
        rank, end = self.one(run), time.monotonic() + STALL_S + 60
        self.send(signal.SIGSTOP, rank)
        while psutil.pid_exists(rank.pid) and run.state() in ALIVE and time.monotonic() < end:
            time.sleep(0.2)
        self.send(signal.SIGCONT, rank)

    def stop(self, run: Run) -> None:
        self.command("stop", str(run.path))

    def fill_disk(self, run: Run) -> None:
        """Until the run has ended, or for so long."""
        end = time.monotonic() + self.random.uniform(5, 25)
        ballast = self.runs / "ballast"
        if not self.mounted:
            for rank in ranks_of(run):
                with suppress(OSError):
                    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        while run.state() in ALIVE and time.monotonic() < end:
            if self.mounted:  # again and again: removed checkpoints make room
                with suppress(OSError), ballast.open("ab", buffering=0) as file:
                    while file.write(bytes(64 * 1024)):
                        pass
            time.sleep(0.2)
        ballast.unlink(missing_ok=True)
        for rank in () if self.mounted else ranks_of(run):
            with suppress(OSError):
                unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, unlimited)

    # its parts

    def one(self, run: Run) -> psutil.Process:
        while not (found := ranks_of(run)):
            if run.state() not in ALIVE:
                raise SoakError(f"the run has ended by itself: {run.info().get('failure')}")
            time.sleep(0.05)
        return self.random.choice(found)

    def send(self, number: signal.Signals, *processes: psutil.Process) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def gone(self, run: Run) -> None:
        end = time.monotonic() + 30
        while run.state() in ALIVE and time.monotonic() < end:
            time.sleep(0.05)

    def watch(self, sampler: Sampler, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            sampler.sample(time.time())
            time.sleep(min(SAMPLE_S, left))

    def command(self, *words: str) -> None:
        told = subprocess.run(
            [sys.executable, "-m", "muster", *words], capture_output=True, text=True
        )
        if told.returncode:
            raise SoakError(
                f"muster {' '.join(words)}: exit code {told.returncode}: {told.stdout}{told.stderr}"
            )

    def say(self, words: str) -> None:
        print(f"{time.monotonic() - self.begin:7.0f} s  {words}", flush=True)


def compare(disturbed: Run, reference: Run) -> list[str]:
    """What differs between the steps of two runs; empty where nothing does."""
    ours, theirs = (read_lines(run.path / "metrics.jsonl") for run in (disturbed, reference))
    problems = []
    if [line["step"] for line in ours] != list(range(1, len(ours) + 1)):
        problems.append("steps are missing or repeated in metrics.jsonl")
    if len(ours) != len(theirs):
        problems.append(f"{len(ours)} steps against {len(theirs)}")
    for name in ("loss", "grad_norm"):
        other = [a["step"] for a, b in zip(ours, theirs, strict=False) if a[name] != b[name]]
        if other:
            problems.append(f"{name} differs in {len(other)} steps, first in step {other[0]}")
    return problems


def shown(title: str, sampler: Sampler, *, alone: bool) -> list[str]:
    """The table of a run, and what in it is a problem."""
    verdicts = sampler.verdicts()
    print("\n".join(["", *table(title, verdicts), ""]), flush=True)
    return [f"{title}: {words}" for found in verdicts if (words := found.problem(alone=alone))]


def soak(hours: float, seed: int, folder: Path, *, mounted: bool, alone: bool) -> int:
    storm = Soak(folder, seed, mounted=mounted)
    storm.say(f"seed {seed}; {folder}; {'a small tmpfs' if mounted else 'RLIMIT_FSIZE'} starves it")
    problems: list[str] = []
    try:
        run, disturbed = storm.disturb(3600 * hours)
        lines = read_lines(run.path / "metrics.jsonl")
        disturbed.add_steps(lines)
        problems += shown("disturbed", disturbed, alone=alone)
        storm.say(f"stopped at step {lines[-1]['step']}; now as many undisturbed")
        reference, quiet = storm.undisturbed(lines[-1]["step"], disturbed.warm_s)
        quiet.add_steps(read_lines(reference.path / "metrics.jsonl"))
        problems += compare(run, reference)
        problems += shown("undisturbed", quiet, alone=alone)
        print(f"\n{len(lines):,} steps, {sum(storm.counts.values())} disturbances:")
        print("\n".join(f"  {n:4} × {name}" for name, n in sorted(storm.counts.items())))
        print("how the run ended before it was resumed:")
        print("\n".join(f"  {n:4} × {words}" for words, n in sorted(storm.sentences.items())))
    except SoakError as error:
        problems.append(str(error))
    finally:
        keep(folder)
    print(
        "\n" + "\n".join(f"PROBLEM: {problem}" for problem in problems)
        if problems
        else "\nall losses and gradient norms are the same numbers, and nothing grows"
    )
    return 1 if problems else 0


def keep(folder: Path) -> None:
    """The runs without their checkpoints, outside of the mount; processes that still run are ended."""
    for path in (folder / "runs").glob("*/run.json"):
        for process in Run(path.parent).processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    left_out = shutil.ignore_patterns("checkpoints", "ballast")
    shutil.copytree(
        folder / "runs", folder / "kept", symlinks=True, ignore=left_out, dirs_exist_ok=True
    )


def in_namespace(words: list[str], folder: Path, size: int) -> int | None:
    """This program again, where a tmpfs is mounted for the runs; None where that cannot be."""
    mount = f'mount -t tmpfs -o size={size} soak "$0" && exec "$@"'
    for options in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        unshare = ["unshare", *options, "sh", "-c", mount, str(folder / "runs")]
        with suppress(FileNotFoundError):
            if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
                return subprocess.run([*unshare, sys.executable, *words]).returncode
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("hours", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for its files; a new temporary one")
    parser.add_argument("--alone", action="store_true", help="nothing else uses this machine")
    parser.add_argument("--mounted", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    if not asked.mounted:
        words = [__file__, str(asked.hours), "--seed", str(asked.seed), "--folder", str(folder)]
        words += ["--alone"] if asked.alone else []
        code = in_namespace([*words, "--mounted"], folder, int((256 + 256 * asked.hours) * MIB))
        if code is not None:
            return code
    return soak(asked.hours, asked.seed, folder, mounted=asked.mounted, alone=asked.alone)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
