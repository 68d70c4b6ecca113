"""What a rank's metrics go to, by the keys of `logging`."""

from __future__ import annotations

import os

from muster import run_directory
from muster.observe import prometheus
from muster.observe.observer import Observer
from muster.observe.trackers.trackers import Trackers
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe


def make_observer(recipe: Recipe, mesh: Mesh, run: run_directory.Run, step: int) -> Observer:
    """For a rank that goes on from `step`. Rank 0 has the trackers, the first rank of each node the page for
    Prometheus."""
    options, trackers = recipe.logging, None
    if mesh.first:
        trackers = Trackers(options.to, run.path, recipe.as_dict(), step)
    observer = Observer(
        run.path,
        mesh.rank,
        every_steps=options.every_steps,
        start=step,
        world=mesh.world,
        trackers=trackers,
    )
    if options.prometheus is not None:
        hosts = mesh.gather(os.uname().nodename)
        if mesh.local_rank == 0:
            here = [rank for rank, host in enumerate(hosts) if host == hosts[mesh.rank]]
            exporter = prometheus.Exporter(run.path, here, observer.balance.summary)
            host = options.prometheus_host
            observer.exporter = prometheus.serve(exporter, host, options.prometheus)
    return observer
