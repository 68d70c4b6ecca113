"""ZeRO through DeepSpeed: optimizer state, gradients or everything partitioned over all ranks.

DeepSpeed keeps weights, gradients and the optimizer's state in flat partitions of its own. Losses,
the gradient norm and checkpoints have the same form as with every other strategy.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muster.data.loader import Batch, Inputs
from muster.errors import MusterError
from muster.models.weights import Weights
from muster.parallel.blocks import checkpoint_activations, find_blocks, prepare_norms
from muster.parallel.compilation import CompilationError, compile_blocks
from muster.parallel.deepspeed_config import ALIGNMENT_BYTES, config_for, packing_order
from muster.parallel.default_plan import plan_of
from muster.parallel.engine import Builder, MakeOptimizer, NamedParameters, StepFunctions
from muster.parallel.materialise import materialise
from muster.parallel.mesh import Mesh
from muster.parallel.replicas import EVERYONE, Held
from muster.parallel.state import by_slot, init_optimizer_state, set_step, step_of
from muster.parallel.timestamps import DeviceTimestamp
from muster.recipe.schema import Recipe


def library() -> Any:
    try:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        import deepspeed
    except ImportError as error:
        raise MusterError(
            f"distributed.strategy: zero needs DeepSpeed ({error}): pip install 'muster-train[deepspeed]'"
        ) from None
    # On CPUs DeepSpeed would first compile a shared-memory transport, which takes a compiler, a
    # minute and a lock file that remains after a killed process; gloo is available anyway.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def apply(
    builder: Builder,
    mesh: Mesh,
    recipe: Recipe,
    precision: str,
    make_optimizer: MakeOptimizer,
) -> ZeroEngine:
    """activation checkpointing → compile → weights → ZeRO."""
    os.environ["LOCAL_RANK"] = str(mesh.device.index or 0)  # all that DeepSpeed reads
    config = config_for(recipe, mesh.layout.zero, mesh.world, precision)
    weights = builder.weights()
    partitioned = mesh.layout.zero == 3 and weights is not None
    with _partitioning(config, partitioned, weights is not None):
        model = builder.build_model()
    prepare_norms(model, recipe)
    plan = plan_of(model, builder)
    blocks = find_blocks(model, plan.blocks, "model.preset")
    checkpoint_activations(blocks, recipe.training.activation_checkpointing)
    compiled = (
        compile_blocks(model, blocks, plan.compiled) if recipe.training.compile is True else []
    )
    if partitioned:
        assert weights is not None
        _fill_partitions(model, weights, mesh)
    elif weights is not None:
        materialise(model, weights, mesh.device)
    for module in model.modules():
        for parameter in getattr(module, "borrows", lambda: ())():
            library().zero.register_external_parameter(module, parameter)
    engine = ZeroEngine(model, mesh, config, make_optimizer)
    if mesh.layout.zero < 3 and mesh.device.type == "cuda" and (found := misaligned(compiled)):
        raise CompilationError(
            f"training.compile: {found}; set training.compile=false, or choose zero3 or fsdp"
        )
    return engine


def misaligned(compiled: Sequence[nn.Module]) -> str | None:
    """Compiled code reads 16 bytes at a time where the first block's weights allow it, and blocks share
    the code: a later block whose weights begin elsewhere would end the run with a CUDA error."""
    for module in compiled:
        for name, parameter in module.named_parameters():
            if parameter.data_ptr() % ALIGNMENT_BYTES:
                return (
                    f"{name} of a {type(module).__name__} does not begin at a multiple "
                    f"of {ALIGNMENT_BYTES} bytes, because DeepSpeed packs the weights, and the size of one before "
                    "it is no multiple"
                )
    return None


def _partitioning(
    config: dict[str, Any], partitioned: bool, on_meta: bool
) -> AbstractContextManager[Any]:
    """At stage 3 each layer is partitioned as soon as it is built."""
    if partitioned:
        return library().zero.Init(config_dict_or_path=config)  # type: ignore[no-any-return]
    return torch.device("meta") if on_meta else nullcontext()


def _fill_partitions(model: nn.Module, weights: Weights, mesh: Mesh) -> None:
    """Gathers one parameter at a time, filled by rank 0 and partitioned again."""
    for name, parameter in model.named_parameters():
        with library().zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if mesh.first:
                region = tuple(slice(0, n) for n in parameter.shape)
                shape = tuple(parameter.shape)
                parameter.copy_(weights.read(name, shape, region, mesh.device))


def _in_packing_order(model: nn.Module) -> NamedParameters:
    named = model.named_parameters()
    return NamedParameters(sorted(named, key=lambda pair: packing_order(pair[1].numel())))


class ZeroEngine:
    """Adapts DeepSpeed's engine to `Engine`."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, config: dict[str, Any], make_optimizer: MakeOptimizer
    ) -> None:
        self.mesh, self.parts = mesh, [model]
        self._axis = init_device_mesh(mesh.device.type, (mesh.world,))
        self.engine, self.optimizer, *_ = library().initialize(
            model=model, optimizer=make_optimizer(_in_packing_order(model)), config=config
        )
        self._pending = False

    def accumulate(self, batches: Sequence[Batch], functions: StepFunctions) -> list[Tensor]:
        """DeepSpeed averages over ranks; the loss is multiplied by their number to get the sum."""
        losses = []
        for i, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            prepared = functions.prepare(batch)
            with functions.autocast():
                inputs = functions.inputs(prepared)
                loss = functions.loss(self.engine(*inputs.args, **inputs.shared), prepared)
            self.engine.backward(loss * (functions.scale * self.mesh.world), scale_wrt_gas=False)
            losses.append(loss.detach())
        self._pending = True
        return losses

    def forward(self, inputs: Inputs) -> Any:
        return self.engine(*inputs.args, **inputs.shared)

    def grad_norm(self, scale: float = 1.0) -> Tensor:
        """The norm that DeepSpeed will clip by when it steps."""
        if self.mesh.layout.zero < 3:
            norm = self.optimizer.scaled_global_norm()
        else:
            from deepspeed.runtime.utils import get_global_norm

            norm = get_global_norm(norm_list=self.optimizer._get_norm_groups())
        return torch.as_tensor(norm, dtype=torch.float64, device=self.mesh.device)

    def step(self, lr: float, divisor: Tensor | None = None, finite: Tensor | None = None) -> None:
        """DeepSpeed clips by itself. It decides on the host whether to step."""
        if finite is not None and not finite:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        self._pending = False

    def zero_grad(self) -> None:
        """A step already cleared its gradients. DeepSpeed drops those of a skipped step when it finds
        them not finite, so they are set to NaN. Stage 3 keeps their buffers and never overwrites the
        padding at the end of a partition."""
        if self._pending:
            groups = self.optimizer.averaged_gradients.values()
            buffers = [gradient for gradients in groups for gradient in gradients or ()]
            for buffer in buffers:
                buffer.fill_(math.nan)
            norms = getattr(
                self.optimizer, "norm_for_param_grads", {}
            )  # instead, of what is offloaded
            norms.update(dict.fromkeys(norms, torch.tensor(math.nan)))
            library_log = logging.getLogger("DeepSpeed")
            library_log.setLevel(logging.ERROR)  # it would warn of an overflow
            self.engine.step()
            library_log.setLevel(logging.WARNING)
            for buffer in buffers:
                buffer.zero_()
            self._pending = False

    def ready(self) -> DeviceTimestamp | None:
        return None

    def held(self) -> Iterable[Held]:
        """The weights that the model computes with; at stage 3 only those that stay gathered. The rest is
        partitioned: each rank has its own."""
        for name, parameter in self._named_parameters():
            status = getattr(parameter, "ds_status", None)
            if status is None or status.name == "AVAILABLE":
                yield Held(name, parameter.data, EVERYONE)

    def state(self) -> dict[str, Any]:
        """Gathered one tensor at a time; each rank keeps its shard of each."""
        self._init_state()
        return {
            "model": {n: self._shard(self._read(p, None)) for n, p in self._named_parameters()}
            | {n: b for n, b in self.parts[0].state_dict().items() if n in self._buffers()},
            "optimizer": by_slot(
                {
                    n: {moment: self._shard(self._read(p, moment)) for moment in self._moments()}
                    for n, p in self._named_parameters()
                    if p.requires_grad
                },
                step_of(self.optimizer.optimizer),
            ),
        }

    def load_state(self, loaded: dict[str, Any]) -> None:
        """An engine that has computed may hold gathered weights, and would go on with those at stage 3."""
        if self.mesh.layout.zero == 3:
            self.engine.empty_partition_cache()
        for name, parameter in self._named_parameters():
            self._write(parameter, None, loaded["model"][name].full_tensor())
            for moment in self._moments() if parameter.requires_grad else ():
                self._write(parameter, moment, loaded["optimizer"][moment][name].full_tensor())
        set_step(self.optimizer.optimizer, loaded)

    def _init_state(self) -> None:
        """The state that DeepSpeed allocates at the first step, and its mapping to it."""
        inner, everything = self.optimizer.optimizer, self.mesh.layout.zero == 3
        init_optimizer_state(
            inner,
            self.optimizer.fp32_partitioned_groups_flat
            if everything
            else self.optimizer.single_partition_of_fp32_groups,
        )
        for _, parameter in self._named_parameters():
            mapping = getattr(parameter, "_hp_mapping", None)  # stages 1 and 2, on the owner
            if mapping is not None:
                flat = self.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
                mapping.set_optim_state_fragment(flat, inner.state[flat])

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.parts[0].named_parameters()

    def _buffers(self) -> set[str]:
        return {name for name, _ in self.parts[0].named_buffers()}

    def _moments(self) -> list[str]:
        """What the optimizer keeps of each element of the weights."""
        slots: dict[str, Tensor] = next(iter(self.optimizer.optimizer.state.values()), {})
        return [name for name in slots if name != "step"]

    def _read(self, parameter: nn.Parameter, moment: str | None) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not parameter.requires_grad:  # DeepSpeed keeps no float32 copy of frozen weights
            with library().zero.GatheredParameters([parameter]):
                return parameter.detach().float().clone()
        if moment is None:
            return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
        return safe_get_full_optimizer_state(parameter, moment)  # type: ignore[no-any-return]

    def _write(self, parameter: nn.Parameter, moment: str | None, value: Tensor) -> None:
        """Into DeepSpeed's float32 partitions and, for weights, into what the model computes with."""
        from deepspeed import utils

        if self.mesh.layout.zero == 3:
            partition = self._partition(parameter, value)
            if moment is not None:
                utils.safe_set_local_optimizer_state(parameter, partition, moment)
                return
            if parameter.requires_grad:
                utils.safe_set_local_fp32_param(parameter, partition)
            parameter.ds_tensor.data.copy_(partition)  # type: ignore[attr-defined]
        elif moment is not None:
            utils.safe_set_full_optimizer_state(parameter, value, moment)
        else:
            if parameter.requires_grad:
                utils.safe_set_full_fp32_param(parameter, value)
            parameter.data.copy_(value)

    def _partition(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's partition at stage 3: equal chunks of the flat tensor, the last one padded
        (DeepSpeed's own function for whole values does not pad)."""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        flat = value.flatten()
        padded = torch.nn.functional.pad(flat, (0, size * self.mesh.world - flat.numel()))
        return padded[size * self.mesh.rank : size * (self.mesh.rank + 1)]

    def _shard(self, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor, as with FSDP."""
        return distribute_tensor(whole, self._axis, [Shard(0)], src_data_rank=None)
