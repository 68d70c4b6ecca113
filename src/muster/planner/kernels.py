"""Kernel times by a roofline model: FLOPs and bytes over the fractions of peak that kernels were
measured to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from muster.hardware.catalogue import Accelerator
from muster.planner.op_cost import OpCost

# Fractions of an accelerator's peaks, fitted on an H200 (benchmarks/planner.py, calibration cases).
MATRIX = 0.755  # large matrix products
HALF = 20.0  # smallest dimension at which a product reaches half of that
ATTENTION = {
    "forward": (0.20, 0.0020),
    "backward": (0.215, 0.00165),
}  # at head size 0, and slope per unit
ODD_HEAD = 0.44  # factor for head sizes that are not multiples of 16
STREAM = 0.71  # of the memory bandwidth
SLOWER = {  # further factor for kernels without streaming access
    "native_layer_norm": 0.58,
    "native_layer_norm_backward": 0.42,
    "_log_softmax": 0.62,
    "_log_softmax_backward_data": 0.82,
    "sum": 0.55,
    "embedding_dense_backward": 0.4,
    "slice_backward": 0.4,
    "_to_copy": 0.75,
    "clone": 0.5,
    "cat": 0.5,
    "add": 0.8,
    "fused": 0.7,
}
BENCHED = {"matrix": 0.69, "bytes": 0.88}  # measured by `muster bench device` on the same H200
SHORTEST_S = 2.5e-6  # minimum kernel time
BETWEEN_S = 1.5e-6  # from the end of a kernel to the start of the next, which is launched already
LAUNCH_US = 8.0  # launch overhead of one operation from Python on an average host

Call = Literal["op", "cached op", "kernel", "graph"]

# What the host does for a model, in launches of one operation.
HOST: dict[Call, float] = {
    "op": 1.65,  # uncompiled, views too: the module's Python, autograd, the launch
    "cached op": 3.85,  # in addition, under selective checkpointing
    "kernel": 1.5,  # of a compiled graph
    "graph": 66.0,  # to call one: guards, autograd, its inputs and outputs
}


@dataclass(frozen=True)
class Speeds:
    """Throughput of one device, per second."""

    matrix: dict[str, float]  # flops by precision, large products
    bytes: float
    launch_s: float

    @classmethod
    def of(cls, device: Accelerator) -> Speeds:
        """From measured figures, else from the peaks. Benchmarks reach a larger fraction of peak than
        training does, which is corrected for."""
        own = device.measured
        matrix = {
            kind: MATRIX * (own.get(f"{kind}_tflops", 0.0) / BENCHED["matrix"] or peak) * 1e12
            for kind, peak in device.matrix_tflops.items()
        }
        stream = own.get("memory_gb_per_s", 0.0) / BENCHED["bytes"] or device.memory_gb_per_s
        return cls(matrix, STREAM * stream * 1e9, own.get("launch_us", LAUNCH_US) * 1e-6)

    def seconds(self, cost: OpCost) -> float:
        transfer = cost.bytes / (self.bytes * SLOWER.get(cost.name, 1.0))
        return max(transfer, self._compute_seconds(cost), SHORTEST_S) + BETWEEN_S

    def _compute_seconds(self, cost: OpCost) -> float:
        if cost.kind == "memory":
            return 0.0
        rate = self.matrix.get(cost.precision, self.matrix["fp32"])
        if cost.kind == "attention":
            base, slope = ATTENTION["backward" if cost.name.endswith("backward") else "forward"]
            head = cost.shape[-1]
            share = (base + slope * min(head, 128)) / MATRIX
            return cost.flops / (rate * share * (ODD_HEAD if head % 16 else 1.0))
        side = min(cost.shape[1:])
        return cost.flops / (rate * side / (side + HALF))


def host_seconds(calls: Mapping[Call, float], speeds: Speeds) -> float:
    return speeds.launch_s * sum(HOST[call] * count for call, count in calls.items())
