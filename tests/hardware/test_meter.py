"""The meter of a rank's device: what it says, and that nothing waits for it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from muster.hardware import meter
from muster.hardware.meter import DeviceId, Meter


def wait_for(found: Any) -> Any:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if (value := found()) is not None:
            return value
        time.sleep(0.01)
    raise AssertionError("no sample")


@pytest.fixture
def stop() -> Any:
    made: list[Meter] = []
    yield made.append
    for one in made:
        one.stop()


def test_a_rank_on_cpus_tells_its_share_of_its_cores_and_its_memory(stop: Any) -> None:
    found = meter.of_process()
    stop(found)
    sample = wait_for(found.latest)
    assert 0 <= sample["utilisation"] <= 1
    assert 0.01 < sample["memory_gib"] < 1000
    assert sample["power_w"] is None


def test_utilisation_is_the_mean_of_the_last_samples(stop: Any) -> None:
    values = iter([1.0, 0.0, 0.5])
    done = threading.Event()

    def sample() -> dict[str, Any]:
        value = next(values, None)
        if value is None:
            done.set()
            return {"utilisation": None}
        return {"utilisation": value, "last": value}

    seen: list[Any] = []
    found = Meter(lambda: seen.append(s := sample()) or s, every_s=0.001)
    stop(found)
    assert done.wait(10)
    assert [s["utilisation"] for s in seen[:3]] == [1.0, 0.5, 0.5]


def test_a_driver_that_does_not_answer_keeps_nobody_waiting(
    stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    answers = iter([{"utilisation": 0.9}])

    def sample() -> dict[str, Any]:
        found = next(answers, None)
        if found is None:
            held.wait(30)
        return found or {}

    found = Meter(sample, every_s=0.001)
    stop(found)
    assert wait_for(found.latest)["utilisation"] == 0.9
    begin = time.monotonic()
    monkeypatch.setattr(meter, "STALE_S", 0.0)
    assert found.latest() is None
    assert time.monotonic() - begin < 1.0
    held.set()


def test_a_sample_that_is_taken_away_while_it_is_read_ends_no_heartbeat(stop: Any) -> None:
    class Ends(Meter):
        """Its thread meets an error between two looks at the last sample."""

        @property
        def _last(self) -> Any:
            return next(self.looks, None)

        @_last.setter
        def _last(self, value: Any) -> None: ...

    sample = {"utilisation": None}
    found = Ends(lambda: sample, every_s=60)
    stop(found)
    found.looks = iter([(time.monotonic(), sample)])
    assert found.latest() == sample
    assert found.latest() is None


def test_the_first_error_ends_the_measuring_with_one_line(
    stop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def sample() -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("GPU is lost")
        return {"utilisation": 1.0}

    with caplog.at_level(logging.INFO):
        found = Meter(sample, every_s=0.01)
        stop(found)
        wait_for(lambda: caplog.records or None)
        time.sleep(0.1)
    assert len(calls) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the device is not measured any more: GPU is lost"
    ]
    assert found.latest() is None


def nvml(known: str) -> Any:
    """Two GPUs; the second has the UUID `known` and a driver that does not tell its power."""

    def by_uuid(uuid: str) -> int:
        if uuid == known:
            return 1
        raise KeyError(uuid)

    def no_power(handle: int) -> int:
        raise RuntimeError("not supported")

    return SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetHandleByPciBusId=lambda place: {"0000:3b:00.0": 0}[place],
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2**31, total=2**36),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97),
        nvmlDeviceGetPowerUsage=no_power,
        nvmlDeviceGetTemperature=lambda handle, kind: 62,
    )


@pytest.mark.parametrize(("known", "index"), [("GPU-aa-22", 1), ("MIG-aa-22", 1), ("GPU-other", 0)])
def test_a_gpu_is_found_by_its_uuid_else_by_its_place(
    known: str, index: int, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(known))
    found = meter.of_gpu(DeviceId("aa-22", "0000:3b:00.0", "H100", visible=2))
    stop(found)
    assert wait_for(found.latest) == {
        "name": "H100",
        "index": index,
        "visible": 2,
        "utilisation": 0.97,
        "memory_gib": 2.0,
        "memory_total_gib": 64.0,
        "power_w": None,
        "temperature_c": 62,
    }


def test_an_amd_gpu_is_found_by_its_place(stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    amdsmi = SimpleNamespace(
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_gpu_device_bdf=lambda h: {"first": "0000:C1:00.0", "second": "0000:D1:00.0"}[h],
        amdsmi_get_gpu_vram_usage=lambda h: {"vram_used": 1024, "vram_total": 4096},
        amdsmi_get_gpu_activity=lambda h: {"gfx_activity": 50},
        amdsmi_get_power_info=lambda h: {
            "current_socket_power": "N/A",
            "average_socket_power": 250,
        },
        amdsmi_get_temp_metric=lambda h, kind, when: 71,
    )
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    found = meter.of_gpu(DeviceId("", "0000:d1:00.0", "MI300X", visible=2, vendor="amd"))
    stop(found)
    sample = wait_for(found.latest)
    assert (sample["index"], sample["memory_gib"], sample["memory_total_gib"]) == (1, 1.0, 4.0)
    assert (sample["utilisation"], sample["power_w"], sample["temperature_c"]) == (0.5, 250.0, 71)
