"""Ranks on this machine: torch's elastic agent, in a process of its own that outlives the terminal.

`start` returns at once; the supervisor it leaves behind starts one worker per device, starts them
again from the last checkpoint when one was killed, and notes in the run directory how it ended.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from typing import Any

from muster.observe.logs import set_up
from muster.recipe.load import from_resolved
from muster.runs import Run

log = logging.getLogger(__name__)

WORKER = "muster.worker"


def start(run: Run, ranks: int) -> subprocess.Popen[bytes]:
    """Leave a supervisor behind in a session of its own: neither Ctrl-C nor hang-up reaches it."""
    with (run.path / "launcher.log").open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster.launch.local", str(run.path), str(ranks)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **threads(ranks)},
        )
    while run.info().get("pid") != process.pid and process.poll() is None:
        time.sleep(0.02)  # until it answers for the run, so that nobody takes the run for dead
    return process


def threads(ranks: int) -> dict[str, str]:
    """Each rank its share of the cores, unless the user decided."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def supervise(run: Run, ranks: int) -> int:
    """Run until the end, restarting ranks that were killed. Returns the run's exit code."""
    run.own()
    recipe = from_resolved(run.path / "recipe.yaml")
    restarts = in_vain = newest = 0
    while True:
        clear_errors(run.path)
        run.update(state="running", ranks=ranks, restarts=restarts)
        failure = _attempt(run, ranks)
        if failure is None:
            return 0
        killed = failure["signal"] is not None
        reached = max(_complete_steps(run.path), default=0)
        in_vain, newest = (0 if reached > newest else in_vain), reached
        if killed and in_vain < recipe.distributed.max_restarts:
            restarts, in_vain = restarts + 1, in_vain + 1
            _note(
                run, "restarting", rank=failure["rank"], signal=failure["signal"], attempt=restarts
            )
            continue
        run.update(state="failed", failure=failure, ended=time.time(), exit_code=1)
        return 1


def _attempt(run: Run, ranks: int) -> dict[str, Any] | None:
    """One start of all ranks; None when all of them ended well."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", WORKER, str(run.path))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return first_failure(run.path, codes)
    return None


def first_failure(folder: Path, exit_codes: dict[int, int]) -> dict[str, Any]:
    """What went wrong first: a rank that was killed, else the earliest of the ranks' own words.

    When one rank goes, the others fail soon after in a collective; their complaints do not count.
    """
    killed = {rank: Signals(-code).name for rank, code in exit_codes.items() if code < 0}
    by_others = {rank: signal for rank, signal in killed.items() if signal != "SIGTERM"}
    for rank, signal in by_others.items():  # the agent itself ends the remaining ranks with SIGTERM
        return {"rank": rank, "exit_code": exit_codes[rank], "signal": signal, "error": None}
    errors = [json.loads(p.read_text()) for p in (folder / "ranks").glob("*.error.json")]
    for error in sorted(errors, key=lambda e: (not e["expected"], e["time"])):
        return {"rank": error["rank"], "exit_code": 1, "signal": None, "error": error}
    rank, code = next(iter(exit_codes.items()))
    return {"rank": rank, "exit_code": code, "signal": killed.get(rank), "error": None}


def _complete_steps(folder: Path) -> Iterator[int]:
    for manifest in (folder / "checkpoints").glob("step-*/manifest.json"):
        yield int(manifest.parent.name.removeprefix("step-"))


def clear_errors(folder: Path) -> None:
    for path in (folder / "ranks").glob("*.error.json"):
        path.unlink()


def _note(run: Run, what: str, **details: Any) -> None:
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": what, **details}) + "\n")


def main(folder: str, ranks: str) -> int:
    """Even a supervisor that breaks leaves a run that says so."""
    set_up("launcher")
    run = Run(Path(folder))
    try:
        return supervise(run, int(ranks))
    except Exception as error:
        log.exception("the launcher itself failed")
        own = {"expected": False, "kind": type(error).__name__, "message": str(error)}
        failure = {"rank": None, "exit_code": 1, "signal": None, "error": own}
        run.update(state="failed", failure=failure, ended=time.time(), exit_code=1)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
