"""Training from a script: started by torchrun, by plain python, or spawning its own ranks."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from muster import runs
from muster.errors import LaunchError, MusterError
from muster.hardware import environment, inventory
from muster.launch import cluster
from muster.launch.cluster import Place
from muster.launch.spawn import spawn
from muster.observe.console import follow, results_table
from muster.observe.logs import set_up
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.recipe.describe import to_yaml
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.start import provide
from muster.worker import leave_word, run_rank

log = logging.getLogger(__name__)

TRIAL_MIB = 16

RankLife = Callable[[Recipe, Place, runs.Run | None], dict[str, Any]]


def train_here(
    recipe: str,
    overrides: Sequence[str] = (),
    life: RankLife = run_rank,
    before: Callable[[Recipe], None] = lambda recipe: None,
) -> dict[str, Any]:
    """Train as whichever rank this process is: started by torchrun, or alone by plain python.

    Rank 0 shows the run in the terminal by reading its files, as `muster watch` does. `life` is
    what a rank does from joining the others to leaving them; `before` may refuse the recipe while
    there is no run directory yet.
    """
    place = cluster.detect(os.environ)
    set_up(f"Rank {place.rank}")
    if place.world == 1 and (words := idle_words(visible_gpus(), sys.argv)):
        log.warning("%s", words)
    try:
        loaded = load(recipe, overrides)
        before(loaded)
        if place.rank > 0:
            return life(loaded, place, None)
        run = runs.create(Path(loaded.logging.dir), loaded.name, {"recipe.yaml": to_yaml(loaded)})
        run.own()
        run.update(state="running", ranks=place.world)
        with _watched(run):
            return life(loaded, place, run)
    except MusterError as error:
        log.error("%s", error)
        os._exit(2)  # other ranks may sit in a collective; torchrun ends them


def train_system(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """`[--config FILE] [--max-parquet-files N] [key=value …]` for the system in `folder`, which the
    paths in its configurations start from."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    default = folder / "config" / "training_config.yaml"
    parser.add_argument("--config", type=Path, default=default, metavar="FILE")
    parser.add_argument("--max-parquet-files", metavar="N", help="the first N training files")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    asked = parser.parse_intermixed_args(arguments)
    changes = list(asked.overrides)
    if asked.max_parquet_files:
        changes.append(f"data.max_parquet_files={asked.max_parquet_files}")
    config = asked.config.absolute()
    os.chdir(folder)
    logging.getLogger("muster.recipe.load").setLevel(logging.WARNING)  # older names are meant here

    def before(recipe: Recipe) -> None:
        place = cluster.detect(os.environ)
        found = inventory.detect()
        environment.apply(environment.variables(found, place.world, recipe.distributed.strategy))
        provide(recipe, folder)

    return train_here(str(config), changes, before=before)


def train_with_trainer(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The same with Hugging Face's own Trainer instead of muster's loop."""
    return train_here(recipe, overrides, _trainer_life)


def _trainer_life(recipe: Recipe, place: Place, run: runs.Run | None) -> dict[str, Any]:
    try:
        import_module("accelerate")  # transformers itself asks for it only later
        from muster import hf_trainer
    except ImportError as error:
        raise LaunchError(
            f"Hugging Face's Trainer needs transformers and accelerate ({error}); install them with "
            "pip install 'muster-train[trainer]'"
        ) from None
    return hf_trainer.run_rank(recipe, place, run)


def script_arguments(arguments: Sequence[str], recipe: Path) -> tuple[str, list[str]]:
    """`[--recipe NAME_OR_FILE] [key=value …]`; without the first, the script's own `recipe`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default=str(recipe), help="one of muster's recipes, or a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    found = parser.parse_intermixed_args(arguments)
    return found.recipe, found.overrides


def visible_gpus() -> int:
    """Of either vendor, after masks such as CUDA_VISIBLE_DEVICES."""
    return torch.cuda.device_count()


def idle_words(gpus: int, command: Sequence[str]) -> str | None:
    """What to say when one process runs `command` on a machine with several GPUs."""
    if gpus < 2:
        return None
    idle = f"{gpus - 1} others are idle" if gpus > 2 else "the other one is idle"
    return (
        f"only GPU 0 of {gpus} is in use, {idle}; to use all of them: "
        f"torchrun --nproc_per_node={gpus} {shlex.join(command)}"
    )


@contextmanager
def _watched(run: runs.Run) -> Iterator[None]:
    """Show a run that this very process is part of."""
    console, ended = Console(), threading.Event()

    def state() -> str:
        return "ended" if ended.is_set() else "running"

    watcher = threading.Thread(target=follow, args=(run.path, state, console), daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        leave_word(run.path, 0, error)
        run.update(state="failed", ended=time.time(), exit_code=1)
        raise
    finally:
        ended.set()
        watcher.join(5)
    if results := run.results():
        console.print(results_table(results, str(run.path)))


def validate_here(timeout_s: float = 60.0) -> int:
    """Whether the ranks that torchrun started find each other, each on a device of its own, and add
    up correctly. Rank 0 prints a line per rank and a verdict; returns the exit code."""
    place = cluster.detect(os.environ)
    set_up(f"Rank {place.rank}")
    try:
        mesh = meshes.join(
            place.rank, place.local_rank, Layout(replicate=place.world), "auto", timeout_s
        )
    except MusterError as error:
        log.error("%s", error)
        os._exit(2)
    said = mesh.gather(_trial(mesh))
    problems = trial_problems(said)
    if mesh.first:
        for rank, found in enumerate(said):
            print(
                f"[Rank {rank}] Rank: {rank}/{mesh.world}, Local Rank (GPU): {found['local_rank']}, "
                f"{found['device']} on {found['host']}, all-reduce of {TRIAL_MIB} MiB: "
                f"{'correct' if found['correct'] else 'WRONG'}, {found['ms']:.1f} ms"
            )
        print("\n".join(problems) or f"{mesh.world} rank(s) work together", flush=True)
    mesh.barrier()
    meshes.leave()
    return 1 if problems else 0


def _trial(mesh: Mesh) -> dict[str, Any]:
    """One rank's account of an all-reduce on its device: rank r brings r + 1 everywhere."""
    gpu = mesh.device.type == "cuda"
    values = torch.full((TRIAL_MIB << 18,), mesh.rank + 1.0, device=mesh.device)
    for _ in range(2):  # the first one sets up the connections
        total = values.clone()
        started = time.perf_counter()
        dist.all_reduce(total)
        correct = bool((total == mesh.world * (mesh.world + 1) / 2).all())  # waits for the device
        ms = (time.perf_counter() - started) * 1e3
    return {
        "local_rank": mesh.local_rank,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name(mesh.device) if gpu else "CPU",
        "uuid": str(torch.cuda.get_device_properties(mesh.device).uuid) if gpu else None,
        "correct": correct,
        "ms": ms,
    }


def trial_problems(said: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the ranks that gave these accounts."""
    problems = [
        f"FAILED: rank {rank} got a wrong sum from the others; see `nvidia-smi` for errors of its GPU"
        for rank, found in enumerate(said)
        if not found["correct"]
    ]
    owners: dict[tuple[str, str], int] = {}
    for rank, found in enumerate(said):
        if found["uuid"] is None:
            continue
        first = owners.setdefault((found["host"], found["uuid"]), rank)
        if first != rank:
            problems.append(
                f"FAILED: ranks {first} and {rank} share one GPU of {found['host']}; start as many "
                "ranks as it has GPUs, and check CUDA_VISIBLE_DEVICES"
            )
    return problems


def train_spawned(recipe: str, overrides: Sequence[str] = ()) -> None:
    """Train on every device of this machine, ranks started by torch.multiprocessing."""
    found = inventory.detect()
    wanted = load(recipe, overrides).distributed.devices
    ranks = wanted if isinstance(wanted, int) else len(found.gpus) or found.cpus
    spawn(train_here, (recipe, tuple(overrides)), ranks)
