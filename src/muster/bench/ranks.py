"""Starting a measurement that takes several ranks: on this machine's devices, or as the ranks that a
launcher started."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from muster.bench.files import Document
from muster.errors import LaunchError, MusterError
from muster.hardware import inventory, rehearsal
from muster.launch import cluster, rendezvous
from muster.launch.children import Children
from muster.launch.cluster import Node
from muster.launch.join import is_rank, join
from muster.launch.process import exit_without_cleanup, set_up_process
from muster.observe.progress import Report, silent
from muster.parallel import mesh as meshes

WAIT_S = 120.0  # of ranks for each other
STRATEGY = {"overlap": "fsdp"}  # whose variables are set; its ranks measure DDP under the same
PROVES_VALUES = ("collectives", "p2p")
GRACE_S = 1.0  # for others that fail too: the first exit seen need not be the rank that was killed


def measure(
    form: str,
    options: dict[str, Any],
    count: int | None,
    node: Node,
    timeout_s: float = WAIT_S,
    tell: Report = silent,
) -> Document | None:
    """`muster.bench.FORM.measure(mesh, **options)` on every rank. Returns rank 0's document; None
    where another process has it. No rank waits for another longer than `timeout_s`. `tell` is told how
    far rank 0 is, where that is on this machine."""
    if form not in PROVES_VALUES:
        rehearsal.refuse(f"muster bench {form}")
    if is_rank():
        return _as_rank(form, options, timeout_s, tell)
    count = inventory.detect().rank_count(count, cpu_ranks=2, share=True)
    return _with_children(form, options, count, node, timeout_s, tell)


def _as_rank(form: str, options: dict[str, Any], timeout_s: float, tell: Report) -> Document | None:
    rank_info = cluster.detect(os.environ)
    set_up_process(rank_info, STRATEGY.get(form, "ddp"))
    mesh = join(rank_info, "auto", timeout_s)
    module = import_module(f"muster.bench.{form}")
    document: Document | None = module.measure(mesh, **options, tell=tell if mesh.first else silent)
    meshes.leave()
    return document if mesh.first else None


def _with_children(
    form: str, options: dict[str, Any], count: int, node: Node, timeout_s: float, tell: Report
) -> Document | None:
    """Starts the ranks and waits for them: the first that fails ends the others, and its error is raised."""
    store = rendezvous.for_node(node, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        arguments = ["muster.bench.ranks", form, json.dumps(options), str(timeout_s), str(answer)]
        with Children(arguments, node, store.port, count, Path(folder)) as ranks:
            while ranks.running and not any(ranks.codes):
                _pass_on(_progress_file(answer), tell)
                time.sleep(0.05)
            if any(ranks.codes):
                first = ranks.codes
                time.sleep(GRACE_S)
                raise LaunchError(_why(ranks, first))
        return json.loads(answer.read_text()) if answer.exists() else None


def _progress_file(answer: Path) -> Path:
    """Where rank 0 writes how far it is, beside its answer."""
    return answer.with_suffix(".progress")


def _pass_on(path: Path, tell: Report) -> None:
    with suppress(OSError, ValueError):  # not there yet, or being written
        done, total = path.read_text().split()
        tell(int(done), int(total))


def _why(ranks: Children, first: Sequence[int | None]) -> str:
    """The rank that was killed, else the one that failed `first`: others fail because they lost it. Where
    it timed out, those that still run are the ones it waited for."""
    codes = dict(enumerate(ranks.codes, ranks.first))
    killed = [rank for rank, code in codes.items() if code and code < 0]
    failed = [*killed, *(rank for rank, code in enumerate(first, ranks.first) if code)][0]
    message = f"rank {failed} {ranks.exits()[failed]}"
    stuck = [str(rank) for rank, code in codes.items() if code is None]
    if stuck and "timed out" in message.lower():
        message += f"; still running, and so possibly stuck: rank {', '.join(stuck)}"
    return message


def main(form: str, options: str, timeout_s: str, answer: str) -> None:
    """One rank's process under `muster bench`."""
    progress = _progress_file(Path(answer))

    def tell(done: int, total: int) -> None:
        progress.write_text(f"{done} {total}")

    try:
        document = _as_rank(form, json.loads(options), float(timeout_s), tell)
    except MusterError as error:
        print(error, file=sys.stderr)
        exit_without_cleanup(2)
    if document is not None:
        Path(answer).write_text(json.dumps(document))
    exit_without_cleanup(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
