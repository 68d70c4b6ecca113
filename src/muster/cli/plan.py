"""`muster plan`."""

from __future__ import annotations

import atexit
import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.common import Overrides, console, program, working
from muster.errors import MemoryLimitError, RecipeError
from muster.plan.collector import collector_paused

MOST_PER_NODE = 16  # that is suggested
SIMULATED = 2  # micro-batches: the second one accumulates into gradients

if TYPE_CHECKING:
    from muster.hardware.catalogue import Accelerator
    from muster.plan.planner import Plan, Planner
    from muster.plan.search import SearchResult
    from muster.recipe.schema import Recipe


@collector_paused()
def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A shipped recipe, a YAML file, or a model such as llama-70b."
        ),
    ] = "",
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many. Default: this machine's, or with --gpu a usual machine of it.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which, such as h100, a100-40, 4090; `list` names all. Default: this machine's.",
            show_default=False,
        ),
    ] = None,
    per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs to a machine. Default: as usual.", show_default=False),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            metavar="GB/S",
            help="Between machines, for each GPU, one way. Default: as usual for it.",
            show_default=False,
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Build the chosen program on a fake cluster and run a step."
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic behind the answer.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Draw memory (PATH-memory) and scaling (PATH-scaling) as PNG and SVG.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Which strategy, what fits, how fast, and why. Needs no GPU."""
    if gpu == "list":
        return _list()
    if not recipe:
        raise RecipeError(
            f"RECIPE: name a recipe or a model: {program()} plan gpt2 --gpus 8 --gpu h100"
        )
    from muster.plan.find_recipe import find_recipe

    device, count = _devices(gpu, gpus, network)
    size = _per_node(device, count, per_node)
    changes = list(overrides or [])
    resolved = find_recipe(recipe, changes)
    if scaled := _scaled_by(resolved, count, size):
        changes += scaled
        resolved = find_recipe(recipe, changes)
    precision = _precision(resolved.training.precision, device)

    atexit.register(gc.freeze)  # else Python looks through all of torch's objects as it ends
    with working("searching strategies"):
        from muster.cli import plan_table  # torch, from here on: mistakes are found before
        from muster.plan import report
        from muster.plan.open_subject import open_subject
        from muster.plan.planner import Planner
        from muster.plan.recordings import Recordings
        from muster.plan.search import search
        from muster.plan.time import Cluster

        subject, cluster = open_subject(resolved), Cluster(device, count, size)
        planner = Planner(
            subject, cluster, precision, measure_loading=gpu is None, recordings=Recordings()
        )
        found = search(planner)
    if found.best is None:
        with working("nothing fits; searching for what would"):
            words = report.remedies(planner, found)
        raise MemoryLimitError(
            f"{recipe} on {count} × {device.title}: nothing fits: " + "; ".join(words)
        )
    document = report.as_dict(planner, found, recipe)
    if simulate:
        settings = report.settings(found.best)
        again = open_subject(find_recipe(recipe, [*changes, *settings]))
        document["simulation"] = _simulate(again, found.best, planner)
    if plot:
        with working("planning for other numbers of GPUs"):
            document["plots"] = [str(path) for path in _plot(plot, planner, found, recipe)]
    if as_json:
        print(json.dumps(document, indent=2))
        return
    plan_table.show(planner, found, recipe, changes, top)
    if explain:
        console.print("\n[bold]The arithmetic[/]")
        for line in report.arithmetic(planner, found.best):
            console.print(f"  {line}", soft_wrap=True)
    if simulate:
        plan_table.show_simulation(document["simulation"], found.best)
    for path in document.get("plots", []):
        console.print(f"drawn: {path}")


def _scaled_by(recipe: Recipe, world: int, per_node: int) -> list[str]:
    """What `training.scale_with_ranks` makes of the recipe at a first start there, as overrides."""
    if recipe.training.scale_with_ranks == "none":
        return []
    from muster.parallel.layout import layout_for
    from muster.recipe.batch import settle

    layout = layout_for(recipe.distributed, world, local_world=per_node)
    settled = settle(recipe, layout.data_ranks)
    before, after = recipe.training.model_dump(), settled.training.model_dump()
    return [f"training.{key}={value}" for key, value in after.items() if value != before[key]]


def _list() -> None:
    from rich.table import Table

    from muster.hardware import catalogue

    table = Table("name", "", "GiB", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "per machine")
    table.columns[0].no_wrap = True  # the value for --gpu
    for name in catalogue.names():
        device = catalogue.own(catalogue.find(name))
        table.add_row(
            name,
            device.title,
            f"{device.memory_gib:.1f}",
            f"{device.matrix_tflops.get('bf16', 0):.0f}"
            if "bf16" in device.matrix_tflops
            else "none",
            f"{device.memory_gb_per_s:,.0f}",
            f"{device.link} {device.link_gb_per_s:.0f}",
            str(device.per_node),
        )
    console.print(table)


def _devices(gpu: str | None, gpus: int | None, network: float | None) -> tuple[Accelerator, int]:
    """As given by the options, else this machine's."""
    import dataclasses

    from muster.hardware import catalogue, inventory

    if gpu is not None and gpu.lower() == "cpu":  # its ranks share one host
        count = gpus or 1
        device = dataclasses.replace(catalogue.own(catalogue.cpu(count)), per_node=count)
    elif gpu is not None:
        device = catalogue.own(catalogue.find(gpu))
        count = gpus or device.per_node
    else:
        here = inventory.detect()
        if not here.gpus:
            raise RecipeError(
                "--gpu: this machine has none, so name one to plan for: --gpu h100 --gpus 8; "
                f"`{program()} plan {sys.argv[2] if len(sys.argv) > 2 else 'RECIPE'} --gpu list` names all"
            )
        first = here.gpus[0]
        known = catalogue.recognise(first.name, first.memory_gib)
        if known is None:
            raise RecipeError(
                f"--gpu: {first.name} is not in the catalogue; measure it with `{program()} bench device`, "
                "or name a similar one"
            )
        device, count = catalogue.own(known), gpus or len(here.gpus)
    if network is not None:
        device = dataclasses.replace(
            device,
            network_gb_per_s=network,
            measured={k: v for k, v in device.measured.items() if k != "network_gb_per_s"},
        )
    return device, count


def _per_node(device: Accelerator, count: int, per_node: int | None) -> int:
    size = per_node or device.per_node
    if count > size and count % size:
        from muster.recipe.describe import either

        below = count - count % size
        fitting = [str(n) for n in range(min(count, MOST_PER_NODE), 1, -1) if count % n == 0]
        other = f", or say how many each machine has: --per-node {either(fitting)}"
        raise RecipeError(
            f"--gpus: {count} are not a whole number of machines of {size}; use {below} or "
            f"{below + size}{other if fitting else ''}"
        )
    return size


def _precision(asked: str, device: Accelerator) -> str:
    if asked == "auto":
        return "bf16" if "bf16" in device.matrix_tflops and device.name != "cpu" else "fp32"
    if asked == "fp8" and device.float8:
        return "bf16"  # the precision of everything else
    if asked not in device.matrix_tflops:
        raise RecipeError(
            f"training.precision: {device.title} has no {asked}; use "
            f"{' or '.join(device.matrix_tflops)}"
        )
    return asked


def _plot(path: Path, planner: Planner, found: SearchResult, recipe: str) -> list[Path]:
    from muster.plan.memory import GIB, PARTS
    from muster.plan.picture import draw_memory, draw_scaling

    best = found.best
    assert best is not None
    names = (
        [f"stage {i}" for i in range(len(best.estimates))]
        if len(best.estimates) > 1
        else ["each rank"]
    )
    stacks = {
        name: {part: estimate.parts[part] / GIB for part in PARTS}
        for name, estimate in zip(names, best.estimates, strict=True)
    }
    title = f"{recipe} on {planner.cluster.world} × {planner.cluster.device.title}"
    drawn = draw_memory(
        path.with_name(f"{path.name}-memory"), stacks, planner.cluster.device.memory_gib, title
    )
    points = _scaling(planner)
    here = (planner.cluster.world, best.samples_per_s)
    return drawn + draw_scaling(
        path.with_name(f"{path.name}-scaling"), {"planned": points}, "samples/s", title, chosen=here
    )


def _scaling(planner: Planner) -> list[tuple[int, float]]:
    """The best plan's throughput on 1, 2, 4, … devices, up to twice the given number."""
    from muster.plan.search import search
    from muster.plan.time import Cluster

    points, world = [], 1
    most = min(2 * planner.cluster.world, planner.subject.recipe.training.global_batch_size)
    while world <= most:
        cluster = Cluster(planner.cluster.device, world, planner.cluster.per_node)
        found = search(planner.on(cluster))
        if found.best is not None:
            points.append((world, found.best.samples_per_s))
        world *= 2
    return points


def _simulate(subject: Any, best: Plan, planner: Planner) -> list[dict[str, Any]]:
    from muster.plan.simulate import simulate_all

    choice = best.choice
    few = min(choice.accumulation, SIMULATED)
    with working("simulating on a fake cluster"):
        found = simulate_all(
            subject,
            choice.layout,
            recipe=subject.recipe,
            precision=planner.precision,
            rows=choice.rows,
            microbatches=choice.microbatches,
            accumulation=few,
        )
    results = [result.as_dict() for result in found]
    if few < choice.accumulation:
        note = f"run and counted: {few} of a step's {choice.accumulation} micro-batches, which are equal"
        results[0]["notes"] = [*results[0]["notes"], note]
    return results
