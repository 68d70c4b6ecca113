"""How long a kernel takes: a roofline of multiplications and of bytes, with the shares of the peaks
that kernels were seen to reach."""

from __future__ import annotations

from dataclasses import dataclass

from muster.hardware.catalogue import Accelerator
from muster.plan.work import Work

# Shares of an accelerator's peaks, fitted on an H200 (benchmarks/planner.py, calibration cases).
MATRIX = 0.755  # of large products …
HALF = 20.0  # … and half of that where the smallest side is so short
ATTENTION = {
    "forward": (0.20, 0.0020),
    "backward": (0.215, 0.00165),
}  # at head size 0, and per unit
ODD_HEAD = 0.44  # of that, where the head size is no multiple of 16
STREAM = 0.71  # of the memory's bandwidth
SLOWER = {  # kernels that read or write otherwise than in one go, as a share of that
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
    "fused": 0.91,
}
BENCHED = {"matrix": 0.69, "bytes": 0.88}  # what `muster bench device` says of the same H200
SHORTEST_S = 2.5e-6  # of any kernel
LAUNCH_US = 8.0  # of the smallest operation, from Python, on a middling host
HOST_SHARE = 0.74  # of that for an operation within a model, where its kernels queue


@dataclass(frozen=True)
class Speeds:
    """What one device does in a second."""

    matrix: dict[str, float]  # flops by precision, large products
    bytes: float
    launch_s: float

    @classmethod
    def of(cls, device: Accelerator) -> Speeds:
        """From what was measured, else from the peak. A bench's long copies and large products reach
        another share of it than training does."""
        own = device.measured
        matrix = {
            kind: MATRIX * (own.get(f"{kind}_tflops", 0.0) / BENCHED["matrix"] or peak) * 1e12
            for kind, peak in device.matrix_tflops.items()
        }
        stream = own.get("memory_gb_per_s", 0.0) / BENCHED["bytes"] or device.memory_gb_per_s
        return cls(matrix, STREAM * stream * 1e9, own.get("launch_us", LAUNCH_US) * 1e-6)

    def seconds(self, work: Work) -> float:
        moving = work.bytes / (self.bytes * SLOWER.get(work.name, 1.0))
        return max(moving, self._computing(work), SHORTEST_S)

    def _computing(self, work: Work) -> float:
        if work.kind == "memory":
            return 0.0
        rate = self.matrix.get(work.precision, self.matrix["fp32"])
        if work.kind == "attention":
            base, slope = ATTENTION["backward" if work.name.endswith("backward") else "forward"]
            head = work.shape[-1]
            share = (base + slope * min(head, 128)) / MATRIX
            return work.flops / (rate * share * (ODD_HEAD if head % 16 else 1.0))
        side = min(work.shape[1:])
        return work.flops / (rate * side / (side + HALF))


def host_seconds(calls: float, speeds: Speeds) -> float:
    return calls * HOST_SHARE * speeds.launch_s
