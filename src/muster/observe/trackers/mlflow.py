"""MLflow, by its own environment variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from muster.observe.trackers.base import PROJECT, Status, Tracker, TrackerRun

METRICS, PARAMETERS = 1000, 100  # that MLflow takes at a time
VALUE = 500  # characters of a parameter in every version of MLflow
STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAKE_TABLES = (
    "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments(max_results=1)"
)


class MLflow(Tracker):
    def start(self, run: TrackerRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before it is imported
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._waiting = Metric, list[Any]()
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            file = run.folder.parent.absolute() / "mlflow.db"
            address = f"sqlite:///{file}"
            if not file.exists():
                _make_tables(address)
        self._client: Any = MlflowClient(address)
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, "RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = str(self._client.create_run(where, run_name=run.name).info.run_id)
        parameters = [Param(key, str(value)[:VALUE]) for key, value in run.flat_recipe().items()]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS])
        return self._id

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]

    def text(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._id, name, text)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), METRICS):
            self._client.log_batch(self._id, metrics=waiting[first : first + METRICS])

    def finish(self, status: Status) -> None:
        if status in STATUSES:
            self._client.set_terminated(self._id, STATUSES[status])


def _make_tables(address: str) -> None:
    """In a process of its own: a new database takes seconds of Python, for which training would have to
    share the interpreter."""
    command = [sys.executable, "-c", MAKE_TABLES, address]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{address} could not be made: {made.stderr[-300:]}")
