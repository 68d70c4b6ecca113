"""AMD's GPUs: from the amdsmi library, else from the rocm-smi program, else from /sys.

A run uses them only with a torch built for ROCm: many processors have a small AMD GPU for the display.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import itertools
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.hardware.devices import (
    Found,
    Gpu,
    Hidden,
    Process,
    hidden_gpus,
    numa_node,
    pcie_of,
    read,
    read_int,
    visible,
)

Listing = tuple[list[Gpu], set[tuple[int, int]]]  # every GPU, and the pairs that XGMI joins

COMMAND = ["rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram"]
COMMAND += ["--showtoponuma", "--showtopotype", "--json"]
PAIR = re.compile(r"link type between drm devices (\d+) and (\d+)")
KFD_XGMI = 11  # the kernel's number for that kind of link
COMPUTES_GIB = 8  # less is a display's
NO_ROCM = "torch is not built for ROCm"
DISPLAY = f"{NO_ROCM}, and it is small"


def find(root: Path, env: Mapping[str, str]) -> Found | None:
    """None where there is no AMD GPU."""
    if not (root / "sys/class/kfd").is_dir():
        return None  # no compute driver
    every, joined = _listing(root)
    if not every:
        return None
    every = [_with_sysfs(gpu, root) for gpu in every]
    driver = read(root / "sys/module/amdgpu/version")
    chosen, hidden = masked(every, env)
    if not torch_is_for_rocm():
        for gpu in chosen:
            hidden += hidden_gpus([gpu], (), NO_ROCM if gpu.memory_gib >= COMPUTES_GIB else DISPLAY)
        return Found((), tuple(sorted(hidden, key=lambda gpu: gpu.physical)), driver=driver)
    pairs = itertools.combinations(range(len(chosen)), 2)
    numbers = [gpu.physical or 0 for gpu in chosen]
    links = tuple((a, b) for a, b in pairs if tuple(sorted((numbers[a], numbers[b]))) in joined)
    gpus = tuple(replace(gpu, index=position) for position, gpu in enumerate(chosen))
    return Found(gpus, hidden, links, driver=driver)


def torch_is_for_rocm() -> bool:
    """From torch's version.py, without importing torch."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    built = read(Path(spec.origin).with_name("version.py")) or ""
    return re.search(r"^hip\b.*= *['\"]", built, re.MULTILINE) is not None


def mask(env: Mapping[str, str]) -> str:
    """The variable that counts what ROCR_VISIBLE_DEVICES leaves."""
    return "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"


def masked(every: Sequence[Gpu], env: Mapping[str, str]) -> tuple[list[Gpu], tuple[Hidden, ...]]:
    """ROCR_VISIBLE_DEVICES first; HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, counts what
    that leaves."""
    chosen, hidden = list(every), tuple[Hidden, ...]()
    for variable in ("ROCR_VISIBLE_DEVICES", mask(env)):
        counted = [replace(gpu, physical=position) for position, gpu in enumerate(chosen)]
        numbers = [gpu.physical or 0 for gpu in visible(counted, env.get(variable))]
        left = [chosen[number] for number in numbers]
        hidden += hidden_gpus(chosen, left, variable)
        chosen = left
    return chosen, tuple(sorted(hidden, key=lambda gpu: gpu.physical))


def _listing(root: Path) -> Listing:
    readers: list[Callable[[], Listing]] = [_from_library, _from_program, lambda: _from_sys(root)]
    for reader in readers:
        try:
            found = reader()
        except Exception:  # not installed, too old, not permitted: try the next one
            continue
        if found[0]:
            return found
    return [], set()


def _amd(number: int, name: str, uuid: str, total: int, used: int, bus: str | None) -> Gpu:
    """`total` and `used` in bytes."""
    return Gpu(
        index=number,
        physical=number,
        name=name,
        uuid=uuid,
        vendor="amd",
        memory_gib=total / 2**30,
        free_gib=(total - used) / 2**30,
        bus_id=bus.lower() if bus else None,
    )


def _from_library() -> Listing:
    amdsmi = importlib.import_module("amdsmi")
    amdsmi.amdsmi_init()
    try:
        handles = amdsmi.amdsmi_get_processor_handles()
        gpus = [_from_handle(amdsmi, number, handle) for number, handle in enumerate(handles)]
        kinds = getattr(amdsmi, "AmdSmiLinkType", None) or amdsmi.AmdSmiIoLinkType
        joined = set()
        for a, b in itertools.combinations(range(len(handles)), 2):
            link = amdsmi.amdsmi_topo_get_link_type(handles[a], handles[b])["type"]
            if int(link) == int(kinds.XGMI):
                joined.add((a, b))
        return gpus, joined
    finally:
        amdsmi.amdsmi_shut_down()


def _from_handle(amdsmi: Any, number: int, handle: Any) -> Gpu:
    chip = amdsmi.amdsmi_get_gpu_asic_info(handle)
    memory = amdsmi.amdsmi_get_gpu_vram_usage(handle)  # in MiB
    total, used = int(memory["vram_total"]) * 2**20, int(memory["vram_used"]) * 2**20
    uuid = _uuid(chip["asic_serial"])
    bus = amdsmi.amdsmi_get_gpu_device_bdf(handle)
    return _amd(number, chip["market_name"], uuid, total, used, bus)


def _from_program() -> Listing:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=30, check=True)
    answer = json.loads(done.stdout[done.stdout.index("{") :])  # warnings may come first
    gpus, joined = [], set()
    for card, properties in answer.items():
        properties = {
            key.lower(): value for key, value in properties.items()
        }  # upper or lower case by version
        if card == "system":
            links = [(PAIR.search(key), value) for key, value in properties.items()]
            joined |= {(int(m[1]), int(m[2])) for m, kind in links if m and kind == "XGMI"}
            continue
        total, used = properties["vram total memory (b)"], properties["vram total used memory (b)"]
        name = properties.get("card series") or properties.get("card model") or "AMD GPU"
        uuid, bus = _uuid(properties["unique id"]), properties.get("pci bus")
        gpus.append(_amd(int(card.removeprefix("card")), name, uuid, int(total), int(used), bus))
    return sorted(gpus, key=lambda gpu: gpu.index), joined


def _uuid(serial: str) -> str:
    """As ROCR_VISIBLE_DEVICES takes it: GPU- and sixteen hexadecimal digits."""
    return "GPU-" + serial.lower().removeprefix("0x").rjust(16, "0")


def _from_sys(root: Path) -> Listing:
    """The kernel lists processors and GPUs as nodes; a GPU has compute units, and a render device."""
    gpus: list[Gpu] = []
    numbers, ends = dict[int, int](), set()
    for node, properties in sorted(_nodes(root).items()):
        device = root / f"sys/class/drm/renderD{properties['drm_render_minor']}/device"
        total = read_int(device / "mem_info_vram_total")
        if total is None:
            continue  # a container may see the node without the device
        used = read_int(device / "mem_info_vram_used") or 0
        name = read(device / "product_name") or "AMD GPU"
        uuid = _uuid(read(device / "unique_id") or f"{properties.get('unique_id', 0):x}")
        numbers[node] = len(gpus)
        gpus.append(_amd(len(gpus), name, uuid, total, used, _bus(properties)))
        for link in _node_folder(root).glob(f"{node}/io_links/*/properties"):
            ends.add((node, _properties(link)["node_to"], _properties(link)["type"]))
    joined = {
        (numbers[a], numbers[b])
        for a, b, kind in ends
        if kind == KFD_XGMI and a in numbers and b in numbers and a < b
    }
    return gpus, joined


def _node_folder(root: Path) -> Path:
    return root / "sys/class/kfd/kfd/topology/nodes"


def _nodes(root: Path) -> dict[int, dict[str, int]]:
    found = {}
    for folder in _node_folder(root).glob("*"):
        properties = _properties(folder / "properties")
        if properties.get("simd_count"):
            found[int(folder.name)] = properties | {"gpu_id": read_int(folder / "gpu_id") or 0}
    return found


def _properties(path: Path) -> dict[str, int]:
    lines = [line.split() for line in (read(path) or "").splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _bus(properties: Mapping[str, int]) -> str:
    """The kernel packs bus, device and function in `location_id`."""
    position = properties["location_id"]
    return f"{properties.get('domain', 0):04x}:{position >> 8 & 255:02x}:{position >> 3 & 31:02x}.{position & 7}"


def _with_sysfs(gpu: Gpu, root: Path) -> Gpu:
    """With what only /sys has: its PCIe link, NUMA node, errors, processes."""
    if gpu.bus_id is None:
        return gpu
    folder = root / "sys/bus/pci/devices" / gpu.bus_id
    errors = re.search(r"ue: *(\d+)", read(folder / "ras/umc_err_count") or "")
    known = {
        _bus(properties): properties["gpu_id"]
        for properties in _nodes(root).values()
        if "location_id" in properties
    }
    return replace(
        gpu,
        numa=numa_node(folder),
        pcie=pcie_of(folder),
        ecc_errors=int(errors[1]) if errors else None,
        processes=_processes(root, known[gpu.bus_id]) if gpu.bus_id in known else None,
    )


def _processes(root: Path, gpu_id: int) -> tuple[Process, ...]:
    """Those that hold memory on the GPU: /sys/class/kfd/kfd/proc/PID/vram_GPU, in bytes."""
    found = []
    for path in sorted((root / "sys/class/kfd/kfd/proc").glob(f"*/vram_{gpu_id}")):
        if used := read_int(path):
            found.append(Process(int(path.parent.name), used / 2**30))
    return tuple(found)
