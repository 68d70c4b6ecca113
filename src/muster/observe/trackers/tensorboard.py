"""TensorBoard: event files in the run directory."""

from __future__ import annotations

from typing import Any

from muster.observe.trackers.base import Status, Tracker, TrackerRun

FLUSH_S = 10  # after which a killed process has lost nothing


class TensorBoard(Tracker):
    replaces_steps = True

    def start(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.step + 1, flush_secs=FLUSH_S
        )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def finish(self, status: Status) -> None:
        self._writer.close()
