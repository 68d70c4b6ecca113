"""torch's elastic agent, as muster uses it: one node's ranks, started once and ended together."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from muster.launch.nodes import DismissedError, Meeting, Nodes

DISMISSAL = signal.SIGUSR2
PATIENCE_S = 5  # for a rank that does not even die of that: one that was stopped


class Agent(LocalElasticAgent):
    """Its own SIGTERM would mean `save and stop` to a rank, and it would wait 30 s for it.

    `first` are the local ranks that failed before it ended the others.
    """

    first: frozenset[int] = frozenset()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def end_all(*_: Any, **__: Any) -> None:
            self.first = self.first or frozenset(context._failures)
            close(DISMISSAL, PATIENCE_S)

        context.close = end_all
        return started

    def _exit_barrier(self) -> None:
        """Nodes wait for each other in `Nodes.decide`."""


def run_ranks(
    nodes: Nodes, run_id: str, ranks: int, command: Sequence[str]
) -> dict[int, int] | None:
    """One life of this node's ranks: exit codes of those that failed, by rank; None when another
    node's failure ended them."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(command),
        rdzv_handler=Meeting(nodes, run_id),
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = Agent(spec, DefaultLogsSpecs())
    try:
        result = agent.run()
    except DismissedError:
        return None
    failures = result.failures.items()
    return {rank: f.exitcode for rank, f in failures if f.local_rank in agent.first}
