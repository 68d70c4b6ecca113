"""torch's variable-length kernel on a GPU computes what the mask does; `-s` prints the time of both."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from muster.data.text.packing import document_starts
from muster.models import varlen
from muster.models.attention import Attention
from muster.models.presets import configure

pytestmark = pytest.mark.gpu
BATCH, TIME = 2, varlen.SHORT


@pytest.fixture
def documents() -> varlen.Documents:
    torch.manual_seed(0)
    numbers = (torch.rand(BATCH, TIME) < 1 / 100).long().cumsum(1)
    room = int(numbers.max()) + 9
    starts = torch.from_numpy(document_starts(numbers.numpy(), room)).cuda()
    found = varlen.documents_of(numbers.cuda(), starts)
    assert found is not None
    assert found[1] is not None, "this GPU and torch do not run the kernel"
    return found


def attend(heads: int, kv_heads: int, window: int | None, documents: varlen.Documents):
    """Output and gradients of one attention in bfloat16, and the seconds of ten more."""
    made = configure("llama-micro", vocab=257)
    config = dataclasses.replace(made, heads=heads, kv_heads=kv_heads, window=window)
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(BATCH, n, TIME, 64, device="cuda", generator=generator)
        .bfloat16()
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )

    def step() -> list[torch.Tensor]:
        out = Attention.attend(q, k, v, documents, 0, config, 0.0)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    found = step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    return found, time.perf_counter() - begin


@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(8, 8, None), (8, 2, None), (8, 8, 64)])
def test_the_kernel_computes_what_the_mask_does(documents, heads, kv_heads, window):
    fast, fast_s = attend(heads, kv_heads, window, documents)
    slow, slow_s = attend(heads, kv_heads, window, (documents[0], None))
    print(
        f"variable-length {fast_s * 100:.2f} ms, mask {slow_s * 100:.2f} ms, forward and backward"
    )
    for one, other in zip(fast, slow, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()  # bfloat16
