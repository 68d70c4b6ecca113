"""Values that reach SLURM's scripts and Kubernetes' objects, and names of runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from fuzzing import mutate
from fuzzing.families.recipes import KEYS, strange
from fuzzing.reader import Case, reader
from muster import run_directory
from muster.launch import kubernetes, slurm
from muster.launch.job import ClusterJob
from muster.recipe.load import load

# fmt: off
SHELL = [
    "$(touch ran)", "`touch ran`", "'; touch ran; '", '"; touch ran; "', "x\ntouch ran", "x\n#SBATCH --wrap=x",
    "a && b", "|sh", "> /etc/x", "\\", "'", '"', "$HOME", "${IFS}", "%j", "%x/../x", "!!", "# x", "~root",
    "---\nkind: Pod", "x: y", "{{x}}", "$(POD)", "- x", "&a", "*a", "!!str", "@x", "[x", "yes", "null", "0x1", "1e3",
    "../x", "/abs", "..", "a/../b", "/etc", "/proc", "/", "latest", "x" * 300, "é", "\x1b[31m", "\0", "\ud800", "",
]
FIELDS = {
    "slurm": ["partition", "account", "qos", "time", "setup", "options", "cpus_per_rank", "signal_s"],
    "kubernetes": [
        "image", "namespace", "runtime", "gpu_resource", "infiniband", "memory", "volume_claim", "mount_path", "user",
    ],
}
# fmt: on

PLAIN: dict[str, Any] = {
    "task": "causal-lm",
    "model": {"preset": "gpt2-micro"},
    "data": {"train": "embedded:python-source"},
    "training": {"steps": 10},
    "kubernetes": {"image": "muster:1", "volume_claim": "data"},
    "slurm": {},
}


def _job(rng: Random, folder: Path, section: str) -> tuple[Any, str, dict[str, str]]:
    """The document of a recipe with odd values, the name of its run, and the environment of its ranks."""
    document = dict(PLAIN)
    document[section] = dict(document[section])
    for _ in range(rng.choice([1, 1, 2])):
        field = rng.choice(FIELDS[section])
        odd: Any = rng.choice(SHELL) if rng.random() < 0.8 else mutate.value(rng)
        if field == "setup":
            odd = ["module load cuda"]  # shell lines by intent
        elif field == "options" and rng.random() < 0.8:
            odd = [odd if rng.random() < 0.5 else f"--comment={odd}"]
        document[section][field] = odd
    name = rng.choice(SHELL) if rng.random() < 0.3 else "run-1"
    environment = {}
    if rng.random() < 0.4:
        environment = {
            rng.choice(
                ["NCCL_DEBUG", "NCCL_$(touch ran)", "A B", "PATH", "X=Y", *SHELL[:6]]
            ): rng.choice(SHELL)
        }
    return document, name, environment


def _commands(script: str) -> Iterator[str]:
    """Lines as bash has them; an export whose quoted value has several is one."""
    begun = ""
    for line in script.removesuffix("\n").split("\n"):
        begun = f"{begun}\n{line}" if begun else line
        try:
            shlex.split(begun if begun.startswith("export ") else "")
        except ValueError:  # a quotation is open
            continue
        yield begun
        begun = ""
    if begun:
        yield begun


def _render(how: Any, document: Any, name: str, environment: dict[str, str], folder: Path) -> Any:
    run_directory.check_name(name)
    job = ClusterJob(folder / name, load(document), 2, 4, True, environment)
    return how(job), job


@reader("slurm", 900)
def slurm_script(rng: Random, folder: Path) -> Case:
    document, name, environment = _job(rng, folder, "slurm")

    def wrong(taken: Any) -> str | None:
        """Every line is one that muster meant; each value is one word of its own."""
        script, job = taken
        known = re.compile(
            r"#!/bin/bash|# Run [\w.-]+, written by .*|#SBATCH --.*|set -e|trap '' USR1 .*|export .*"
            r"|MASTER_ADDR=.*|exec .*|  srun .*|  \S+.*|module load cuda"
        )
        for line in _commands(script):
            if not known.fullmatch(line.replace("\n", " ") if line.startswith("export ") else line):
                return f"the script has the line {line[:60]!r}"
            if line.startswith("export ") and "MASTER_" not in line:
                words = shlex.split(line)
                if (
                    len(words) != 2
                    or not re.fullmatch(r"[A-Za-z_]\w*=.*", words[1], re.DOTALL)
                    or "$(" in words[1].partition("=")[0]
                ):
                    return f"the script exports {line[:60]!r}"
            if line.startswith("#SBATCH ") and ("\0" in line or "\x1b" in line):
                return f"control characters in {line[:60]!r}"
        for name, value in job.environment.items():
            if f"export {name}={shlex.quote(value)}" not in script:
                return f"{name} is not as it was given"
        return strange(script)

    return Case(
        lambda: _render(slurm.render, document, name, environment, folder),
        (*KEYS, "--run", "environment", *environment),
        wrong,
    )


@reader("kubernetes", 900)
def kubernetes_objects(rng: Random, folder: Path) -> Case:
    document, name, environment = _job(rng, folder, "kubernetes")
    kind = rng.choice(["job", "trainjob"])

    def wrong(taken: Any) -> str | None:
        text, job = taken
        found = [one for one in yaml.safe_load_all(text) if one is not None]
        kinds = [one.get("kind") for one in found if isinstance(one, dict)]
        expected = {
            "job": {"ConfigMap", "Service", "Job", "NetworkPolicy", "Secret"},
            "trainjob": {"ConfigMap", "TrainJob", "NetworkPolicy", "Secret"},
        }[kind]
        if not set(kinds) <= expected or len(kinds) != len(set(kinds)):
            return f"objects {kinds}"
        place = job.recipe.kubernetes.mount_path
        if (
            ".." in place
            or "$(" in place
            or place.startswith(("/etc", "/proc", "/dev", "/sys", "/usr", "/bin"))
        ):
            return f"mount_path {place!r}"
        for key, value in _strings(found):
            expanded = value.replace("$$", "").replace("$(JOB_COMPLETION_INDEX)", "")
            if key != "recipe.yaml" and "$(" in expanded:
                return f"Kubernetes expands {key}: {value[:40]!r}"
        return strange(text)

    return Case(
        lambda: _render(
            lambda job: kubernetes.render(job, kind), document, name, environment, folder
        ),
        (*KEYS, "--run", "environment", *environment),
        wrong,
    )


def _strings(node: Any, key: str = "") -> list[tuple[str, str]]:
    if isinstance(node, dict):
        return [pair for name, value in node.items() for pair in _strings(value, str(name))]
    if isinstance(node, list):
        return [pair for value in node for pair in _strings(value, key)]
    return [(key, node)] if isinstance(node, str) else []


@reader("run-name", 600)
def run_name(rng: Random, folder: Path) -> Case:
    """--run and the recipe's name: one folder below the folder of runs, or a sentence."""
    name = rng.choice(SHELL) if rng.random() < 0.6 else rng.choice(mutate.TEXTS)
    exact = rng.random() < 0.5
    root = folder / "runs"
    if rng.random() < 0.3:
        root.mkdir()
        (root / "latest").mkdir()
    if rng.random() < 0.2:
        root.mkdir(exist_ok=True)
        (root / ".latest-1").symlink_to("nowhere")

    def read() -> Any:
        plain = "x" if exact else load({**PLAIN, "name": name}).name
        run = run_directory.create(
            root, plain, {"recipe.yaml": "name: x\n"}, name if exact else None
        )
        return (
            run,
            run_directory.find(run.name, root).info(),
            run.state(),
            run_directory.every(root),
        )

    def wrong(taken: Any) -> str | None:
        run = taken[0]
        if run.path.parent.resolve() != root.resolve():
            return f"the run is in {run.path.parent}"
        return None if run.name.isprintable() else f"a run of the name {run.name!r}"

    return Case(read, ("--run", "name", "logging.dir"), wrong)
