"""`muster train`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from muster.api.train import (
    Started,
    least_world,
    rank_count,
    resolve,
    start,
    strategy_changes,
)
from muster.cli.common import (
    AddressOption,
    NodeRankOption,
    Overrides,
    PortOption,
    RehearseOption,
    begin_rehearsal,
    console,
    program,
    shown,
)
from muster.cli.manage import show_until_end
from muster.entrypoints.open_run import (
    open_run,
    settle_task,
)
from muster.errors import LaunchError, RecipeError

if TYPE_CHECKING:
    import subprocess

    from muster.hardware.inventory import Inventory
    from muster.launch.cluster import RankInfo
    from muster.run_directory import Run


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A shipped recipe, a YAML file, or a run to continue."
        ),
    ] = "speech",
    overrides: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N|all|MIN:MAX",
            help="Ranks: that many GPUs, or CPU ranks where there is none (all: one per core; MIN:MAX: "
            "goes on without a GPU that fails). "
            "Default: every GPU, or one process on all cores.",
            show_default=False,
        ),
    ] = None,
    rehearse: RehearseOption = None,
    strategy: Annotated[
        str | None, typer.Option(help="Short for distributed.strategy=NAME.")
    ] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed_config",
            "--deepspeed-config",
            metavar="FILE",
            help="A ready DeepSpeed JSON, checked against the recipe; its stage is the strategy.",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run and return at once.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Short for logging.profile=3: traces of 3 steps, and where their time went.",
        ),
    ] = False,
    run_name: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="NAME",
            help="Name of the run directory; one that is there already goes on.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        Literal["local", "slurm", "kubernetes"],
        typer.Option(help="Who starts the ranks: this machine, or a cluster's scheduler."),
    ] = "local",
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Machines; say so on each of them. MIN:MAX: as many as there are, while they come and go.",
            show_default=False,
        ),
    ] = None,
    node_rank: NodeRankOption = None,
    master_addr: AddressOption = None,
    master_port: PortOption = None,
) -> None:
    """Train. The run lives on its own: Ctrl-C or a closed terminal leaves it running."""
    from muster.launch import cluster

    changes = list(overrides or [])
    if strategy:
        changes += strategy_changes(strategy, changes)
    if deepspeed_config:
        changes += _deepspeed(deepspeed_config, given=changes)
    if profile and not any(word.startswith("logging.profile=") for word in changes):
        changes.append("logging.profile=3")
    rank_info = cluster.detect(os.environ)
    if rehearse:
        _check_rehearsal(rehearse, on, rank_info)
        begin_rehearsal(rehearse, gpus)
    if on != "local":
        return _submit(on, recipe, changes, gpus, run_name, nodes or "1", detach)
    if rank_info.world > 1 and not cluster.slurm_launcher(os.environ):
        flags = {"--gpus": gpus, "--nodes": nodes, "--detach": detach}
        given = [name for name, value in flags.items() if value]
        return _as_rank(recipe, changes, rank_info, run_name, given)
    started = start(
        recipe,
        changes,
        gpus=gpus,
        rehearse=rehearse,
        name=run_name,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        console=console,
    )
    if started.node.rank > 0:
        return _follow_node(started)
    console.print(_run(started.run, f" on {_devices(started.found, started.ranks)}"))
    _follow(started, detach)


def _run(run: Run, words: str) -> Text:
    return Text.assemble("run ", (run.name, "bold"), words)


def _check_rehearsal(ranks: int, on: str, rank_info: RankInfo) -> None:
    if on != "local":
        raise LaunchError(f"--rehearse shares the GPUs of this machine; leave out --on {on}")
    if rank_info.world > 1 and rank_info.local_world != ranks:
        raise LaunchError(
            f"--rehearse {ranks}, but {rank_info.launcher} has started {rank_info.local_world} ranks on "
            "this machine; give both the same number"
        )


def _follow(started: Started, detach: bool) -> None:
    from muster.launch.signals import stop_on_signal

    run, node = started.run, started.node
    if node.nodes > 1:
        ranks = "" if node.least else "--node-rank 1 … "
        console.print(
            f"node 0 of {node.asked}; the others: --nodes {node.asked} {ranks}"
            f"--master-addr {node.address} --master-port {node.port}",
            soft_wrap=True,
        )
    if detach:
        console.print(f"watch it: {program()} watch {shown(run)}")
        return
    stop_on_signal(run)  # as a container's first process, this is the one that is told to go
    show_until_end(run, events=started.events)


def _as_rank(
    recipe: str, changes: list[str], rank_info: RankInfo, run_name: str | None, flags: list[str]
) -> None:
    """Someone else started one process per rank, and this is one of them."""
    from muster.entrypoints.script import train_here

    if flags:
        raise LaunchError(
            f"{rank_info.launcher} has started {rank_info.world} ranks already, and this is rank {rank_info.rank}; "
            f"leave {' and '.join(flags)} out, or start one process per machine instead"
        )
    train_here(recipe, changes, run_name=run_name)


def _follow_node(started: Started) -> None:
    """Not node 0, which shows the run."""
    from muster import run_directory
    from muster.launch import local, signals
    from muster.observe.failure import failure_panel

    run, node, process = started.run, started.node, started.supervisor
    console.print(_run(run, f", log: {shown(run)}/{local.log_name(node)}"))
    leaving: list[int] = []

    def leave() -> None:
        leaving.append(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)

    if node.least:
        signals.leave_on_signal(run, leave)
    else:
        signals.stop_on_signal(run)
    try:
        code = _wait(process, run.path / local.log_name(node)) if node.least else process.wait()
    except KeyboardInterrupt:
        console.print(f"\nnode {node.label} goes on (process {process.pid})")
        raise typer.Exit(130) from None
    if leaving:
        raise typer.Exit(run_directory.SIGNALLED)
    told = local.node_report(run, node)
    found = json.loads(told.read_text()) if told.is_file() else run.info().get("failure")
    if code and found:
        console.print(failure_panel(found, shown(run)))
    stopped = run.state() == "stopped" and run.signalled()
    raise typer.Exit(code or (run_directory.SIGNALLED if stopped else 0))


def _wait(process: subprocess.Popen[bytes], path: Path) -> int:
    """For the supervisor of a node that comes and goes, whose log says what it waits for."""
    from muster.observe.console import Log

    log = Log(path, end=0)
    while True:
        code = process.poll()
        for line in log.new():
            console.print(line, soft_wrap=True, markup=False)
        if code is not None:
            return code
        time.sleep(0.2)


def _submit(
    on: str,
    source: str,
    changes: list[str],
    asked: str | None,
    name: str | None,
    asked_nodes: str,
    detach: bool,
) -> None:
    """Hand the run over to a scheduler. Ranks are GPUs there, unless the recipe asks for gloo."""
    from muster.hardware import inventory
    from muster.launch import cluster, kubernetes, secret, slurm
    from muster.launch.job import ClusterJob
    from muster.observe.console import events_to_come
    from muster.parallel.layout import layout_for
    from muster.recipe.batch import solve

    least, nodes = cluster.count_range("--nodes", asked_nodes)
    existing, recipe = resolve(source, changes, console=console)
    ranks = rank_count(recipe, asked, inventory.detect(), elsewhere=True)
    world = ranks * nodes if least is None else least_world(recipe, least, ranks)
    layout = layout_for(recipe.distributed, world, local_world=ranks)
    solve(recipe.training, layout.data_ranks)
    recipe = settle_task(recipe)
    scheduler = kubernetes if on == "kubernetes" else slurm
    scheduler.check(recipe, nodes, least)
    shown_on = console if on == "slurm" else None
    run, claim, recipe = open_run(recipe, ranks * nodes, ranks, existing, name, shown_on)
    claim.close()  # whoever the scheduler starts claims it
    gpus = recipe.distributed.backend != "gloo"
    given = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_"))}
    own = secret.from_environment()
    where = run.path.resolve()
    job = ClusterJob(where, recipe, nodes, ranks, gpus, given, least=least, secret=own)
    if on == "kubernetes":
        console.print(kubernetes.submit(job), soft_wrap=True)
        return
    events = events_to_come(run.path)
    number = slurm.submit(job)
    console.print(_run(run, f" is SLURM job {number}"))
    if detach:
        console.print(f"watch it: {program()} watch {shown(run)}")
        return
    show_until_end(run, events=events)


def _deepspeed(path: Path, given: list[str]) -> list[str]:
    """The file, and the strategy it means where none is asked for."""
    from muster.parallel.deepspeed_config import read

    changes = [f"distributed.deepspeed.config={path.resolve()}"]
    zero = read(path).get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    asked = any(word.startswith("distributed.strategy=") for word in given)
    if stage not in (1, 2, 3) and not asked:
        raise RecipeError(
            f"{path} has no zero_optimization.stage of 1, 2 or 3; add it, or say --strategy zero2"
        )
    if not asked:
        changes.append(f"distributed.strategy=zero{stage}")
    return changes


def _devices(found: Inventory, ranks: int) -> str:
    """What the run uses and, when something stays idle, how to use it."""
    from muster.hardware import rehearsal

    if not found.gpus:
        from muster.hardware.cpus import asked_threads

        share = asked_threads() or max(1, found.cpus // ranks)
        return f"{ranks} CPU rank(s) × {share} thread(s), {found.describe()}"
    if rehearsal.active():
        return (
            f"{found.describe()}: a rehearsal of {ranks} ranks, with the losses, checkpoints and memory of "
            "as many GPUs, but not their speed"
        )
    words = f"{ranks} of {found.describe()}"
    if ranks < len(found.gpus):
        words += (
            f"\n{len(found.gpus) - ranks} GPU(s) stay idle: --gpus {len(found.gpus)} uses all of them "
            "(start_training.sh: --distributed)"
        )
    return words
