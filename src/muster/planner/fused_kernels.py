"""The kernels of a compiled graph and its memory, estimated: matrix products and attention are extern kernels,
and pointwise operations between them are fused into one kernel. What another kernel could compute pointwise
from memory, it computes anew instead of reading it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from muster.planner.op_cost import OpCost, measure
from muster.planner.trace import rounded

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
        sources = {node: source_of(node) for node in (*nodes, *inputs)}
        groups = _fusion_groups(nodes, sources)
        realized = _realized(nodes, sources, groups, output)
        costs = [
            _extern_cost(node) for node in nodes if node not in groups and node is sources[node]
        ]
        costs += _fused_costs(groups, sources, realized)
        peak = _peak_memory(nodes, sources, groups, realized, [inputs[i] for i in kept], output)
        return cls([cost for cost in costs if cost is not None], peak, kept)


def source_of(node: fx.Node) -> fx.Node:
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
    outputs = [t for t in (value if isinstance(value, list | tuple) else [value]) if is_tensor(t)]
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


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    if isinstance(value, list | tuple):
        return 0  # its results are counted at their getitem nodes
    return rounded(value.numel() * value.element_size()) if is_tensor(value) else 0
