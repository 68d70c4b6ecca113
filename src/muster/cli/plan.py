"""`muster plan`."""

from __future__ import annotations

import atexit
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.api.plan import make_plan
from muster.cli.common import Overrides, console, program
from muster.errors import RecipeError
from muster.observe.progress import Report, silent, working
from muster.planner.collector import collector_paused

MOST_PER_NODE = 16  # that is suggested
SIMULATED = 2  # micro-batches: the second one accumulates into gradients

if TYPE_CHECKING:
    from muster.planner.planner import Planner
    from muster.planner.search import SearchResult


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
    changes = list(overrides or [])
    atexit.register(gc.freeze)  # else Python looks through all of torch's objects as it ends
    planned = make_plan(
        recipe,
        changes,
        gpus=gpus,
        gpu=gpu,
        per_node=per_node,
        network=network,
        simulate=simulate,
        working=working,
        forks=True,
    )
    from muster.cli import plan_table
    from muster.planner import report

    planner, found, document = planned.planner, planned.found, planned.document
    if plot:
        with working("planning for other numbers of GPUs", "numbers") as tell:
            document["plots"] = [str(path) for path in _plot(plot, planner, found, recipe, tell)]
    if as_json:
        print(json.dumps(document, indent=2))
        return
    plan_table.show(planner, found, recipe, changes, top)
    if explain:
        console.print("\nThe arithmetic", style="bold")
        for line in report.arithmetic(planner, planned.best):
            console.print(f"  {line}", soft_wrap=True)
    if simulate:
        plan_table.show_simulation(document["simulation"], planned.best)
    for path in document.get("plots", []):
        console.print(f"drawn: {path}")


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


def _plot(
    path: Path, planner: Planner, found: SearchResult, recipe: str, tell: Report = silent
) -> list[Path]:
    from muster.planner.memory import GIB, PARTS
    from muster.planner.picture import draw_memory, draw_scaling

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
    points = _scaling(planner, tell)
    here = (planner.cluster.world, best.samples_per_s)
    return drawn + draw_scaling(
        path.with_name(f"{path.name}-scaling"), {"planned": points}, "samples/s", title, chosen=here
    )


def _scaling(planner: Planner, tell: Report = silent) -> list[tuple[int, float]]:
    """The best plan's throughput on 1, 2, 4, … devices, up to twice the given number."""
    from muster.planner.search import search
    from muster.planner.time import Cluster

    most = min(2 * planner.cluster.world, planner.subject.recipe.training.global_batch_size)
    worlds = [1 << power for power in range(most.bit_length())]
    points = []
    for number, world in enumerate(worlds):
        tell(number, len(worlds))
        cluster = Cluster(planner.cluster.device, world, planner.cluster.per_node)
        found = search(planner.on(cluster))
        if found.best is not None:
            points.append((world, found.best.samples_per_s))
    return points
