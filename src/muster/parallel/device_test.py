"""Matrix products whose results are known: whether this rank's device computes right.

All factors, products and partial sums are whole numbers that each type holds exactly, so the result does not
depend on the kernel, the order of its sums, TF32 or the precision it adds in: one other bit is a fault.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from muster.errors import DeviceError
from muster.parallel.mesh import Mesh

BLOCK = 64  # rows and columns of the result, which repeats
INNER = 96
SELECTED = 16  # columns of the first factor with one large number per row
REPEATED = 32  # times in each direction on a GPU: tiles of work for all of its multiprocessors


def verify_device(mesh: Mesh) -> None:
    """A DeviceError on the rank whose device computes wrong."""
    if problem := wrong_product(mesh.device):
        raise DeviceError(
            f"rank {mesh.rank}: {mesh.place} computes wrong: {problem}; {cure(mesh.device)}"
        )


def cure(device: torch.device) -> str:
    if device.type == "cpu":
        return "take this machine out of the run and test its memory and processor"
    return (
        "leave this GPU out (CUDA_VISIBLE_DEVICES, or --gpus MIN:MAX, under which the others go on without it), look "
        "at `nvidia-smi -q -d ECC` and the kernel's Xid errors, and reset or replace it"
    )


def wrong_product(device: torch.device) -> str | None:
    """Where a product differs from what it must be, in words; None where all are right."""
    for kind in kinds(device):
        try:
            found, expected = _product(kind, device)
            if words := _difference(found, expected):
                return f"a matrix product in {str(kind).removeprefix('torch.')} {words}"
        except torch.AcceleratorError as error:
            if "out of memory" in str(error):
                raise
            return f"a matrix product failed ({str(error).partition(chr(10))[0]})"
    return None


def kinds(device: torch.device) -> tuple[torch.dtype, ...]:
    if device.type == "cpu":
        return torch.float32, torch.bfloat16
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float32, torch.float16, torch.bfloat16
    return torch.float32, torch.float16


def _product(kind: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """[times, BLOCK, times, BLOCK] as the device computes it, and the block [BLOCK, BLOCK] that each must be."""
    a, b, expected = factors(kind)
    times = 1 if device.type == "cpu" else REPEATED
    found = torch.mm(a.to(device, kind).repeat(times, 1), b.to(device, kind).repeat(1, times))
    return found.view(times, BLOCK, times, BLOCK), expected.to(device, kind)


@cache
def factors(kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers, and their product by the processor's integer arithmetic. In float32 they have 7 bits, and
    sums fewer than 24. bfloat16 holds whole numbers up to 256: each row has one large number, times at most 11,
    and the rest is ±1, so that no partial sum is larger."""
    drawn = torch.Generator().manual_seed(0)
    if kind == torch.float32:
        a = torch.randint(-127, 128, (BLOCK, INNER), generator=drawn)
        b = torch.randint(-127, 128, (INNER, BLOCK), generator=drawn)
        return a, b, a @ b
    a = torch.randint(0, 2, (BLOCK, INNER), generator=drawn) * 2 - 1
    b = torch.randint(0, 2, (INNER, BLOCK), generator=drawn) * 2 - 1
    large = torch.randint(1, 16, (BLOCK, 1), generator=drawn)
    places = torch.randint(0, SELECTED, (BLOCK, 1), generator=drawn)
    a[:, :SELECTED] = torch.zeros_like(a[:, :SELECTED]).scatter_(1, places, large)
    b[:SELECTED] *= torch.randint(1, 12, (SELECTED, BLOCK), generator=drawn)
    return a, b, a @ b


def _difference(found: Tensor, expected: Tensor) -> str | None:
    wrong = found != expected[None, :, None, :]  # also where it is not a number
    count = int(wrong.sum())
    if not count:
        return None
    i, row, j, column = wrong.nonzero()[0].tolist()
    got, right = float(found[i, row, j, column]), float(expected[row, column])
    return (
        f"is wrong in {count} of {wrong.numel()} elements, first in row {i * BLOCK + row}, column {j * BLOCK + column}: "
        f"{got:g} for {right:g}"
    )
