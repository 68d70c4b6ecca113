"""Memory and kernels of a block under torch.compile, estimated without compiling it.

AOTAutograd's joint graph, partitioned by the same min-cut that Inductor uses, gives exactly what a
compiled block saves for its backward pass. `muster.planner.fused_kernels` estimates the kernels of each graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from muster.parallel.blocks import SAVED_OPS, Checkpointing
from muster.planner.fused_kernels import Summary, is_tensor, source_of
from muster.planner.trace import Recorder
from muster.torch_internals import (
    _disable_current_modes,
    _reparametrize_module,
    detect_fake_mode,
    import_pattern_matcher,
    tree_flatten,
    tree_unflatten,
)


def import_compiler() -> None:
    """Takes seconds."""
    import_pattern_matcher()
    from muster.torch_internals import (  # noqa: F401
        aot_function,
        min_cut_rematerialization_partition,
        select_decomp_table,
    )


@dataclass
class Compiler:
    """Compiles once per block class and input shapes; traces that share this object share its cache."""

    recorder: Recorder | None = None
    cache: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    def module(
        self, root: nn.Module, module: nn.Module, checkpointing: Checkpointing = "none"
    ) -> None:
        """In place, as `torch.compile(module.forward)` would after `checkpoint_activations`."""
        forward = module.forward
        own = {id(p) for p in module.parameters()}
        own |= {id(p) for p in getattr(module, "borrows", tuple)()}
        names = [name for name, p in root.named_parameters() if id(p) in own]

        def run(*args: Any, **kwargs: Any) -> Any:
            weights = [root.get_parameter(name) for name in names]

            def pure(weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
                with _reparametrize_module(root, dict(zip(names, weights, strict=True))):
                    return forward(*args, **kwargs)

            key = (type(module), len(names), checkpointing)
            return self.call(key, pure, checkpointing, weights, *args, **kwargs)

        module.forward = run  # type: ignore[method-assign]

    def call(
        self,
        key: Any,
        function: Callable[..., Any],
        checkpointing: Checkpointing,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def flat(*given: Tensor) -> Any:
            filled = list(others)
            for position, tensor in zip(positions, given, strict=True):
                filled[position] = tensor
            args, kwargs = tree_unflatten(filled, shape)
            return function(*args, **kwargs)

        kinds = tuple((t.shape, t.dtype, t.requires_grad) for t in tensors)
        cache_key = (key, kinds, torch.is_autocast_enabled("cpu"))
        if cache_key not in self.cache:
            self.cache[cache_key] = self._compiled(flat, checkpointing, tensors)
        assert self.recorder is not None
        with self.recorder.unrecorded():
            return self.cache[cache_key](*tensors)

    def _compiled(
        self, function: Callable[..., Any], checkpointing: Checkpointing, like: Sequence[Tensor]
    ) -> Callable[..., Any]:
        """For tensors `like` these. AOTAutograd compiles at the first call and keeps what it was called
        with: that is a call with other tensors, which nobody records."""
        import_compiler()
        from muster.torch_internals import (
            _use_lazy_graph_module,
            aot_function,
            select_decomp_table,
        )

        compiled = aot_function(
            function,
            self._kernels,  # type: ignore[arg-type]
            self._kernels,  # type: ignore[arg-type]
            partial(_partition, checkpointing),
            select_decomp_table(),
            enable_log=False,
        )
        recorder, self.recorder = self.recorder, Recorder()
        mode = detect_fake_mode(like)
        with _disable_current_modes(), mode or nullcontext(), _use_lazy_graph_module(True):
            copies = {id(tensor): _empty_like(tensor) for tensor in like}
            compiled(*(copies[id(tensor)] for tensor in like))
        self.recorder = recorder
        return compiled

    def _kernels(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """The compiler function for AOTAutograd, called once with each of the forward and backward graphs."""
        summary = Summary.of(graph)

        def run(given: list[Any]) -> Any:
            recorder = self.recorder
            assert recorder is not None
            tensors = list(given)
            given.clear()
            with recorder.unrecorded():
                out = _allocate_outputs(graph.graph, tensors)
            recorder.track_temporary(summary.peak)
            recorder.release(tensors[i] for i in summary.consumed)
            for tensor in out:
                if isinstance(tensor, Tensor):
                    recorder.track(tensor)
            recorder.trace.ops.extend((cost, recorder.current_point) for cost in summary.costs)
            recorder.trace.calls[recorder.current_point, "kernel"] += len(summary.costs)
            recorder.trace.calls[recorder.current_point, "graph"] += 1
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=tensor.requires_grad,
    )


def _partition(
    checkpointing: Checkpointing, joint: fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph, without the values of constants, which AOTAutograd would copy."""
    from muster.torch_internals import min_cut_rematerialization_partition

    if checkpointing != "none":
        _tag_recomputed(joint.graph, checkpointing)
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    for graph in (forward, backward):
        graph._buffers.update(dict.fromkeys(graph._buffers))
    return forward, backward


def _tag_recomputed(joint: fx.Graph, checkpointing: Checkpointing) -> None:
    """The operations of the forward pass, as torch.compile tags those of a checkpointed function."""
    backward = {node for node in joint.nodes if node.name.startswith("tangents")}
    for node in joint.nodes:
        if backward.intersection(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            picked = node.target is operator.getitem
            target = node.all_input_nodes[0].target if picked else node.target
            saved = checkpointing == "selective" and target in SAVED_OPS
            policy = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta |= {"recompute": policy, "ac_graph_id": 0}


def _allocate_outputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The outputs, without computing them. Some are views of inputs or of other outputs."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, inputs, strict=True))
    (output,) = (node for node in graph.nodes if node.op == "output")
    return list(fx.node.map_arg(output.args[0], lambda node: _allocate(node, values)))


def _allocate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Views are views of what is allocated for their source."""
    if node not in values:
        if source_of(node) is node and is_tensor(like := node.meta["val"]):
            values[node] = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        else:
            target: Any = node.target
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda used: _allocate(used, values)
            )
            values[node] = target(*args, **kwargs)
    return values[node]
