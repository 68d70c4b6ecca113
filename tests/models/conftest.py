from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_every_time(one_thread: None) -> None:
    """One seed; and one thread, since these tensors are too small to be worth two."""
    torch.manual_seed(0)
