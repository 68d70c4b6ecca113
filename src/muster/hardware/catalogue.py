"""Accelerators and their rates: known ones from `accelerators.yaml`, own ones as measured by `muster
bench device`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml

from muster.errors import DataError, RecipeError
from muster.hardware import cpus
from muster.hardware.devices import read_int

DATA = Path(__file__).with_name("accelerators.yaml")
BENCH = Path("runs/bench")  # where measurements are kept
LINKS = ("nvlink", "xgmi", "pcie", "loopback")
FLOAT8_CAPABILITY = (8, 9)  # compute capability with float8 products: Ada's; Hopper's is (9, 0)
NUMBER_TYPES = ("bf16", "fp16", "fp32")
THROUGHPUTS = (*(f"{kind}_tflops" for kind in NUMBER_TYPES), "memory_gb_per_s", "host_gb_per_s")
MEASURED = (*THROUGHPUTS, "link_gb_per_s", "network_gb_per_s", "launch_us")
SAME_MEMORY = 0.12  # ECC, the driver and GB on data sheets change it by less

# A host's processor before it is measured: the rates of an old core with AVX2.
CORE_TFLOPS = {"bf16": 0.01, "fp32": 0.03}  # bfloat16 is emulated in float32
CORE_GB_PER_S, HOST_GB_PER_S = 5.0, 40.0  # to memory: one core, and all of them at most
LOOPBACK_GB_PER_S = 1.0  # an all-reduce through gloo
NETWORK_GB_PER_S = 1.25  # 10 Gb/s


@dataclass(frozen=True)
class Accelerator:
    """One device as torch sees it. Peaks, GB = 10⁹ bytes; `measured` holds measured rates, under
    the names in MEASURED, which take precedence."""

    name: str
    title: str
    vendor: str
    memory_gib: float  # torch's total_memory
    matrix_tflops: Mapping[str, float]  # by number type, dense; fp32 without TF32; absent: has none
    memory_gb_per_s: float
    units: int  # SMs, compute units or cores
    link: str  # one of LINKS
    link_gb_per_s: float  # one direction, per device, to its peers in the node
    host_gb_per_s: float  # one direction
    per_node: int
    network_gb_per_s: float  # one direction, per device; an assumption, clusters differ
    float8: bool = False  # has float8 products that torch trains with
    sources: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON would give it back."""
        return {**dataclasses.asdict(self), "sources": list(self.sources)}


def names(folder: Path = BENCH) -> list[str]:
    """All that `find` knows: the catalogue, then devices measured in `folder`, then `cpu`."""
    own_names = [_name_in(path) for path in sorted(folder.glob("device-*.json"))]
    return [
        *_known(),
        *(name for name in own_names if name not in _known() and name != "cpu"),
        "cpu",
    ]


def find(name: str, folder: Path = BENCH) -> Accelerator:
    """By its name, a shorthand (`h100`, `4090`) or what its driver calls it; or one that was measured
    in `folder`, with its figures. `cpu` is this host as one rank has it."""
    key = _key(name)
    if key == "cpu":
        return cpu(1)
    if key in _keys():
        return _known()[_keys()[key]]
    for path in folder.glob("device-*.json"):
        if _key(_name_in(path)) == key:
            return own(_accelerator(_name_in(path), _section(path, "accelerator"), path), folder)
    if known := recognise(name, None):
        return known
    near = difflib.get_close_matches(key, list(_keys()), n=8, cutoff=0.0)
    first, second = list(dict.fromkeys(_keys()[word] for word in near))[:2]
    raise RecipeError(
        f"no accelerator called {name!r}; nearest are {first} and {second}. `muster plan --gpu list` "
        "lists them all; `muster bench device`, run on one of your own, adds it"
    )


def recognise(device_name: str, memory_gib: float | None) -> Accelerator | None:
    """From the name that NVML, torch or ROCm gives it. Memory distinguishes variants; where it matches
    none (a MIG slice, a modified card), the device is unknown."""
    text = device_name.lower()
    if " mig " in text:
        return None
    found = [_known()[name] for name, pattern in _patterns().items() if re.search(pattern, text)]
    if memory_gib is None and len(found) > 1:
        size = re.search(r"(\d+) ?gb", text)
        memory_gib = float(size[1]) if size else 0.0
    if memory_gib is not None:
        found = [a for a in found if abs(memory_gib / a.memory_gib - 1) <= SAME_MEMORY]
    return found[0] if found else None


def cpu(ranks: int, root: Path = Path("/")) -> Accelerator:
    """This host's processor as one of `ranks` ranks has it, with conservative rates. `root` holds /sys and
    /proc."""
    cores = cpus.find(root).usable
    memory_rate = min(CORE_GB_PER_S * cores, HOST_GB_PER_S) / ranks
    return Accelerator(
        name="cpu",
        title=f"CPU, {cores} core{'s' if cores > 1 else ''}"
        + (f" for {ranks} ranks" if ranks > 1 else ""),
        vendor="cpu",
        memory_gib=_host_memory(root) / 2**30 / ranks,
        matrix_tflops={kind: rate * cores / ranks for kind, rate in CORE_TFLOPS.items()},
        memory_gb_per_s=memory_rate,
        units=cores,
        link="loopback",
        link_gb_per_s=LOOPBACK_GB_PER_S,
        host_gb_per_s=memory_rate,
        per_node=ranks,
        network_gb_per_s=NETWORK_GB_PER_S / ranks,
    )


def own(accelerator: Accelerator, folder: Path = BENCH) -> Accelerator:
    """With the figures measured on such a device, if `folder` has any. A processor is measured as a
    whole, so each of its ranks gets a share."""
    path = file_of(accelerator.name, folder)
    if not path.exists():
        return accelerator
    figures = _section(path, "measured")
    for key, value in figures.items():
        if key not in MEASURED:
            raise _bad(
                path, f"measured.{key}", "is no known figure", f"one of {', '.join(MEASURED)}"
            )
        _number(value, path, f"measured.{key}")
    ranks = accelerator.per_node if accelerator.vendor == "cpu" else 1
    shares = {key: ranks if key in THROUGHPUTS else 1 for key in figures}
    measured = {key: float(value) / shares[key] for key, value in figures.items()}
    return dataclasses.replace(accelerator, measured={**accelerator.measured, **measured})


def file_of(name: str, folder: Path = BENCH) -> Path:
    return folder / f"device-{name}.json"


def slug(device_name: str) -> str:
    """A name for a device that the catalogue does not know."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _name_in(path: Path) -> str:
    return path.stem.removeprefix("device-")


def _key(name: str) -> str:
    """`NVIDIA GeForce RTX 4090`, `rtx-4090`, `RTX4090` and `4090` are one."""
    text = re.sub(r"(?<=\d) ?gb\b", "", name.lower())
    text = re.sub(r"nvidia|geforce|tesla|amd|instinct|rtx", "", text)
    return re.sub(r"[^a-z0-9]", "", text)


@cache
def _document() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(DATA.read_text(encoding="utf-8"), Loader=loader))


@cache
def _known() -> dict[str, Accelerator]:
    entries = _document()["accelerators"].items()
    return {name: _accelerator(name, entry, DATA) for name, entry in entries}


@cache
def _keys() -> dict[str, str]:
    """Every normalized spelling, and the name it means."""
    aliases = _document()["aliases"]
    return {_key(alias): name for alias, name in aliases.items()} | {_key(n): n for n in _known()}


@cache
def _patterns() -> dict[str, str]:
    return {name: entry["called"] for name, entry in _document()["accelerators"].items()}


def _accelerator(name: str, entry: Mapping[str, Any], path: Path) -> Accelerator:
    """An entry of the catalogue or of a measurement, each value checked."""
    values: dict[str, Any] = {"name": name}
    for key, value in _required(entry, path):
        if key in ("title", "vendor", "link"):
            if not isinstance(value, str) or (key == "link" and value not in LINKS):
                expected = f"one of {', '.join(LINKS)}" if key == "link" else "text"
                raise _bad(path, f"{name}.{key}", f"is {value!r}", expected)
            values[key] = value
        elif key == "matrix_tflops":
            if not isinstance(value, Mapping) or not set(value) <= set(NUMBER_TYPES):
                raise _bad(path, f"{name}.{key}", f"is {value!r}", f"rates of {NUMBER_TYPES}")
            values[key] = {k: _number(rate, path, f"{name}.{key}.{k}") for k, rate in value.items()}
        else:
            number = _number(value, path, f"{name}.{key}")
            values[key] = int(number) if key in ("units", "per_node") else number
    values["float8"] = bool(entry.get("float8"))
    return Accelerator(**values, sources=tuple(entry.get("sources", ())))


def _required(entry: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(Accelerator):
        if item.name in ("name", "float8", "sources", "measured"):
            continue
        if item.name not in entry:
            raise _bad(path, item.name, "is missing", "every field of an accelerator")
        yield item.name, entry[item.name]


def _section(path: Path, key: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad(
            path, "", f"cannot be read as JSON ({error})", "a file that `muster bench device` wrote"
        ) from None
    section = document.get(key) if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise _bad(path, key, f"is {section!r}", "a JSON object")
    return section


def _number(value: object, path: Path, key: str) -> float:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise _bad(path, key, f"is {value!r}", "a number above zero")
    return float(value)  # type: ignore[arg-type]


def _bad(path: Path, key: str, what: str, expected: str) -> DataError:
    where = f"{path}: {key}" if key else str(path)
    return DataError(
        f"{where} {what}, expected {expected}; remove the file, or let `muster bench device` write it "
        "anew"
    )


def _host_memory(root: Path) -> int:
    """Bytes: the machine's, or the tightest limit of this process's cgroups."""
    limits = [int(psutil.virtual_memory().total)]
    for folder in cpus._groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            if limit := read_int(folder / name):
                limits.append(limit)
    return min(limits)
