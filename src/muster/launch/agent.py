"""torch's elastic agent, as muster uses it: one node's ranks, started once and ended together."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from muster.launch.nodes import NodeRendezvous, Nodes, PeerFailedError

END_SIGNAL = signal.SIGUSR2
KILL_AFTER_S = 5  # SIGKILL, for a rank that does not exit: a stopped process


class Agent(LocalElasticAgent):
    """Sends END_SIGNAL instead of SIGTERM, which means `save and stop` to a rank, and waits less than 30 s.

    `first` are the local ranks that failed before it ended the others.
    """

    first: frozenset[int] = frozenset()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def end_all(*_: Any, **__: Any) -> None:
            self.first = self.first or frozenset(context._failures)
            close(END_SIGNAL, KILL_AFTER_S)

        context.close = end_all
        return started

    def _exit_barrier(self) -> None:
        """Nodes wait for each other in `Nodes.decide`."""


def run_ranks(
    nodes: Nodes, run_id: str, ranks: int, command: Sequence[str], folder: Path
) -> dict[int, int] | None:
    """Run this node's ranks once: exit codes of those that failed, by rank; None when they were ended
    because another node failed. `folder` is for torch's own files, and removed at the end."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(command),
        rdzv_handler=NodeRendezvous(nodes, run_id),
        max_restarts=0,
        monitor_interval=0.1,
    )
    shutil.rmtree(folder, ignore_errors=True)  # of a supervisor that was killed
    agent = Agent(spec, DefaultLogsSpecs(log_dir=str(folder)))
    try:
        result = agent.run()
    except PeerFailedError:
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failures = result.failures.items()
    return {rank: f.exitcode for rank, f in failures if f.local_rank in agent.first}
