"""What one device reaches: matrix products, memory bandwidth, copies from the host, kernel launches.

Every figure is the median of at least REPEATS samples, after WARM_UP calls. GB = 10⁹ bytes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from muster.bench.files import prepare, write
from muster.errors import LaunchError
from muster.hardware import catalogue, cpus, inventory
from muster.hardware.catalogue import FLOAT8_CAPABILITY, Accelerator
from muster.hardware.devices import read
from muster.observe.progress import Report, silent

WARM_UP, REPEATS = 3, 5
SAMPLE_S = 0.02  # of one sample: long against the clock's error and a synchronize
SIDES = {"cuda": (4096, 8192, 16384), "cpu": (256, 512, 1024, 2048)}  # of square matrices
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NVLINK_GB_PER_S, XGMI_GB_PER_S = 25.0, 50.0  # one link, one direction
USUAL_NETWORK_GB_PER_S = 12.5  # 100 Gb/s for each GPU; not measured


class Timer:
    """Times work on one device and counts the samples of each figure."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: dict[str, int] = {}

    def median(self, figure: str, work: Callable[[], object], seconds: float) -> float:
        """Seconds of one call. Takes about `seconds`, more where REPEATS calls take longer."""
        for _ in range(WARM_UP):
            work()
        once = self._time(work, 1)
        burst = max(1, int(min(SAMPLE_S, seconds / REPEATS) / once))
        took: list[float] = []
        end = time.perf_counter() + seconds
        while len(took) < REPEATS or time.perf_counter() < end:
            took.append(self._time(work, burst))
        self.samples[figure] = len(took)
        return statistics.median(took)

    def _time(self, work: Callable[[], object], calls: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return (time.perf_counter() - began) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bench(folder: Path, seconds: float, tell: Report = silent) -> tuple[dict[str, Any], Path]:
    """Measures the current GPU, or the processor where there is none, for about `seconds`; returns the
    document and the file in `folder` that now holds it."""
    prepare(folder)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    with all_cores() as threads:
        document = {**measure(device, seconds, tell), "threads": None if gpu else threads}
    path = catalogue.file_of(document["name"], folder)
    document["measured"] |= links_in(path)
    write(path, document)
    return document, path


def links_in(path: Path) -> dict[str, float]:
    """The link rates that `muster bench collectives`, or a user, wrote there: one device alone cannot
    measure them."""
    try:
        known = json.loads(path.read_text())["measured"]
        return {key: known[key] for key in ("link_gb_per_s", "network_gb_per_s") if key in known}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def measure(device: torch.device, seconds: float, tell: Report = silent) -> dict[str, Any]:
    """`accelerator` is all that a planner needs to know of the device, `measured` what it achieved,
    `peaks` its vendor's figures, where the catalogue has it."""
    timer = Timer(device)
    kinds = number_types(device)
    copies_s = 2 if device.type == "cuda" else 0
    part = seconds / (2 * len(kinds) + copies_s + 2)
    sides: dict[str, int] = {}
    measured: dict[str, float] = {}
    for number, kind in enumerate(kinds):
        tell(number, len(kinds) + 1)
        measured[f"{kind}_tflops"], sides[kind] = matrix_tflops(timer, kind, 2 * part)
    tell(len(kinds), len(kinds) + 1)
    measured["memory_gb_per_s"] = memory_gb_per_s(timer, part)
    copies = host_copies(timer, part) if device.type == "cuda" else {}
    if copies:
        measured["host_gb_per_s"] = min(copies.values())
    measured["launch_us"] = launch_us(timer, part)
    known = known_as(device)
    accelerator = known or unknown(device, measured)
    return {
        "name": accelerator.name,
        "title": title(device),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "measured": measured,
        "peaks": peaks(known) if known and known.vendor != "cpu" else {},
        "copies": copies,
        "method": {
            "statistic": "median",
            "seconds": seconds,
            "warm_up_calls": WARM_UP,
            "samples": timer.samples,
            "matrix_sides": sides,
        },
        "accelerator": accelerator.as_dict(),
    }


def number_types(device: torch.device) -> list[str]:
    """Those that a run may use there: emulated bfloat16 and a CPU's float16 are too slow to matter."""
    if device.type == "cpu":
        return ["bf16", "fp32"]
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return ["bf16", "fp16", "fp32"] if bf16 else ["fp16", "fp32"]


def matrix_tflops(timer: Timer, kind: str, seconds: float) -> tuple[float, int]:
    """The best rate over several sizes, and its size. Numbers are random, since a GPU multiplies zeros
    faster than it ever will in training. A size that would take too long is left out."""
    device, dtype = timer.device, DTYPES[kind]
    best, best_side, share = 0.0, 0, seconds / len(SIDES[device.type])
    for side in SIDES[device.type]:
        operations = 2 * side**3
        too_long = best and (WARM_UP + 1 + REPEATS) * operations / best / 1e12 > 2 * share
        if too_long or 3 * side**2 * dtype.itemsize > free_bytes(device) / 2:
            break
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        took = timer.median(f"{kind}_tflops_{side}", lambda: torch.mm(a, b, out=out), share)  # noqa: B023
        if operations / took / 1e12 > best:
            best, best_side = operations / took / 1e12, side
    if not best:
        raise LaunchError(
            f"{title(device)} has only {free_bytes(device) / 2**30:.1f} GiB free; end other "
            "processes on it and measure again"
        )
    return best, best_side


def memory_gb_per_s(timer: Timer, seconds: float) -> float:
    """Bytes read and bytes written, of a copy that no cache can hold."""
    device = timer.device
    size = 2**31 if device.type == "cuda" else max(2**28, 4 * last_cache_bytes())
    source = torch.ones(min(size, free_bytes(device) // 8), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    took = timer.median("memory_gb_per_s", lambda: target.copy_(source), seconds)
    return 2 * source.nbytes / took / 1e9


def host_copies(timer: Timer, seconds: float) -> dict[str, float]:
    """Between pinned host memory and the GPU, one direction at a time."""
    host = torch.ones(2**28, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(host, device=timer.device)
    ways = {
        "host_to_device_gb_per_s": lambda: here.copy_(host, non_blocking=True),
        "device_to_host_gb_per_s": lambda: host.copy_(here, non_blocking=True),
    }
    return {
        name: host.nbytes / timer.median(name, way, seconds) / 1e9 for name, way in ways.items()
    }


def launch_us(timer: Timer, seconds: float) -> float:
    """Kernel launch latency: microseconds from one tiny operation to the next, without synchronizing."""
    one = torch.zeros(1, device=timer.device)
    return 1e6 * timer.median("launch_us", lambda: one.add_(1), seconds)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(catalogue.cpu(1).memory_gib * 2**30)


def last_cache_bytes() -> int:
    """Of the processor's last level; 0 where the kernel does not report it."""
    text = read(Path("/sys/devices/system/cpu/cpu0/cache/index3/size")) or "0"
    return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)


@contextmanager
def all_cores() -> Iterator[int]:
    """A processor is measured as a whole, one thread on each physical core that this process may use,
    whatever OMP_NUM_THREADS says."""
    found, before = cpus.find(Path("/")), torch.get_num_threads()
    cores = [core for core in found.cores if set(core) & set(found.allowed)]
    threads = max(1, min(found.usable, len(cores) or found.usable))
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else catalogue.cpu(1).title


def known_as(device: torch.device) -> Accelerator | None:
    if device.type == "cpu":
        return catalogue.cpu(1)
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return catalogue.recognise(title(device), memory)


def unknown(device: torch.device, measured: dict[str, float]) -> Accelerator:
    """A GPU that is not in the catalogue: with its measured rates as peaks."""
    found = inventory.detect()
    properties = torch.cuda.get_device_properties(device)
    amd = torch.version.hip is not None
    link, rate = "pcie", measured["host_gb_per_s"]
    if found.links and amd:
        link, rate = "xgmi", XGMI_GB_PER_S
    elif found.links:
        link, rate = "nvlink", NVLINK_GB_PER_S * max(1, found.gpus[0].nvlinks)
    return Accelerator(
        name=catalogue.slug(title(device)),
        title=title(device),
        vendor="amd" if amd else "nvidia",
        memory_gib=properties.total_memory / 2**30,
        matrix_tflops={kind: measured[f"{kind}_tflops"] for kind in number_types(device)},
        memory_gb_per_s=measured["memory_gb_per_s"],
        units=properties.multi_processor_count,
        link=link,
        link_gb_per_s=rate,
        host_gb_per_s=measured["host_gb_per_s"],
        per_node=torch.cuda.device_count(),
        network_gb_per_s=USUAL_NETWORK_GB_PER_S,
        float8=not amd and (properties.major, properties.minor) >= FLOAT8_CAPABILITY,
    )


def peaks(known: Accelerator) -> dict[str, float]:
    rates = {f"{kind}_tflops": rate for kind, rate in known.matrix_tflops.items()}
    return {
        **rates,
        "memory_gb_per_s": known.memory_gb_per_s,
        "host_gb_per_s": known.host_gb_per_s,
    }
