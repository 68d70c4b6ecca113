"""Step 4: every collective, over three kinds of numbers, against values worked out locally."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from muster.check.findings import Finding, Roll
from muster.check.seat import Account, Seat
from muster.parallel import collectives
from muster.parallel.collectives import REFUSALS, Wrong, refusal
from muster.parallel.mesh import Mesh

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZE = 1031  # elements each rank brings for each other; odd, so that no buffer is filled evenly


def all_reduce(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.all_reduce(mesh, SIZE, dtype).prove()


def all_gather(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.all_gather(mesh, SIZE * mesh.world, dtype).prove()


def reduce_scatter(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.reduce_scatter(mesh, SIZE * mesh.world, dtype).prove()


def broadcast(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    """From up to four ranks in turn. A rank that got one wrong takes part in the others too."""
    found = []
    for root in sorted({0, 1 % mesh.world, mesh.world // 2, mesh.world - 1}):
        if wrong := collectives.broadcast(mesh, SIZE, dtype, root=root).prove():
            found.append(f"from rank {root}: {wrong}")
    return "; ".join(found) or None


def all_to_all(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    return collectives.all_to_all(mesh, SIZE * mesh.world, dtype).prove()


def send_recv(mesh: Mesh, dtype: torch.dtype) -> Wrong:
    if mesh.world == 1:
        return None
    wrong = collectives.send_recv(mesh, SIZE, dtype).prove()
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


def measure(seat: Seat) -> Account:
    """`wrong`: what came out wrong; `refused`: what the backend would not do, in its own words."""
    mesh, wrong, refused = seat.mesh, {}, {}
    for name, operation, dtype in cases():
        try:
            if words := operation(mesh, dtype):
                wrong[name] = words
        except REFUSALS as error:
            refused[name] = refusal(error)
    backend = "nccl" if mesh.device.type == "cuda" else "gloo"
    return {"wrong": wrong, "refused": refused, "backend": backend}


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    ranks, backend = sorted(accounts), accounts[min(accounts)]["backend"]
    missing = [n for n, *_ in cases() if all(n in accounts[r]["refused"] for r in ranks)]
    found = [_wrong(name, accounts, roll) for name, *_ in cases()]
    found += [_some_refuse(name, accounts, roll) for name, *_ in cases() if name not in missing]
    complaints = [finding for finding in found if finding]
    notes = []
    if missing:
        notes.append(Finding("collectives", "note", f"not offered by {backend}: {_short(missing)}"))
    if complaints:
        return complaints + notes
    done = sum(1 for _ in cases()) - len(missing)
    words = f"{done} combinations of collective and number type are right on {backend}"
    return [Finding("collectives", "ok", words), *notes]


def _wrong(name: str, accounts: Mapping[int, Account], roll: Roll) -> Finding | None:
    ranks = [rank for rank in sorted(accounts) if name in accounts[rank]["wrong"]]
    if not ranks:
        return None
    example = f"{roll.name(ranks[0])}: {accounts[ranks[0]]['wrong'][name]}"
    if len(ranks) == len(accounts) > 1:
        who, cause = "on every rank", "one rank brings wrong values, or the network changes them"
    else:
        who, cause = f"on {roll.names(ranks)}", "that rank's device or link changes values"
    return Finding(
        "collectives",
        "fail",
        f"{name} is wrong {who}; {example}",
        cause=f"{cause}; or its torch or NCCL was patched",
        cure="look for ECC and Xid errors (nvidia-smi -q, dmesg), reinstall torch there, and try "
        "without that device",
        ranks=tuple(ranks),
        hosts=roll.hosts_of(ranks),
    )


def _some_refuse(name: str, accounts: Mapping[int, Account], roll: Roll) -> Finding | None:
    ranks = [rank for rank in sorted(accounts) if name in accounts[rank]["refused"]]
    if not ranks:
        return None
    return Finding(
        "collectives",
        "fail",
        f"{name} fails on {roll.names(ranks)}: {accounts[ranks[0]]['refused'][name]}",
        cause="the ranks do not have the same libraries, or one of them is broken",
        cure="install the same torch on every machine",
        ranks=tuple(ranks),
        hosts=roll.hosts_of(ranks),
    )


def _short(names: Sequence[str]) -> str:
    """`all_to_all float32, all_to_all int64` → `all_to_all (float32, int64)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        operation, _, dtype = name.partition(" ")
        kinds.setdefault(operation, []).append(dtype)
    return "; ".join(f"{name} ({', '.join(d)})" if any(d) else name for name, d in kinds.items())
