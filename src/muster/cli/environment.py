"""`muster check --environment`: the variables this hardware wants."""

from __future__ import annotations

import shlex

from rich.table import Table
from rich.text import Text

from muster.cli.common import console


def show_environment(
    ranks: int | None = None,
    nodes: int = 1,
    strategy: str = "auto",
    export: bool = False,
    master: str | None = None,
) -> None:
    """A table of what `muster train` sets and why, or with `export` lines for a shell:
    eval "$(muster check --environment --export)"."""
    from muster.hardware import environment, inventory

    found = inventory.detect()
    ranks = found.rank_count(ranks, share=True)
    wanted = environment.variables(found, ranks, strategy, nodes=nodes, master=master)
    if export:
        for variable in wanted:
            reason = "as you set it" if variable.set_by_user else variable.reason
            print(f"export {variable.name}={shlex.quote(variable.value)}  # {reason}")
        return
    cores = found.cpu.describe() if found.cpu else f"{found.cpus} CPU cores"
    console.print(f"{found.describe()}, {cores}" if found.gpus else f"no GPU, {cores}")
    for line in found.describe_hidden():
        console.print(line, soft_wrap=True)
    table = Table("variable", "value", "set by", "why")
    for variable in wanted:
        who = Text("you", "yellow") if variable.set_by_user else Text("muster")
        table.add_row(variable.name, variable.value, who, variable.reason)
    without = environment.left_out(found, ranks, strategy, nodes=nodes, master=master)
    for name, reason in without.items():
        table.add_row(name, "", Text("left out", "dim"), Text(reason, "dim"))
    console.print(table)
