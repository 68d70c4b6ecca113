"""Starting a run: from Python, and for `muster train`.

Nothing here imports torch: the supervisor, a program of its own, imports it meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muster.api.run import Run
from muster.entrypoints.open_run import (
    await_lost_owner,
    check_before_launch,
    existing_run,
    open_run,
)
from muster.errors import LaunchError, RecipeError
from muster.recipe.overrides import Overrides, as_texts

if TYPE_CHECKING:
    from io import TextIOWrapper

    from rich.console import Console

    from muster import run_directory
    from muster.hardware.inventory import Inventory
    from muster.launch.cluster import Node
    from muster.launch.standby import Standby
    from muster.observe.console import Tail
    from muster.recipe.load import Source
    from muster.recipe.schema import Recipe


def train(
    recipe: str | Path | Mapping[str, Any] | Run,
    overrides: Overrides | None = None,
    *,
    gpus: int | str | None = None,
    strategy: str | None = None,
    name: str | None = None,
    nodes: int | str | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    wait: bool = False,
) -> Run:
    """Start a run, as `muster train --detach` does, and return it at once.

    The run has processes of its own: it goes on when this process ends. What is known to fail is
    refused before anything is started.

    `recipe`: a shipped recipe's name, a YAML file, the document as a dict (`defaults` lists what it builds
    on), or a run to continue. `overrides`: a dict, or a list of `key=value`. `gpus`: ranks on this machine;
    by default every GPU, or one process on all cores; `all`, or MIN:MAX. `strategy` is short for `distributed.strategy`.
    `name` names the run directory; one that is there already goes on. `nodes` and what follows are those
    of `muster train`: call it on each machine. With `wait`, return when the run has ended; see `Run.wait`.
    """
    from muster.launch import cluster

    rank_info = cluster.detect(os.environ)
    if rank_info.world > 1 and not cluster.slurm_launcher(os.environ):
        raise LaunchError(
            f"muster.train starts the ranks itself, but {rank_info.launcher} has started {rank_info.world} "
            f"already, and this is rank {rank_info.rank}; run this script with plain python, or "
            "`muster train` by the launcher"
        )
    changes = as_texts(overrides)
    source: Source = recipe if isinstance(recipe, Mapping) else str(recipe)
    if isinstance(recipe, Run):
        source = str(recipe.path)
    started = start(
        source,
        [*changes, *(strategy_changes(strategy, changes) if strategy else [])],
        gpus=gpus,
        name=name,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
    )
    run = Run(started.run.path)
    return run.wait() if wait else run


@dataclass(frozen=True)
class Started:
    run: run_directory.Run
    node: Node  # which machine this is
    ranks: int  # on each machine; at most, of an elastic run
    found: Inventory
    supervisor: subprocess.Popen[bytes]
    events: Tail  # of this start, without those of earlier ones


def start(
    recipe: Source,
    changes: Sequence[str],
    *,
    gpus: int | str | None = None,
    rehearse: int | None = None,
    name: str | None = None,
    nodes: int | str | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    console: Console | None = None,
) -> Started:
    """Check, make or find the run directory, and start this machine's supervisor. A `console` shows
    what takes long."""
    from muster.launch.standby import Standby

    standby = Standby()  # the first thing: it takes seconds
    try:
        from muster.hardware import inventory
        from muster.launch import addresses, cluster

        node = cluster.node(os.environ, nodes or 0, node_rank, master_addr or "", master_port or 0)
        if node.least and node.rank == 0 and isinstance(recipe, str):
            await_lost_owner(recipe, console)
        existing, resolved = resolve(recipe, changes, node.rank > 0, console)
        found = inventory.detect()
        least, gpus = _range(gpus, found)
        ranks = rehearse or rank_count(resolved, gpus, found)
        world = ranks * node.nodes
        if node.least or least:
            world = least_world(resolved, node.least or 1, least or ranks)
        resolved = check_before_launch(resolved, world, ranks, existing is not None)
        addresses.check(node)
        supervisor = Supervisor(node, ranks, least, standby)
        if node.rank > 0:
            started = _join(supervisor, resolved, found, console)
        else:
            started = _begin(supervisor, resolved, found, existing, name, console)
    except BaseException:
        standby.end()
        raise
    # A process that ends is a zombie until its parent, which may live long, has asked for its exit code.
    threading.Thread(target=started.supervisor.wait, daemon=True, name="supervisor").start()
    return started


@dataclass(frozen=True)
class Supervisor:
    """What this machine's supervisor is told."""

    node: Node
    ranks: int
    least_ranks: int | None
    standby: Standby

    def start(
        self, run: run_directory.Run, claim: TextIOWrapper | None = None
    ) -> subprocess.Popen[bytes]:
        from muster.launch import local

        return local.start(run, self.ranks, self.node, claim, self.standby, self.least_ranks)


def _range(gpus: int | str | None, found: Inventory) -> tuple[int | None, int | str | None]:
    """Of MIN:MAX the first, and as many of the second as there are; of anything else, itself."""
    if not isinstance(gpus, str) or ":" not in gpus:
        return None, gpus
    from muster.hardware import rehearsal
    from muster.launch import cluster

    least, most = cluster.count_range("--gpus", gpus)
    if found.gpus and not rehearsal.active():
        most = min(most, len(found.gpus))
    if most < (least or 1):
        raise LaunchError(
            f"--gpus {gpus}, but this machine offers {found.describe()}; lower the first"
        )
    return least, most


def least_world(recipe: Recipe, nodes: int, ranks: int) -> int:
    """Ranks that an elastic run has with its fewest `nodes` and `ranks` on each; refused where none of them
    can train."""
    from muster.launch.share import share
    from muster.recipe.batch import scaling_words

    if recipe.training.scale_with_ranks != "none":
        raise RecipeError(
            f"{scaling_words(recipe.training)}: the number of ranks of an elastic run changes, and its global "
            "batch must not; give training.global_batch_size, and training.scale_with_ranks=none"
        )
    return sum(share(recipe, [ranks] * nodes))


def _begin(
    supervisor: Supervisor,
    recipe: Recipe,
    found: Inventory,
    existing: run_directory.Run | None,
    name: str | None,
    console: Console | None,
) -> Started:
    from muster.observe.console import events_to_come

    node, ranks = supervisor.node, supervisor.ranks
    run, claim, _ = open_run(recipe, ranks * node.nodes, ranks, existing, name, console)
    events = events_to_come(run.path)
    with claim:  # the supervisor holds it too, from its start to its end
        run.begin()
        process = supervisor.start(run, claim)
    return Started(run, node, ranks, found, process, events)


def _join(
    supervisor: Supervisor, recipe: Recipe, found: Inventory, console: Console | None
) -> Started:
    """Not node 0: its run is this node's too."""
    from muster.launch import published
    from muster.observe.console import events_to_come

    node, ranks = supervisor.node, supervisor.ranks
    if console:
        which = "one" if node.least else f"node {node.rank}"
        console.print(
            f"{which} of {node.asked} nodes: looking for node 0 at {node.address}:{node.port}"
        )
    run = published.join_run(node, recipe)
    events = events_to_come(run.path)
    return Started(run, node, ranks, found, supervisor.start(run), events)


def resolve(
    recipe: Source,
    changes: Sequence[str],
    runs_elsewhere: bool = False,
    console: Console | None = None,
) -> tuple[run_directory.Run | None, Recipe]:
    """The run to continue, if `recipe` is one, and the validated recipe."""
    existing = existing_run(recipe, runs_elsewhere) if isinstance(recipe, str) else None
    if existing is None:
        return None, read_recipe(recipe, changes, console)
    from muster.recipe.recorded import as_recorded

    return existing, as_recorded(read_recipe(str(existing.path / "recipe.yaml"), changes, console))


def read_recipe(
    recipe: Source, changes: Sequence[str] = (), console: Console | None = None
) -> Recipe:
    """The recipe; a `console` is told which older key names it used."""
    from muster.recipe.load import read

    try:
        loaded = read(recipe, changes)
    except RecipeError:
        if isinstance(recipe, str) and (words := _of_a_model(recipe)):
            raise RecipeError(words) from None
        raise
    if console:
        for old, new in loaded.renamed.items():
            console.print(f"{old} is read as {new}", style="dim", markup=False)
    return loaded.recipe


def _of_a_model(name: str) -> str | None:
    """How to train what is a model and no recipe; a plan takes both."""
    from muster.planner.find_recipe import as_recipe

    recipe, needed = as_recipe(name)
    if recipe == name:
        return None
    return (
        f"{name}: a model, not a recipe; train it by the recipe {recipe}: "
        f"muster train {' '.join([recipe, *needed])}"
    )


def strategy_changes(name: str, given: Sequence[str]) -> list[str]:
    """The strategy; sizes and files of another one, left in a recipe or a run, do not hold it up."""
    from muster.parallel.layout import unused_keys

    told = {word.partition("=")[0] for word in given}
    others = [f"{key}={value}" for key, value in unused_keys(name).items() if key not in told]
    return [f"distributed.strategy={name}", *others]


def rank_count(
    recipe: Recipe, asked: int | str | None, found: Inventory, elsewhere: bool = False
) -> int:
    """Ranks on each machine; what a cluster's machines offer is not known here."""
    if asked == "all" and elsewhere:
        raise LaunchError("--gpus all: say how many GPUs each node has, as in --gpus 8")
    if elsewhere and ":" in str(asked):
        raise LaunchError(
            f"--gpus {asked}: a scheduler gives each node a fixed number of GPUs; give one number. --nodes may be MIN:MAX"
        )
    if asked not in (None, "all") and not (str(asked).isdigit() and int(asked) > 0):
        raise LaunchError(f"--gpus: got {asked!r}, expected a whole number above 0, or all")
    wanted: int | Literal["all", "auto"] = recipe.distributed.devices
    if asked is not None:
        wanted = "all" if asked == "all" else int(asked)
    return found.rank_count(wanted, share=elsewhere)
