"""What several verbs share."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.data.corpus import Split
from muster.errors import LaunchError
from muster.observe.terminal import Terminal

if TYPE_CHECKING:
    from muster import run_directory
    from muster.api.run import Run

console = Terminal()

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its name, or `latest`.")
]
DirOption = Annotated[Path, typer.Option("--dir", help="Where run directories are.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]…", show_default=False)]
CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A run, or one of its checkpoints.")
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Machines; say so on each of them.", show_default=False)
]
NodeRankOption = Annotated[
    int | None, typer.Option(min=0, help="Which of them this is, from 0.", show_default=False)
]
AddressOption = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Where node 0 is reached.", show_default=False)
]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Its port. Default: 29500 with several nodes.", show_default=False
    ),
]
RehearseOption = Annotated[
    int | None,
    typer.Option(
        "--rehearse",
        min=2,
        metavar="N",
        help="N ranks that share the GPUs of this machine: the results and the memory of N GPUs, not "
        "their speed.",
        show_default=False,
    ),
]
SplitOption = Annotated[Split, typer.Option(help="Which part of the data.")]


def print_error(words: str) -> None:
    errors = Terminal(stderr=True)
    errors.print("error: ", style="bold red", end="")
    errors.print(words, soft_wrap=True)


def begin_rehearsal(ranks: int, gpus: int | str | None) -> int:
    """The number of ranks by --rehearse, which excludes --gpus."""
    from muster.hardware import inventory, rehearsal

    if gpus is not None:
        raise LaunchError("--rehearse and --gpus both give the number of ranks; leave one out")
    rehearsal.begin(len(inventory.detect().gpus), ranks)
    return ranks


def program() -> str:
    """How to call muster again from here: plainly where it is on the PATH."""
    called = Path(sys.argv[0])
    on_path = shutil.which("muster")
    if on_path and called.exists() and Path(on_path).samefile(called):
        return "muster"
    return os.path.relpath(called) if called.name == "muster" else "python -m muster"


def shown(run: run_directory.Run | Run) -> str:
    """The run's folder as one would type it here."""
    try:
        return str(run.path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(run.path)


def age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"
