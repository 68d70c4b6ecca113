"""A device that computes wrong is found by products whose results are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from check.people import rank_names
from muster.checks import products
from muster.errors import DeviceError
from muster.observe.results import complete_steps, read_lines
from muster.parallel.device_test import factors, kinds, verify_device, wrong_product
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.training.loop import train
from pool import RankError
from training import make_job

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def faulty(spoil: Callable[[Tensor], None], *only: torch.dtype) -> Iterator[None]:
    """The product of two matrices comes out otherwise, in these types or in all."""
    real = torch.mm

    def mm(a: Tensor, b: Tensor) -> Tensor:
        found = real(a, b)
        if not only or found.dtype in only:
            spoil(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", mm)
        yield


def lowest_bit(found: Tensor) -> None:
    """Of one element, in place: the smallest fault there can be."""
    found[3, 5:6].view(torch.uint8)[0] ^= 1


def not_a_number(found: Tensor) -> None:
    found[0, 0] = torch.nan


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_products_are_exact_whatever_the_order_of_their_sums(kind):
    """Each running sum is a number that the type holds, from either end and in any part."""
    a, b, expected = factors(kind)
    terms = (a.to(kind)[:, :, None] * b.to(kind)[None]).unbind(1)
    for order in (terms, terms[::-1], terms[::2] + terms[1::2]):
        total = torch.zeros(expected.shape, dtype=kind)
        for term in order:
            total += term
        assert torch.equal(total.long(), expected)
    assert int((a.abs() @ b.abs()).max()) <= 2 ** {24: 24, 11: 11, 8: 8}[digits(kind)]


def digits(kind: torch.dtype) -> int:
    """Bits of a type's whole numbers."""
    return 1 - round(torch.tensor(torch.finfo(kind).eps).log2().item())


def test_a_cpu_that_computes_right_passes_in_every_type():
    assert set(kinds(CPU)) == {torch.float32, torch.bfloat16}
    assert wrong_product(CPU) is None


@pytest.mark.parametrize("spoil", [lowest_bit, not_a_number])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_one_wrong_bit_is_found(kind, spoil):
    with faulty(spoil, kind):
        words = wrong_product(CPU)
    assert words is not None
    assert words.startswith(
        f"a matrix product in {str(kind).removeprefix('torch.')} is wrong in 1 of "
    )


def test_rank_device_and_node_are_named_with_the_cure(monkeypatch):
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(nodename="node-7"))
    mesh = Mesh(3, 0, Layout(replicate=4), CPU, None)
    verify_device(mesh)
    with faulty(lowest_bit), pytest.raises(DeviceError) as failure:
        verify_device(mesh)
    words = str(failure.value)
    assert words.startswith("rank 3: node-7 computes wrong: a matrix product in float32 ")
    assert "row 3, column 5: " in words
    assert words.endswith("test its memory and processor")


def test_the_check_names_every_rank_that_computes_wrong():
    context = SimpleNamespace(device=CPU)
    right = products.measure(context)
    with faulty(lowest_bit):
        wrong = products.measure(context)
    names = rank_names("a", "b")
    (fine,) = products.judge({0: right, 1: right}, names)
    assert (fine.status, fine.words) == ("ok", "matrix products in float32, bfloat16 are exact")
    (fault,) = products.judge({0: right, 1: wrong}, names)
    assert fault.status == "fail"
    assert fault.words.startswith("rank 1 on b computes wrong: a matrix product in float32 ")
    assert (fault.ranks, fault.hosts) == ((1,), ("b",))


def train_on_a_failing_device(mesh: Mesh, folder: str, recipe: str, from_step: int) -> None:
    """The device computes wrong from that step on, in a type that this model does not train in."""
    asked = ["training.steps=8", "checkpoint.every_steps=4", "checkpoint.verify_device_steps=2"]
    job = make_job(mesh, folder, asked, recipe)
    real, steps = job.engine.step, [job.start]

    def step(*given: Any) -> None:
        steps[0] += 1
        real(*given)

    def spoil(found: Tensor) -> None:
        if steps[0] >= from_step:
            lowest_bit(found)

    job.engine.step = step  # type: ignore[method-assign]
    try:
        with faulty(spoil, torch.bfloat16):
            train(job)
    finally:
        job.observer.close()


def test_a_device_that_fails_in_a_run_ends_it_before_anything_is_saved(ranks, recipe, tmp_path):
    for from_step, saved in ((9, [4, 8]), (3, [])):
        folder = tmp_path / str(from_step)
        if saved:
            ranks(1)(train_on_a_failing_device, str(folder), recipe, from_step)
        else:
            with pytest.raises(RankError, match=r"rank 0: .* computes wrong") as failure:
                ranks(1)(train_on_a_failing_device, str(folder), recipe, from_step)
            assert failure.value.kind == "DeviceError"
            assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
        assert complete_steps(folder) == saved
