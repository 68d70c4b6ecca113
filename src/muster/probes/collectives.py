"""Collectives on data whose results are known: every value of the output can be verified.

Sizes are those of nccl-tests: `count` numbers in the whole array, which is what is gathered, or what
is scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.mesh import Mesh

Wrong = str | None  # None: the result is right
Where = Literal["in", "out"]  # in place: the result overwrites the input
Values = Callable[[Tensor], Tensor]  # int64 at these positions, int64

ACTIVE = 16  # ranks with an addend above zero at one position, at most
PIECE = (
    2**20
)  # elements written or compared at once: verifying takes little memory beside the array
BROKEN = ("timed out", "timeout", "closed by peer", "reset by peer", "refused", "aborted")


def pattern(rank: int | Tensor, at: Tensor, salt: int | Tensor = 0) -> Tensor:
    """The input of `rank` at positions `at`: integers from 1 to 11 that depend on both, so that swapped,
    shifted or lost data is detected."""
    return ((at + rank * 40503 + salt * 30011) * 2654435761 >> 15) % 11 + 1


def addend(rank: int | Tensor, at: Tensor, world: int) -> Tensor:
    """The input of `rank` to a sum: at most 16 ranks are above zero at any position, so that sums stay
    below 256 and are exact in bfloat16 too."""
    return torch.where((at + rank) % world < ACTIVE, pattern(rank, at), 0)


def total(at: Tensor, world: int) -> Tensor:
    """The sum of all ranks' addends, from those that are not zero."""
    whole = torch.zeros_like(at)
    for turn in range(min(ACTIVE, world)):
        whole += addend((turn - at) % world, at, world)
    return whole


@dataclass(frozen=True)
class Trial:
    """One collective on its own buffers. `inputs` are the values of `mine` before and `expected` those of
    `got` after a call of `act`."""

    act: Callable[[], object]
    mine: Tensor
    got: Tensor
    inputs: Values
    expected: Values

    def verify(self) -> Wrong:
        """One call on new inputs, with every output value compared."""
        self.got.fill_(-1)  # not an input of any rank
        write(self.mine, self.inputs)
        self.act()
        return compare(self.got, self.expected)


def write(target: Tensor, values: Values) -> None:
    for start in range(0, len(target), PIECE):
        part = target[start : start + PIECE]
        part.copy_(values(torch.arange(start, start + len(part), device=target.device)))


def compare(got: Tensor, values: Values) -> Wrong:
    wrong, first = 0, ""
    for start in range(0, len(got), PIECE):
        part = got[start : start + PIECE]
        expected = values(torch.arange(start, start + len(part), device=got.device)).to(got.dtype)
        differs = (part != expected).nonzero()
        if len(differs) and not wrong:
            at = int(differs[0])
            first = f"position {start + at}: {part[at].item()} instead of {expected[at].item()}"
        wrong += len(differs)
    return f"{wrong} of {len(got)} values are wrong, the first at {first}" if wrong else None


def gather_into(whole: Tensor, mine: Tensor, async_op: bool = False) -> Any:
    """Each rank's part, in the order of ranks. torch 2.13 renamed this and the next."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, mine, async_op=async_op)


def scatter_sum(part: Tensor, mine: Tensor, async_op: bool = False) -> Any:
    """This rank's part of the sum."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, mine, async_op=async_op)


def all_reduce(mesh: Mesh, count: int, dtype: torch.dtype, where: Where = "in") -> Trial:
    """In torch in place only; out of place, as in its functional collectives, means a copy first."""
    got = _empty(mesh, count, dtype)
    mine = got if where == "in" else _empty(mesh, count, dtype)

    def act() -> None:
        if where == "out":
            got.copy_(mine)
        dist.all_reduce(got)

    return Trial(act, mine, got, _addend(mesh), lambda at: total(at, mesh.world))


def all_gather(mesh: Mesh, count: int, dtype: torch.dtype, where: Where = "out") -> Trial:
    each = count // mesh.world
    got = _empty(mesh, count, dtype)
    mine = _slot(got, mesh) if where == "in" else _empty(mesh, each, dtype)

    def act() -> None:
        gather_into(got, mine)

    return Trial(act, mine, got, _own(mesh), lambda at: pattern(at // each, at % each))


def reduce_scatter(mesh: Mesh, count: int, dtype: torch.dtype, where: Where = "out") -> Trial:
    each = count // mesh.world
    mine = _empty(mesh, count, dtype)
    got = _slot(mine, mesh) if where == "in" else _empty(mesh, each, dtype)

    def act() -> None:
        scatter_sum(got, mine)

    expected: Values = lambda at: total(at + mesh.rank * each, mesh.world)  # noqa: E731
    return Trial(act, mine, got, _addend(mesh), expected)


def broadcast(
    mesh: Mesh, count: int, dtype: torch.dtype, where: Where = "in", root: int = 0
) -> Trial:
    got = _empty(mesh, count, dtype)
    act = lambda: dist.broadcast(got, root)  # noqa: E731
    return Trial(act, got, got, _own(mesh), lambda at: pattern(root, at))


def all_to_all(mesh: Mesh, count: int, dtype: torch.dtype, where: Where = "out") -> Trial:
    """Rank r's piece for rank s is salted with s."""
    each = count // mesh.world
    mine, got = _empty(mesh, count, dtype), _empty(mesh, count, dtype)
    return Trial(
        lambda: dist.all_to_all_single(got, mine),
        mine,
        got,
        lambda at: pattern(mesh.rank, at % each, at // each),
        lambda at: pattern(at // each, at % each, mesh.rank),
    )


def send_recv(mesh: Mesh, count: int, dtype: torch.dtype) -> Trial:
    """Around the ring: to the next rank, from the one before."""
    after, before = (mesh.rank + 1) % mesh.world, (mesh.rank - 1) % mesh.world
    mine, got = _empty(mesh, count, dtype), _empty(mesh, count, dtype)

    def act() -> None:
        both = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
        for request in dist.batch_isend_irecv(both):
            request.wait()

    return Trial(act, mine, got, _own(mesh), lambda at: pattern(before, at))


@dataclass(frozen=True)
class Collective:
    """`share(n)` × array ÷ time is bus bandwidth: what one rank's link carries, whatever n, by the
    definitions of nccl-tests."""

    prepare: Callable[[Mesh, int, torch.dtype, Where], Trial]
    share: Callable[[int], float]
    wheres: tuple[Where, ...]


def _part(world: int) -> float:
    """All but a rank's own part of the array is received or sent."""
    return (world - 1) / world


COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective(all_reduce, lambda n: 2 * _part(n), ("in", "out")),
    "all_gather": Collective(all_gather, _part, ("in", "out")),
    "reduce_scatter": Collective(reduce_scatter, _part, ("in", "out")),
    "broadcast": Collective(broadcast, lambda n: float(n > 1), ("in",)),
    "all_to_all": Collective(all_to_all, _part, ("out",)),
}


def bus_share(collective: str, world: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth. Alone, a rank sends nothing: 0."""
    return COLLECTIVES[collective].share(world)


def refusal(error: Exception) -> str:
    """Why a backend does not support something, from its error; an error that means a lost connection, a
    missing rank, no memory or a failing NCCL is raised again."""
    serious = isinstance(error, torch.OutOfMemoryError | dist.DistBackendError)
    if serious or any(word in str(error).lower() for word in BROKEN):
        raise error
    return str(error).strip().splitlines()[0]


REFUSALS = (RuntimeError, ValueError, TypeError)


def _own(mesh: Mesh) -> Values:
    return lambda at: pattern(mesh.rank, at)


def _addend(mesh: Mesh) -> Values:
    return lambda at: addend(mesh.rank, at, mesh.world)


def _empty(mesh: Mesh, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=mesh.device)


def _slot(whole: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part: the buffer that makes an NCCL collective in-place."""
    return whole.view(mesh.world, -1)[mesh.rank]
