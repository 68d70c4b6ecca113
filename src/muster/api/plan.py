"""Planning a run: from Python, and for `muster plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import MemoryLimitError, MusterError, RecipeError
from muster.observe.progress import Report, silent
from muster.planner.collector import collector_paused
from muster.recipe.overrides import Overrides, as_texts

MOST_PER_NODE = 16  # that is suggested
SIMULATED = 2  # micro-batches: the second one accumulates into gradients

if TYPE_CHECKING:
    from muster.hardware.catalogue import Accelerator
    from muster.planner.planner import Plan, Planner
    from muster.planner.search import SearchResult
    from muster.recipe.load import Source
    from muster.recipe.schema import Recipe

Working = Callable[[str, str], AbstractContextManager[Report]]


def plan(
    recipe: str | Path | Mapping[str, Any],
    overrides: Overrides | None = None,
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    per_node: int | None = None,
    network: float | None = None,
    simulate: bool = False,
) -> dict[str, Any]:
    """Which strategy, what fits, how fast, and why: what `muster plan --json` prints. Needs no GPU.

    `recipe` may also be a model, such as `llama-70b`. `gpu` names an accelerator, such as `h100`, and
    `gpus` says how many; by default those of this machine. `per_node`: GPUs to a machine. `network`: GB/s
    between machines for each GPU, one way. `simulate` also builds the chosen program on a fake cluster and
    runs a step. MemoryLimitError says what would help where nothing fits.
    """
    source: Source = recipe if isinstance(recipe, Mapping) else str(recipe)
    return make_plan(
        source,
        as_texts(overrides),
        gpus=gpus,
        gpu=gpu,
        per_node=per_node,
        network=network,
        simulate=simulate,
    ).document


@dataclass(frozen=True)
class Planned:
    name: str
    planner: Planner
    found: SearchResult
    document: dict[str, Any]

    @property
    def best(self) -> Plan:
        assert self.found.best is not None
        return self.found.best


@contextmanager
def _silent(words: str, unit: str) -> Iterator[Report]:
    yield silent


@collector_paused()
def make_plan(
    recipe: Source,
    changes: Sequence[str] = (),
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    per_node: int | None = None,
    network: float | None = None,
    simulate: bool = False,
    working: Working = _silent,
    forks: bool = False,
) -> Planned:
    """The plan, as `plan` gives it, and what it was made from. `working` shows what takes its time; `forks`:
    this process may be forked, to use two cores."""
    from muster.planner.find_recipe import find_recipe

    device, count = _devices(gpu, gpus, network)
    size = _per_node(device, count, per_node)
    changes = list(changes)
    resolved = find_recipe(recipe, changes)
    if scaled := _scaled_by(resolved, count, size):
        changes += scaled
        resolved = find_recipe(recipe, changes)
    precision = _precision(resolved.training.precision, device)
    name = recipe if isinstance(recipe, str) else resolved.name

    with working("searching strategies", "layouts") as tell:
        from muster.planner import report  # torch, from here on: mistakes are found before
        from muster.planner.open_subject import open_subject
        from muster.planner.planner import Planner
        from muster.planner.recordings import Recordings
        from muster.planner.search import search
        from muster.planner.second_process import SecondProcess
        from muster.planner.time import Cluster

        with _own_task_refused(resolved):
            subject, cluster = open_subject(resolved), Cluster(device, count, size)
            planner = Planner(
                subject, cluster, precision, measure_loading=gpu is None, recordings=Recordings()
            )
            if forks:
                planner.second = SecondProcess(planner.traces_for_more)
            found = search(planner, tell=tell)
    if found.best is None:
        with working("nothing fits; searching for what would", ""):
            words = report.remedies(planner, found)
        raise MemoryLimitError(
            f"{name} on {count} × {device.title}: nothing fits: " + "; ".join(words)
        )
    document = report.as_dict(planner, found, name)
    if simulate:
        settings = report.settings(found.best)
        again = open_subject(find_recipe(recipe, [*changes, *settings]))
        with working("simulating on a fake cluster", "ranks") as tell:
            document["simulation"] = _simulate(again, found.best, planner, tell)
    return Planned(name, planner, found, document)


@contextmanager
def _own_task_refused(recipe: Recipe) -> Iterator[None]:
    """A user's model may do what fake tensors cannot; it can then be trained, and not be planned."""
    from muster.recipe.own_task import parse

    try:
        yield
    except Exception as error:
        own = parse(recipe.task)
        if own is None or isinstance(error, MusterError):
            raise
        raise RecipeError(
            f"{own.label} cannot be planned: its model was recorded with tensors that have no values, and "
            f"failed ({type(error).__name__}: {str(error).splitlines()[0]}); train it with the strategy of "
            "your choice"
        ) from error


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


def _devices(gpu: str | None, gpus: int | None, network: float | None) -> tuple[Accelerator, int]:
    """As given by the options, else this machine's."""
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
                "`muster plan --gpu list` names all"
            )
        first = here.gpus[0]
        known = catalogue.recognise(first.name, first.memory_gib)
        if known is None:
            raise RecipeError(
                f"--gpu: {first.name} is not in the catalogue; measure it with `muster bench device`, "
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


def _simulate(subject: Any, best: Plan, planner: Planner, tell: Report) -> list[dict[str, Any]]:
    from muster.planner.simulate import simulate_all

    choice = best.choice
    few = min(choice.accumulation, SIMULATED)
    found = simulate_all(
        subject,
        choice.layout,
        recipe=subject.recipe,
        precision=planner.precision,
        rows=choice.rows,
        microbatches=choice.microbatches,
        accumulation=few,
        tell=tell,
    )
    results = [result.as_dict() for result in found]
    if few < choice.accumulation:
        note = f"run and counted: {few} of a step's {choice.accumulation} micro-batches, which are equal"
        results[0]["notes"] = [*results[0]["notes"], note]
    return results
