"""Memory in use after an out-of-memory error: what was requested, what is free, the largest tensors."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Sequence
from heapq import nlargest

import psutil
import torch
from torch import Tensor, nn

from muster.torch_internals import FakeTensor

SIGNS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory"
)
WANTED = re.compile(
    r"ried to allocate ([\d.]+) (bytes|[KMG]iB)|Unable to allocate ([\d.]+ [KMGT]iB)"
)


def out_of_memory(error: BaseException | None) -> bool:
    """Of a device or the host, from any library; also as the cause of another error."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return bool(SIGNS.search(str(error))) or out_of_memory(error.__cause__)


def wanted(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause:
        if found := WANTED.search(str(cause)):
            number, unit, numpy = found.groups()
            amount = _gib(float(number)) if unit == "bytes" else numpy or f"{number} {unit}"
            return f"{amount} more was wanted, "
        cause = cause.__cause__
    return ""


def budget(device: torch.device) -> str:
    if device.type != "cuda":
        free, held = psutil.virtual_memory().available, psutil.Process().memory_info().rss
        return f"it holds {_gib(held)} and the host has {_gib(free)} free"
    free, total = torch.cuda.mem_get_info(device)
    if (share := torch.cuda.get_per_process_memory_fraction(device)) < 1:  # a rehearsal's
        return (
            f"it holds {_gib(torch.cuda.memory_allocated(device))} of {_gib(share * total)}, its share "
            "of the GPU in this rehearsal"
        )
    reserved = torch.cuda.memory_reserved(device)
    words = (
        f"it holds {_gib(torch.cuda.memory_allocated(device))} and {_gib(free)} of "
        f"{_gib(total)} are free"
    )
    elsewhere = total - free - reserved
    return words + (f"; {_gib(elsewhere)} are not torch's" if elsewhere > 2 * 2**30 else "")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def largest(parts: Sequence[nn.Module], device: torch.device, count: int = 5) -> list[str]:
    """The largest tensors alive on `device`, equal ones grouped. On a GPU also those that only autograd
    holds."""
    sizes: dict[int, int] = {}
    names: dict[int, str] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            _note_tensor(thing, device, sizes, names)
    for part in parts:
        for name, parameter in part.named_parameters():
            _note_tensor(parameter, device, sizes, names, name)
            if parameter.grad is not None:
                _note_tensor(parameter.grad, device, sizes, names, f"gradient of {name}")
    if device.type == "cuda":
        sizes = {
            block["address"]: block["requested_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == device.index
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
    top = nlargest(20 * count, sizes.items(), key=lambda item: item[1])
    alike = Counter(
        f"{_gib(size)} {names.get(start, 'held by autograd or a library')}" for start, size in top
    )
    return [f"{n} × {words}" if n > 1 else words for words, n in alike.items()][:count]


def _note_tensor(
    tensor: Tensor,
    device: torch.device,
    sizes: dict[int, int],
    names: dict[int, str],
    name: str | None = None,
) -> None:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.device != device or local.layout is not torch.strided or isinstance(local, FakeTensor):
        return
    try:
        storage = local.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # no memory behind it
        return
    sizes[start] = storage.nbytes()
    shape = f"{list(local.shape)} {str(local.dtype).removeprefix('torch.')}"
    names[start] = f"{name} {shape}" if name else shape
