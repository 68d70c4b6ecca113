"""What torch.compile makes of a block, found without compiling it.

AOTAutograd's joint graph, cut by the same min-cut that Inductor uses, tells exactly what a compiled
block keeps for its backward pass. Which kernels Inductor makes of each half is estimated: products
of matrices and attention stay as they are, and neighbours between them become one kernel.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from muster.plan.trace import Recorder, rounded
from muster.plan.work import Work, measure

# Kernels of their own, beside products and attention: they do not read or write in order.
APART = (
    "embedding_dense_backward",
    "index_put",
    "sort",
    "cumsum",
    "_ctc_loss",
    "fft",
    "max_pool",
)


@dataclass
class Compiler:
    """One compilation serves every block of the same shapes, in all traces that share this object."""

    recorder: Recorder | None = None
    made: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    def module(self, root: nn.Module, module: nn.Module) -> None:
        """In place, as `torch.compile(module.forward)` would."""
        forward = module.forward
        mine = {id(p) for p in module.parameters()}
        mine |= {id(p) for p in getattr(module, "borrows", tuple)()}
        names = [name for name, p in root.named_parameters() if id(p) in mine]

        def run(*args: Any, **kwargs: Any) -> Any:
            held = dict(root.named_parameters())
            weights = [held[name] for name in names]

            def pure(weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
                with _reparametrize_module(root, dict(zip(names, weights, strict=True))):
                    return forward(*args, **kwargs)

            return self.call((type(module), len(names)), pure, weights, *args, **kwargs)

        module.forward = run  # type: ignore[method-assign]

    def call(self, key: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def flat(*given: Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, shape)
            return function(*args, **kwargs)

        kinds = tuple((t.shape, t.dtype, t.requires_grad) for t in tensors)
        whole = (key, kinds, torch.is_autocast_enabled("cpu"))
        if whole not in self.made:
            from torch._inductor.decomposition import select_decomp_table

            self.made[whole] = aot_function(
                flat,
                self._kernels,  # type: ignore[arg-type]
                self._kernels,  # type: ignore[arg-type]
                min_cut_rematerialization_partition,
                select_decomp_table(),
            )
        assert self.recorder is not None
        with self.recorder.as_one():
            return self.made[whole](*tensors)

    def _kernels(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """AOTAutograd hands over each half once; what is returned runs it ever after."""
        summary = Summary.of(graph)

        def run(given: list[Any]) -> Any:
            recorder = self.recorder
            assert recorder is not None
            tensors = list(given)
            given.clear()
            with recorder.as_one():
                out = graph(*tensors)
            recorder.passing(summary.most)
            recorder.let_go(tensors[i] for i in summary.consumed)
            for tensor in out:
                if isinstance(tensor, Tensor):
                    recorder.hold(tensor)
            recorder.trace.work.extend((work, recorder.now) for work in summary.work)
            recorder.trace.calls[recorder.now] += len(summary.work)
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@dataclass(frozen=True)
class Summary:
    """The kernels of one half, and the memory it takes besides what it is handed."""

    work: list[Work]
    most: int  # bytes, at its highest point
    consumed: list[int]  # inputs that are given up: what the forward half kept for this one

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
        groups = _groups(nodes, sources)
        real = _real(nodes, sources, groups, output)
        work = [_apart(node) for node in nodes if node not in groups and node is sources[node]]
        work += _fused(groups, sources, real)
        most = _highest(nodes, sources, real, [inputs[i] for i in kept], output)
        return cls([w for w in work if w is not None], most, kept)


def _source(node: fx.Node) -> fx.Node:
    """The node whose memory this one looks at; a product's results are told apart."""
    while node.op == "call_function":
        if node.target is not operator.getitem and not getattr(node.target, "is_view", False):
            if str(node.target) not in ("aten._unsafe_view.default", "aten.alias.default"):
                return node
        elif node.target is operator.getitem and not _source_of_parts(node):
            return node
        node = node.all_input_nodes[0]
    return node


def _source_of_parts(item: fx.Node) -> bool:
    """Whether what `item` picks from is itself a view, as of `split`."""
    return bool(getattr(item.all_input_nodes[0].target, "is_view", False))


def _apartness(node: fx.Node) -> bool:
    name = str(getattr(node.target, "_schema", node.target)).split("(")[0].removeprefix("aten::")
    products = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")
    return name.split(".")[0] in products or name.startswith(
        ("convolution", "_scaled_dot_product", "_fft", *APART)
    )


def _groups(nodes: Iterable[fx.Node], sources: dict[fx.Node, fx.Node]) -> dict[fx.Node, Any]:
    """Which kernel each small operation goes into. Those on two sides of a product cannot share one:
    a level is how many products lie before."""
    level: dict[fx.Node, int] = defaultdict(int)
    group: dict[fx.Node, Any] = {}
    joined: dict[Any, Any] = {}

    def find(key: Any) -> Any:
        while joined.get(key, key) != key:
            key = joined[key]
        return key

    for node in nodes:
        before = [sources[n] for n in node.all_input_nodes if n in sources]
        picked = node.target is operator.getitem
        apart = not picked and sources[node] is node and _apartness(node)
        base = max((level[n] for n in before), default=0)
        level[node] = base + 1 if apart else base
        if apart or sources[node] is not node or (picked and before[0] not in group):
            continue
        group[node] = node
        joined[node] = node
        for n in before:
            if n in group and level[n] == level[node]:
                joined[find(n)] = find(node)
    return {node: find(node) for node in group}


def _real(
    nodes: Iterable[fx.Node],
    sources: dict[fx.Node, fx.Node],
    groups: dict[fx.Node, Any],
    output: fx.Node,
) -> set[fx.Node]:
    """What is written to memory: results of products, and what another kernel reads."""
    real = {n for n in nodes if n is sources[n] and n not in groups}
    for node in (*nodes, output):
        for used in node.all_input_nodes:
            source = sources.get(used)
            reads = node is output or sources[node] is node
            if reads and source in groups and groups.get(node) != groups[source]:
                real.add(source)
    return real


def _apart(node: fx.Node) -> Work | None:
    value = node.meta.get("val")
    if node.target is operator.getitem or value is None:
        return None
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    outputs = [t for t in (value if isinstance(value, list | tuple) else [value]) if _is(t)]
    return measure(node.target, (*args, *node.kwargs.values()), outputs)


def _fused(
    groups: dict[fx.Node, Any], sources: dict[fx.Node, fx.Node], real: set[fx.Node]
) -> list[Work]:
    members: dict[Any, list[fx.Node]] = defaultdict(list)
    for node, group in groups.items():
        members[group].append(node)
    work = []
    for group, inside in members.items():
        written = [n for n in inside if n in real and _size(n)]
        if not written:
            continue
        read = {
            sources[used]
            for node in inside
            for used in node.all_input_nodes
            if used in sources and groups.get(sources[used]) != group
        }
        size = sum(_size(n) for n in read) + sum(_size(n) for n in written)
        kind = str(written[0].meta["val"].dtype).removeprefix("torch.")
        work.append(Work("fused", "memory", 0.0, float(size), kind))
    return work


def _highest(
    nodes: Sequence[fx.Node],
    sources: dict[fx.Node, fx.Node],
    real: set[fx.Node],
    consumed: Sequence[fx.Node],
    output: fx.Node,
) -> int:
    """Walk through the graph: results appear, and go after their last reader."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            if used in sources:
                last[sources[used]] = i
    kept = {sources[n] for n in output.all_input_nodes if n in sources}
    going: dict[int, list[fx.Node]] = defaultdict(list)
    for node, i in last.items():
        if node not in kept and (node in real or node in consumed):
            going[i].append(node)
    total = most = 0
    for i, node in enumerate(nodes):
        if node in real:
            total += _size(node)
            most = max(most, total)
        total -= sum(_size(n) for n in going[i])
    return max(0, most)


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    if isinstance(value, list | tuple):
        return 0  # its results are picked, and counted, one by one
    return rounded(value.numel() * value.element_size()) if _is(value) else 0
