"""TensorBoard: event files in the run directory."""

from __future__ import annotations

from typing import Any

from muster.observe.trackers.base import Status, Tracker, TrackerRun

FLUSH_S = 10  # after which a killed process has lost nothing


class TensorBoard(Tracker):
    replaces_steps = True

    def start(self, run: TrackerRun) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = Summary
        self._writer: Any = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.step + 1, flush_secs=FLUSH_S
        )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        # As `add_scalar` writes it, but one event for all: a fraction of the time.
        named = [self._summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._writer.file_writer.add_summary(self._summary(value=named), step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def finish(self, status: Status) -> None:
        self._writer.close()
