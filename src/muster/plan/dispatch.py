"""Dispatch modes that leave torch's compiler alone.

Torch wraps `__torch_dispatch__` of every mode so that torch.compile does not trace into it. The first
call of such a wrapper imports torch._dynamo, which takes seconds. Recordings are never traced by it.
"""

from __future__ import annotations

import inspect

from muster.torch_internals import FakeTensorMode, TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose subclasses are not wrapped."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeMode(FakeTensorMode):
    """A FakeTensorMode without the wrapper, which takes real tensors too."""

    __torch_dispatch__ = inspect.unwrap(FakeTensorMode.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
