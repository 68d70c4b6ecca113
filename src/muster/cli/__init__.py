"""The `muster` command: parses, calls one function, prints.

Nothing heavy is imported until a verb needs it, so that `--help` and a mistyped option answer at
once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from muster.cli import (
    bench,
    check,
    data,
    explain,
    export,
    kept,
    manage,
    page,
    plan,
    recipe,
    report,
    train,
    use,
)
from muster.cli.common import console, print_error
from muster.errors import MusterError
from muster.launch.cluster import own_arguments
from muster.observe import storage

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: boxes cost a tenth of a second
)
app.command()(train.train)
app.command()(manage.watch)
app.command()(page.page)
app.command()(page.compare)
app.command("runs")(manage.list_runs)
app.command()(report.report)
app.command()(kept.checkpoints)
app.command()(manage.stop)
app.command()(manage.clean)
app.command("eval")(use.evaluate)
app.command()(use.transcribe)
app.command()(use.generate)
app.command()(export.export)
app.command()(plan.plan)
app.command()(check.check)
app.command()(explain.explain)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(recipe.app, name="recipe")


def main() -> None:
    """Errors meant for the user are one red line, without a stack trace."""
    try:
        app(own_arguments(sys.argv[1:]))
    except MusterError as error:
        print_error(str(error))
        sys.exit(2)
    except OSError as error:
        words = storage.command_words(error)
        if words is None:
            raise
        print_error(words)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train speech and language models on every GPU you have."""
    if version:
        from muster import __version__

        console.print(f"muster {__version__}")
        raise typer.Exit
