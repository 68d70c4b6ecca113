"""Every private name of torch's that muster uses, and where torch keeps it.

Torch may move or change these in any release. `tests/test_torch_internals.py` looks each of them up,
so a new torch that lacks one fails there first, by name. A name is imported when it is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

HOMES = {
    # fake tensors and what happens below autograd: the planner's recordings
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "_disable_current_modes": "torch.utils._python_dispatch",
    "_get_dispatch_mode": "torch._C",
    "_TorchDispatchModeKey": "torch._C",
    "_current_graph_task_id": "torch._C",
    "detect_fake_mode": "torch._guards",
    "tree_flatten": "torch.utils._pytree",
    "tree_leaves": "torch.utils._pytree",
    "tree_map": "torch.utils._pytree",
    "tree_unflatten": "torch.utils._pytree",
    # what torch.compile would make of a block, and when it compiles
    "callback_handler": "torch._dynamo.callback",
    "_reparametrize_module": "torch.nn.utils.stateless",
    "_use_lazy_graph_module": "torch.fx._lazy_graph_module",
    "aot_function": "torch._functorch.aot_autograd",
    "min_cut_rematerialization_partition": "torch._functorch.partitioners",
    "select_decomp_table": "torch._inductor.decomposition",
    # FSDP's and DDP's own arithmetic
    "_compute_bucket_assignment_by_size": "torch.distributed",
    "_fsdp_param": "torch.distributed.fsdp._fully_shard",
    "_fsdp_param_group": "torch.distributed.fsdp._fully_shard",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop",
    # Muon's arithmetic
    "_adjust_lr": "torch.optim._muon",
    "_zeropower_via_newtonschulz": "torch.optim._muon",
    # process groups
    "_resolve_process_group": "torch.distributed.distributed_c10d",
    "_set_pg_timeout": "torch.distributed.distributed_c10d",
    "_world": "torch.distributed.distributed_c10d",
    "_distributed_c10d": "torch._C",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(HOMES[name]), name)


LOWERING = "torch._inductor.lowering"


class _LateFunctions(ModuleType):
    """Stands for a module of which another imports functions; each imports the real module when called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # looked for in every module by whoever goes through them
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(self.__name__) is self:
                raise ImportError(f"{self.__name__}.{name} is called while it is being imported")
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return call


def import_pattern_matcher() -> None:
    """Of which the partitioner calls two functions. It imports all of Inductor's lowerings, which takes
    seconds, for a function that only Inductor calls."""
    if LOWERING in sys.modules:
        return
    sys.modules[LOWERING] = _LateFunctions(LOWERING)
    try:
        import_module("torch._inductor.pattern_matcher")
    finally:
        del sys.modules[LOWERING]
