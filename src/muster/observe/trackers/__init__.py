"""Trackers show a run's metrics elsewhere: TensorBoard, Weights & Biases, MLflow, Trackio, or a user's own."""

from muster.observe.trackers.base import Tracker, TrackerRun
from muster.observe.trackers.trackers import Trackers

__all__ = ["Tracker", "TrackerRun", "Trackers"]
