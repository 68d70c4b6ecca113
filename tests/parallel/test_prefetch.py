"""FSDP may ask for the next block ahead: the same numbers, sooner."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

from parallel.models import GPT, course, make_batch, make_engine, micro_batches

ROWS = 8


def trained(mesh, ahead: bool) -> tuple[list[float], list[int]]:
    """Gradient norms, and how many modules each sharded module fetches ahead in the forward pass."""
    options = {"strategy": "fsdp", "fsdp": {"forward_prefetch": ahead}}
    engine = make_engine(mesh, GPT, options)
    batch = make_batch(GPT, ROWS)
    norms = course(engine, micro_batches(mesh, options, batch, 1), batch.units)
    sharded = [m for m in engine.module.modules() if isinstance(m, FSDPModule)]
    fetched = [len(m._get_fsdp_state()._states_to_forward_prefetch) for m in sharded]
    return norms, fetched


def test_each_block_fetches_the_next_and_nothing_else_changes(ranks):
    ahead, plain = ranks(2)(trained, True)[0], ranks(2)(trained, False)[0]
    assert ahead[0] == pytest.approx(plain[0], rel=1e-6)
    assert sum(plain[1]) == 0
    assert sum(ahead[1]) == GPT.layers - 1  # the last has none after it
