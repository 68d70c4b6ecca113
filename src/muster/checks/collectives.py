"""Step 5: every collective in three dtypes, against values computed locally."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames
from muster.parallel.mesh import Mesh
from muster.probes import collectives
from muster.probes.collectives import REFUSALS, Wrong, refusal

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZE = 1031  # elements of each rank for each other rank; odd, so that no buffer divides evenly


def all_reduce(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.all_reduce(mesh, SIZE, dtype).verify()


def all_gather(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.all_gather(mesh, SIZE * mesh.world, dtype).verify()


def reduce_scatter(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.reduce_scatter(mesh, SIZE * mesh.world, dtype).verify()


def broadcast(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    """From up to four ranks in turn. A rank with a wrong result takes part in the others too."""
    found = []
    for root in sorted({0, 1 % mesh.world, mesh.world // 2, mesh.world - 1}):
        if wrong := collectives.broadcast(mesh, SIZE, dtype, root=root).verify():
            found.append(f"from rank {root}: {wrong}")
    return "; ".join(found) or None


def all_to_all(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.all_to_all(mesh, SIZE * mesh.world, dtype).verify()


def send_recv(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    if mesh.world == 1:
        return None
    wrong = collectives.send_recv(mesh, SIZE, dtype).verify()
    return wrong and f"from rank {(mesh.rank - 1) % mesh.world}: {wrong}"


def barrier(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    dist.barrier()
    return None


OPERATIONS: tuple[Callable[[Mesh, torch.dtype], Wrong], ...] = (
    all_reduce,
    all_gather,
    reduce_scatter,
    broadcast,
    all_to_all,
    send_recv,
    barrier,
)


def cases() -> Iterable[tuple[str, Callable[[Mesh, torch.dtype], Wrong], torch.dtype]]:
    for operation in OPERATIONS:
        for dtype in DTYPES if operation is not barrier else DTYPES[:1]:
            kind = "" if operation is barrier else f" {str(dtype).removeprefix('torch.')}"
            yield f"{operation.__name__}{kind}", operation, dtype


def measure(context: RankContext) -> RankReport:
    """`wrong`: wrong results; `refused`: what the backend does not support, with its error."""
    mesh, wrong, refused = context.mesh, {}, {}
    for name, operation, dtype in cases():
        try:
            if message := operation(mesh, dtype):
                wrong[name] = message
        except REFUSALS as error:
            refused[name] = refusal(error)
    backend = "nccl" if mesh.device.type == "cuda" else "gloo"
    return {"wrong": wrong, "refused": refused, "backend": backend}


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    ranks, backend = sorted(reports), reports[min(reports)]["backend"]
    missing = [n for n, *_ in cases() if all(n in reports[r]["refused"] for r in ranks)]
    found = [_wrong(name, reports, rank_names) for name, *_ in cases()]
    found += [
        _some_refuse(name, reports, rank_names) for name, *_ in cases() if name not in missing
    ]
    problems = [finding for finding in found if finding]
    notes = []
    if missing:
        notes.append(
            Finding("collectives", "note", f"not supported by {backend}: {_short(missing)}")
        )
    if problems:
        return problems + notes
    done = sum(1 for _ in cases()) - len(missing)
    message = f"{done} combinations of collective and dtype are right on {backend}"
    return [Finding("collectives", "ok", message), *notes]


def _wrong(name: str, reports: Mapping[int, RankReport], rank_names: RankNames) -> Finding | None:
    ranks = [rank for rank in sorted(reports) if name in reports[rank]["wrong"]]
    if not ranks:
        return None
    example = f"{rank_names.name(ranks[0])}: {reports[ranks[0]]['wrong'][name]}"
    if len(ranks) == len(reports) > 1:
        who, cause = "on every rank", "one rank sends wrong values, or the network corrupts them"
    else:
        who, cause = f"on {rank_names.names(ranks)}", "that rank's device or link corrupts values"
    return Finding(
        "collectives",
        "fail",
        f"{name} is wrong {who}; {example}",
        cause=f"{cause}; or its torch or NCCL was patched",
        cure="look for ECC and Xid errors (nvidia-smi -q, dmesg), reinstall torch there, and try "
        "without that device",
        ranks=tuple(ranks),
        hosts=rank_names.hosts_of(ranks),
    )


def _some_refuse(
    name: str, reports: Mapping[int, RankReport], rank_names: RankNames
) -> Finding | None:
    ranks = [rank for rank in sorted(reports) if name in reports[rank]["refused"]]
    if not ranks:
        return None
    return Finding(
        "collectives",
        "fail",
        f"{name} fails on {rank_names.names(ranks)}: {reports[ranks[0]]['refused'][name]}",
        cause="the ranks do not have the same libraries, or one of them is broken",
        cure="install the same torch on every machine",
        ranks=tuple(ranks),
        hosts=rank_names.hosts_of(ranks),
    )


def _short(names: Sequence[str]) -> str:
    """`all_to_all float32, all_to_all int64` → `all_to_all (float32, int64)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        operation, _, dtype = name.partition(" ")
        kinds.setdefault(operation, []).append(dtype)
    return "; ".join(f"{name} ({', '.join(d)})" if any(d) else name for name, d in kinds.items())
