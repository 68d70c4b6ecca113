"""A plan on the terminal."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from rich.text import Text

from muster.cli.common import console, program

if TYPE_CHECKING:
    from muster.planner.planner import Plan, Planner
    from muster.planner.search import SearchResult


def show(
    planner: Planner, found: SearchResult, recipe: str, overrides: list[str], top: int
) -> None:
    from rich.table import Table

    from muster.planner import report
    from muster.planner.memory import GIB

    best, cluster = found.best, planner.cluster
    assert best is not None
    console.print(
        Text.assemble(
            (recipe, "bold"),
            f", {_count(planner.subject.parameters)} parameters, global batch "
            f"{best.samples}, on {cluster.world} × {report.describe_device(cluster.device)}, "
            f"{planner.precision}\n",
        ),
        soft_wrap=True,
    )
    for line in report.decision_tree(planner, found):
        console.print(f"  {line}", soft_wrap=True)
    table = Table(
        "", "layout", "micro-batch", "GiB a rank", "s a step", "samples/s", title_justify="left"
    )
    for i, plan in enumerate(report.distinct(found.plans)[:top]):
        table.add_row(
            "→" if i == 0 else "",
            f"{plan.strategy}: {plan.choice.layout}"
            if plan.choice.layout.world > 1
            else plan.strategy,
            _how(plan),
            f"{plan.memory.total / GIB:.1f}",
            f"{plan.duration.total:.3g}",
            f"{plan.samples_per_s:,.0f}"
            if plan.samples_per_s >= 1000
            else f"{plan.samples_per_s:.4g}",
        )
    console.print()
    console.print(table)
    console.print(_parts(best, planner))
    if found.rejected:
        console.print("\nRejected", style="bold")
        for name, reason in found.rejected.items():
            console.print(f"  {name}: {reason}", soft_wrap=True)
    console.print()
    console.print(_command(recipe, overrides, best, cluster), soft_wrap=True)


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"


def _command(recipe: str, overrides: list[str], best: Plan, cluster: Any) -> str:
    """The command that follows the plan; to be run on every node."""
    from muster.planner import report
    from muster.planner.find_recipe import as_recipe

    name, needed = as_recipe(recipe)
    where = [f"--gpus {min(cluster.world, cluster.per_node)}"]
    if cluster.nodes > 1:
        where += [f"--nodes {cluster.nodes}", "--node-rank K --master-addr ADDRESS"]
    last = {s.partition("=")[0]: s for s in (*needed, *overrides, *report.settings(best))}
    settings = [shlex.quote(s) for s in last.values()]
    return " ".join([program(), "train", name, *where, *settings])


def _how(plan: Plan) -> str:
    from muster.planner.planner import choice_summary

    return choice_summary(plan.choice).removeprefix("micro-batch ")


def _parts(plan: Plan, planner: Planner) -> Any:
    """Memory and time by part."""
    from rich.table import Table

    from muster.planner.memory import GIB

    table = Table("memory of the largest rank", "GiB", "a step", "s")
    memory = [(k, f"{v / GIB:.2f}") for k, v in plan.memory.parts.items() if v]
    memory += [("of", f"{planner.capacity / GIB:.1f}")]
    if plan.memory.host:
        memory.append(("offloaded to the host", f"{plan.memory.host / GIB:.2f}"))
    time = [(k.replace("_", " "), f"{v:.4g}") for k, v in vars(plan.duration).items() if v]
    for i in range(max(len(memory), len(time))):
        table.add_row(
            *(memory[i] if i < len(memory) else ("", "")), *(time[i] if i < len(time) else ("", ""))
        )
    return table


def show_simulation(results: list[dict[str, Any]], best: Plan) -> None:
    from rich.table import Table

    from muster.planner.memory import GIB

    title = ("\nOn a fake cluster", "bold")
    console.print(Text.assemble(title, ": the program, built and run for one step"))
    table = Table("rank", "layers", "parameters", "peak GiB", "of which", "messages", "GB sent")
    for result in results:
        parts = [f"{k} {v / GIB:.2f}" for k, v in result["at_peak"].items() if v > 0.005 * GIB]
        counts: dict[str, list[float]] = {}
        for sent in result["sent"]:
            total = counts.setdefault(sent["kind"], [0, 0.0])
            total[0] += sent["times"]
            total[1] += sent["times"] * sent["bytes"] / 1e9
        table.add_row(
            str(result["rank"]),
            str(result["layers"]),
            f"{result['parameters'] / 1e6:,.1f} M",
            f"{result['peak'] / GIB:.2f}",
            "\n".join(parts),
            "\n".join(f"{int(n)} {kind}" for kind, (n, _) in counts.items()),
            "\n".join(f"{size:.3g}" for _, size in counts.values()),
        )
    console.print(table)
    worst = max(result["peak"] for result in results)
    console.print(
        f"peak {worst / GIB:.2f} GiB without the CUDA context and NCCL (planned: "
        f"{best.memory.allocated / GIB:.2f}, with cuBLAS's); bytes are this rank's input; "
        f"took {sum(result['seconds'] for result in results):.0f} s",
        soft_wrap=True,
    )
    for note in dict.fromkeys(note for result in results for note in result["notes"]):
        console.print(f"note: {note}", soft_wrap=True)
