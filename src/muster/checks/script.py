"""The check for a script: started by plain python, torchrun, srun or mpirun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from muster.checks.context import Options
from muster.checks.report import show
from muster.checks.run import check
from muster.errors import MusterError
from muster.launch.join import is_rank
from muster.launch.process import exit_without_cleanup
from muster.observe.terminal import Terminal


def main(arguments: Sequence[str] = ()) -> int:
    """`[--gpus N] [--recipe NAME_OR_FILE] [--timeout S] [--json]`. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, help="ranks, where no launcher started them")
    parser.add_argument("--recipe", help="is its data read fast enough?")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for a rank")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked = parser.parse_args(arguments)
    wide = None if sys.stdout.isatty() else 120
    code = 0
    try:
        if report := check(Options(asked.timeout, asked.recipe), asked.gpus):
            code = show(report, asked.json, Terminal(width=wide))
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    return exit_without_cleanup(code) if is_rank() else code
