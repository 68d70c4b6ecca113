"""Memory and kernels of a block under torch.compile, estimated without compiling it.

AOTAutograd's joint graph, partitioned by the same min-cut that Inductor uses, gives exactly what a
compiled block saves for its backward pass. The kernels of each graph are estimated: matrix products
and attention are extern kernels, and pointwise operations between them are fused into one kernel. What
another kernel could compute pointwise from memory, it computes anew instead of reading it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from muster.parallel.blocks import SAVED_OPS, Checkpointing
from muster.planner.op_cost import OpCost, measure
from muster.planner.trace import Recorder, rounded
from muster.torch_internals import (
    _disable_current_modes,
    _reparametrize_module,
    detect_fake_mode,
    import_pattern_matcher,
    tree_flatten,
    tree_unflatten,
)

# Extern kernels besides matrix products and attention: not fused, since access is not pointwise.
EXTERN = (
    "embedding_dense_backward",
    "index_put",
    "sort",
    "cumsum",
    "_ctc_loss",
    "fft",
    "max_pool",
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


@dataclass(frozen=True)
class Summary:
    """Kernels of the forward or backward graph, and its memory besides the inputs."""

    costs: list[OpCost]
    peak: int  # bytes
    consumed: list[int]  # inputs freed during the call: what the forward graph saved

    @classmethod
    def of(cls, graph: fx.GraphModule) -> Summary:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        kept = [
            i
            for i, node in enumerate(inputs)
            if not node.name.startswith(("primals", "tangents")) and _size(node)
        ]
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        sources = {node: _source(node) for node in (*nodes, *inputs)}
        groups = _fusion_groups(nodes, sources)
        realized = _realized(nodes, sources, groups, output)
        costs = [
            _extern_cost(node) for node in nodes if node not in groups and node is sources[node]
        ]
        costs += _fused_costs(groups, sources, realized)
        peak = _peak_memory(nodes, sources, groups, realized, [inputs[i] for i in kept], output)
        return cls([cost for cost in costs if cost is not None], peak, kept)


def _allocate_outputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The outputs, without computing them. Some are views of inputs or of other outputs."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, inputs, strict=True))
    (output,) = (node for node in graph.nodes if node.op == "output")
    return list(fx.node.map_arg(output.args[0], lambda node: _allocate(node, values)))


def _allocate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Views are views of what is allocated for their source."""
    if node not in values:
        if _source(node) is node and _is_tensor(like := node.meta["val"]):
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


def _source(node: fx.Node) -> fx.Node:
    """The node whose storage this one aliases; results of a multi-output operation are distinct."""
    while node.op == "call_function":
        if node.target is not operator.getitem and not getattr(node.target, "is_view", False):
            if str(node.target) not in ("aten._unsafe_view.default", "aten.alias.default"):
                return node
        elif node.target is operator.getitem and not _picks_from_view(node):
            return node
        node = node.all_input_nodes[0]
    return node


def _picks_from_view(item: fx.Node) -> bool:
    """Whether `item` indexes the result of a view operation, such as `split`."""
    return bool(getattr(item.all_input_nodes[0].target, "is_view", False))


def _is_extern(node: fx.Node) -> bool:
    name = str(getattr(node.target, "_schema", node.target)).split("(")[0].removeprefix("aten::")
    products = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")
    return name.split(".")[0] in products or name.startswith(
        ("convolution", "_scaled_dot_product", "_fft", *EXTERN)
    )


def _fusion_groups(nodes: Iterable[fx.Node], sources: dict[fx.Node, fx.Node]) -> dict[fx.Node, Any]:
    """The fused kernel of each pointwise operation. A fused kernel does not span an extern kernel: the
    level of a node is the number of extern kernels before it."""
    level: dict[fx.Node, int] = defaultdict(int)
    group: dict[fx.Node, Any] = {}
    parents: dict[Any, Any] = {}

    def find(key: Any) -> Any:
        while parents.get(key, key) != key:
            key = parents[key]
        return key

    for node in nodes:
        before = [sources[n] for n in node.all_input_nodes if n in sources]
        picked = node.target is operator.getitem
        extern = not picked and sources[node] is node and _is_extern(node)
        base = max((level[n] for n in before), default=0)
        level[node] = base + 1 if extern else base
        if extern or sources[node] is not node or (picked and before[0] not in group):
            continue
        group[node] = node
        parents[node] = node
        for n in before:
            if n in group and level[n] == level[node]:
                parents[find(n)] = find(node)
    return {node: find(node) for node in group}


def _realized(
    nodes: Iterable[fx.Node],
    sources: dict[fx.Node, fx.Node],
    groups: dict[fx.Node, Any],
    output: fx.Node,
) -> set[fx.Node]:
    """Buffers that Inductor realizes: results of extern kernels, what these read, outputs, and the results of
    reductions that another kernel reads."""
    realized = {n for n in nodes if n is sources[n] and n not in groups}
    for node in (*nodes, output):
        for used in node.all_input_nodes:
            source = sources.get(used)
            if source not in groups or (node is not output and sources[node] is not node):
                continue
            if node not in groups or (groups[node] != groups[source] and _reduces(source)):
                realized.add(source)
    return realized


def _reduces(node: fx.Node) -> bool:
    """Whether it has fewer elements than one of its inputs."""
    values = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
    sizes = [value.numel() if isinstance(value, Tensor) else 0 for value in values]
    return sizes[0] < max(sizes)


def _read(
    node: fx.Node,
    sources: dict[fx.Node, fx.Node],
    groups: dict[fx.Node, Any],
    realized: set[fx.Node],
) -> set[fx.Node]:
    """Buffers outside of its kernel that a node is computed from."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        for used in left.pop().all_input_nodes:
            source = sources.get(used)
            if source is None or source in seen or groups.get(source, source) == groups.get(node):
                continue
            seen.add(source)
            if source in groups and source not in realized:
                left.append(source)
            else:
                found.add(source)
    return found


def _extern_cost(node: fx.Node) -> OpCost | None:
    value = node.meta.get("val")
    if node.target is operator.getitem or value is None:
        return None
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    outputs = [t for t in (value if isinstance(value, list | tuple) else [value]) if _is_tensor(t)]
    return measure(node.target, (*args, *node.kwargs.values()), outputs)


def _fused_costs(
    groups: dict[fx.Node, Any], sources: dict[fx.Node, fx.Node], realized: set[fx.Node]
) -> list[OpCost]:
    members: dict[Any, list[fx.Node]] = defaultdict(list)
    for node, group in groups.items():
        members[group].append(node)
    costs = []
    for inside in members.values():
        written = [n for n in inside if n in realized and _size(n)]
        if not written:
            continue
        read = set().union(*(_read(node, sources, groups, realized) for node in inside))
        size = sum(_size(n) for n in read) + sum(_size(n) for n in written)
        kind = str(written[0].meta["val"].dtype).removeprefix("torch.")
        costs.append(OpCost("fused", "memory", 0.0, float(size), kind))
    return costs


def _peak_memory(
    nodes: Sequence[fx.Node],
    sources: dict[fx.Node, fx.Node],
    groups: dict[fx.Node, Any],
    realized: set[fx.Node],
    consumed: Sequence[fx.Node],
    output: fx.Node,
) -> int:
    """Each result is allocated by its node and freed after its last use."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        last.update(dict.fromkeys(_read(node, sources, groups, realized), i))
        for used in node.all_input_nodes:
            if used in sources:
                last[sources[used]] = i
    kept = {sources[n] for n in output.all_input_nodes if n in sources}
    freed: dict[int, list[fx.Node]] = defaultdict(list)
    for node, i in last.items():
        if node not in kept and (node in realized or node in consumed):
            freed[i].append(node)
    total = peak = 0
    for i, node in enumerate(nodes):
        if node in realized:
            total += _size(node)
            peak = max(peak, total)
        total -= sum(_size(n) for n in freed[i])
    return max(0, peak)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    if isinstance(value, list | tuple):
        return 0  # its results are counted at their getitem nodes
    return rounded(value.numel() * value.element_size()) if _is_tensor(value) else 0
