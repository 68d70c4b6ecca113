"""Weights & Biases, by its own environment variables: WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE and others."""

from __future__ import annotations

import os
from typing import Any

from muster.observe.trackers.base import PROJECT, Status, Tracker, TrackerRun

INIT_S = 30  # that a server may take; a process that ends meanwhile waits for it
LOGIN_S = 5  # that a question for the API key waits where a rank has a terminal


class WeightsAndBiases(Tracker):
    def start(self, run: TrackerRun) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before it is imported
        import wandb

        # Only the recipe and the metrics are sent: no console output, source code, command line, list of
        # packages, name of the user or load of the machine.
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            init_timeout=INIT_S,
            login_timeout=LOGIN_S,
            host="",
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=run.recipe,
            settings=settings,
        )
        self._step = 0
        return str(self._run.id)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if (
            step < self._step
        ):  # the best checkpoint's scores, after training: no row can be added before the last
            self._run.summary.update(values)
            return
        self._step = step
        self._run.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.summary[name] = text

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)
