"""`logging.prometheus`: a page of this node's metrics that Prometheus reads.

It is made when it is asked for, from the files that the ranks write anyway: training does nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from muster.errors import RecipeError
from muster.observe.events import warn
from muster.observe.heartbeats import Heartbeats
from muster.observe.results import read_last

GIB = 2.0**30


class Metric(NamedTuple):
    name: str
    source: str  # key of what the ranks write
    meaning: str
    factor: float = 1.0


RUN: tuple[Metric, ...] = (  # of metrics.jsonl, on the node of rank 0
    Metric("muster_step", "step", "optimizer steps done"),
    Metric("muster_epoch", "epoch", "epoch, from 0"),
    Metric("muster_loss", "loss", "training loss of the global batch"),
    Metric("muster_grad_norm", "grad_norm", "gradient norm before clipping"),
    Metric("muster_learning_rate", "lr", "learning rate"),
    Metric("muster_samples_per_second", "samples_per_s", "samples of the whole run per second"),
    Metric("muster_tokens_per_second", "tokens_per_s", "tokens of the whole run per second"),
    Metric("muster_audio_seconds_per_second", "audio_s_per_s", "seconds of audio per second"),
    Metric("muster_mfu", "mfu", "share of the devices' peak that the model's products use"),
    Metric("muster_step_seconds", "step_time_s", "wall time of the last step, on rank 0"),
)
BALANCE: tuple[Metric, ...] = (  # of all ranks since the start, on the node of rank 0
    Metric(
        "muster_balance_slowest_over_mean", "slowest_over_mean", "slowest rank ÷ mean; 1 is perfect"
    ),
    Metric("muster_balance_wait_share", "comm_wait_share", "share of time waiting for other ranks"),
    Metric("muster_balance_data_share", "data_wait_share", "share of time waiting for data"),
    Metric("muster_balance_padding_share", "padding_share", "padding in the batches"),
)
RANK: tuple[Metric, ...] = (  # of ranks/<r>.jsonl: the last step
    Metric("muster_rank_compute_seconds", "compute_s", "computing, of the last step"),
    Metric("muster_rank_wait_seconds", "comm_wait_s", "waiting for other ranks, of the last step"),
    Metric("muster_rank_data_seconds", "data_wait_s", "waiting for data, of the last step"),
    Metric("muster_rank_step_seconds", "step_time_s", "the last step"),
    Metric("muster_rank_memory_bytes", "memory_gib", "peak memory of torch; on CPUs resident", GIB),
)
DEVICE: tuple[Metric, ...] = (  # of the rank's heartbeat, `device`
    Metric("muster_device_utilisation", "utilisation", "share of time that the device is busy"),
    Metric("muster_device_memory_bytes", "memory_gib", "memory in use on the device", GIB),
    Metric("muster_device_memory_total_bytes", "memory_total_gib", "memory of the device", GIB),
    Metric("muster_device_power_watts", "power_w", "power draw"),
    Metric("muster_device_temperature_celsius", "temperature_c", "temperature"),
)
ALIVE = Metric("muster_rank_heartbeat_age_seconds", "time", "since the rank's last heartbeat")
SCORE = Metric("muster_score", "scores", "scores of the last evaluation")
ALL = (*RUN, *BALANCE, *RANK, *DEVICE, ALIVE, SCORE)


class Exporter:
    """Of one node: its ranks, and with rank 0 among them the run as a whole."""

    def __init__(
        self, folder: Path, ranks: Sequence[int], balance: Callable[[], Mapping[str, float]]
    ) -> None:
        self.folder, self.ranks, self._balance = folder, ranks, balance
        self._heartbeats = Heartbeats(folder / "ranks")
        self.scores: dict[str, dict[str, float]] = {}  # by split, set by rank 0
        self._server: Any = None

    def start(self, host: str, port: int) -> None:
        """Raises OSError where the port is taken, ImportError without prometheus_client."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, _ = start_http_server(port, addr=host, registry=registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def describe(self) -> list[Any]:
        """What is there changes, so nothing is promised to the registry."""
        return []

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client for each reading."""
        from prometheus_client.core import GaugeMetricFamily

        run = self.folder.name
        self._heartbeats.refresh()
        of_rank = {rank: self._rank(rank) for rank in self.ranks}
        for metric, rows in self._families(of_rank):
            names = ["run", *(rows[0][0] if rows else {})]
            family = GaugeMetricFamily(metric.name, metric.meaning, labels=names)
            for labels, value in rows:
                family.add_metric([run, *labels.values()], value * metric.factor)
            if rows:
                yield family

    def _families(self, of_rank: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[Metric, Rows]]:
        if 0 in self.ranks:
            line, balance = read_last(self.folder / "metrics.jsonl"), self._balance()
            for part, values in ((RUN, line), (BALANCE, balance)):
                for metric in part:
                    yield metric, _rows({}, values.get(metric.source))
            scores = [
                ({"split": split, "score": name}, float(value))
                for split, found in self.scores.items()
                for name, value in found.items()
            ]
            yield SCORE, scores
        for part, key in ((RANK, "line"), (DEVICE, "device"), ((ALIVE,), "alive")):
            for metric in part:
                yield (
                    metric,
                    [
                        row
                        for rank, found in of_rank.items()
                        for row in _rows(
                            {"rank": str(rank), "node": found["node"]},
                            found[key].get(metric.source),
                        )
                    ],
                )

    def _rank(self, rank: int) -> dict[str, Any]:
        """Empty where the rank has not written yet."""
        beat = self._heartbeats.latest.get(rank, {})
        age = {"time": self._heartbeats.silent_s(rank)} if beat else {}
        return {
            "node": str(beat.get("host", "")),
            "line": read_last(self.folder / "ranks" / f"{rank}.jsonl"),
            "device": beat.get("device") or {},
            "alive": age,
        }


Rows = list[tuple[dict[str, str], float]]


def _rows(labels: dict[str, str], value: Any) -> Rows:
    """One, or none where there is no number: a loss that is not finite, a power that is not known."""
    return [(labels, float(value))] if isinstance(value, int | float) else []


def refuse_missing() -> None:
    """Before a run starts on this machine."""
    if find_spec("prometheus_client") is None:
        raise RecipeError(
            "logging.prometheus: prometheus_client is not installed; pip install "
            "'muster-train[prometheus]', or leave the key out"
        )


def serve(exporter: Exporter, host: str, port: int) -> Exporter | None:
    """None, with a warning, where it cannot: a run does not end for want of a page."""
    try:
        exporter.start(host, port)
    except (OSError, ImportError, OverflowError) as error:
        warn(
            exporter.folder,
            f"logging.prometheus: port {port} of {host} cannot be served, and the run goes on without it "
            f"({error}); choose another port",
        )
        return None
    return exporter
