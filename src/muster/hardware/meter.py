"""How busy the device of this process is: utilisation, memory, power, temperature, once a second.

A thread of its own asks the driver, since a driver in trouble may not answer for minutes, and whoever reads
the latest sample must not wait for it. The first error ends the measuring, with one line in the log.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

log = logging.getLogger(__name__)

EVERY_S = 1.0
MEAN_OF = 10  # samples: single ones jump between 0 and 1
STALE_S = 10.0  # a sample so old says nothing about now

Sample = dict[str, Any]


@dataclass(frozen=True)
class DeviceId:
    """A GPU as torch knows it, whatever the masks and the order of devices."""

    uuid: str  # without NVML's prefix
    bus_id: str  # 0000:3b:00.0
    name: str
    visible: int  # GPUs that this process may use
    vendor: str = "nvidia"


class Meter:
    """`latest` is the last sample: utilisation (0 to 1, the mean of the last ten samples), memory_gib,
    memory_total_gib, power_w, temperature_c; what the device cannot tell is None."""

    def __init__(self, sample: Callable[[], Sample], every_s: float = EVERY_S) -> None:
        self._sample, self._every_s = sample, every_s
        self._last: tuple[float, Sample] | None = None
        self._busy: deque[float] = deque(maxlen=MEAN_OF)
        self._end = threading.Event()
        threading.Thread(target=self._run, name="meter", daemon=True).start()

    def latest(self) -> Sample | None:
        """At once; None before the first sample, and when the device has not answered lately."""
        last = self._last  # the other thread may take it away
        if last is None or time.monotonic() - last[0] > STALE_S:
            return None
        return last[1]

    def stop(self) -> None:
        self._end.set()

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                sample = self._sample()
                if sample.get("utilisation") is not None:
                    self._busy.append(sample["utilisation"])
                    sample["utilisation"] = round(sum(self._busy) / len(self._busy), 3)
                self._last = (time.monotonic(), sample)
                self._end.wait(self._every_s)
        except Exception as error:
            self._last = None
            log.info("the device is not measured any more: %s", error)


def of_gpu(device: DeviceId) -> Meter:
    samples = _nvidia(device) if device.vendor == "nvidia" else _amd(device)
    return Meter(lambda: next(samples))


def of_process() -> Meter:
    """Of a rank on CPUs: its share of the cores that it may use, and its resident memory."""
    samples = _process()
    return Meter(lambda: next(samples))


def _process() -> Iterator[Sample]:
    process = psutil.Process()
    process.cpu_percent()  # the first call has nothing to compare with
    time.sleep(EVERY_S / 10)
    while True:
        share = process.cpu_percent() / 100 / max(1, len(os.sched_getaffinity(0)))
        yield {
            "utilisation": min(1.0, share),
            "memory_gib": _gib(process.memory_info().rss),
            "memory_total_gib": None,
            "power_w": None,
            "temperature_c": None,
        }


def _nvidia(device: DeviceId) -> Iterator[Sample]:
    import pynvml as nvml

    nvml.nvmlInit()
    handle = _nvml_handle(nvml, device)
    index = _ask(lambda: nvml.nvmlDeviceGetIndex(handle))
    while True:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = _ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        power = _ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        heat = _ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        yield {
            "name": device.name,
            "index": index,
            "visible": device.visible,
            "utilisation": None if busy is None else busy / 100,
            "memory_gib": _gib(memory.used),
            "memory_total_gib": _gib(memory.total),
            "power_w": None if power is None else round(power / 1000, 1),
            "temperature_c": heat,
        }


def _nvml_handle(nvml: Any, device: DeviceId) -> Any:
    """Of the GPU, or of the MIG slice, which shares its GPU's address."""
    for prefix in ("GPU-", "MIG-"):
        found = _ask(lambda prefix=prefix: nvml.nvmlDeviceGetHandleByUUID(prefix + device.uuid))  # type: ignore[misc]
        if found is not None:
            return found
    return nvml.nvmlDeviceGetHandleByPciBusId(device.bus_id)


def _amd(device: DeviceId) -> Iterator[Sample]:
    amdsmi = importlib.import_module("amdsmi")
    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    places = [amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() for handle in handles]
    index = places.index(device.bus_id)
    handle = handles[index]
    kind = amdsmi.AmdSmiTemperatureType.HOTSPOT
    now = amdsmi.AmdSmiTemperatureMetric.CURRENT
    while True:
        memory = amdsmi.amdsmi_get_gpu_vram_usage(handle)  # in MiB
        busy = _ask(lambda: amdsmi.amdsmi_get_gpu_activity(handle)["gfx_activity"])
        power = _ask(lambda: amdsmi.amdsmi_get_power_info(handle))
        yield {
            "name": device.name,
            "index": index,
            "visible": device.visible,
            "utilisation": busy / 100 if isinstance(busy, int) else None,
            "memory_gib": _gib(memory["vram_used"] * 2**20),
            "memory_total_gib": _gib(memory["vram_total"] * 2**20),
            "power_w": _watts(power or {}),
            "temperature_c": _ask(lambda: amdsmi.amdsmi_get_temp_metric(handle, kind, now)),
        }


def _watts(power: dict[str, Any]) -> float | None:
    """Older cards tell an average, newer ones what they draw now, and `N/A` for the other."""
    names = ("current_socket_power", "average_socket_power", "socket_power")
    known = [power[name] for name in names if isinstance(power.get(name), (int, float))]
    return float(known[0]) if known else None


def _ask(question: Callable[[], Any]) -> Any:
    """None where the device does not know, or the caller may not."""
    try:
        return question()
    except Exception:
        return None


def _gib(size: float) -> float:
    return round(size / 2**30, 3)
