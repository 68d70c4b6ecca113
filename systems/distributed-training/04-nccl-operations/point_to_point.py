"""Point to point: one rank sends, another receives, and who goes first matters.

    torchrun --nproc_per_node=4 04-nccl-operations/point_to_point.py

Pipelines send activations this way, ring attention its keys and values. Four ways in one file: `send`
and `recv`, `isend` and `irecv`, `batch_isend_irecv`, and a ring made of the last. Between them the
classic mistake: two ranks that both send first wait for each other for ever.

Asserted: messages between two ranks arrive in the order they were sent; two blocking sends do lock
(until their wait ends after two seconds); the cures do not; and a ring pass gives what all_reduce
gives.
"""

import datetime
import time

import torch
import torch.distributed as dist
from torch import Tensor

from muster.launch.join import joined
from muster.parallel.mesh import Mesh

LIMIT = datetime.timedelta(seconds=2)


def in_order(mesh: Mesh) -> list[int]:
    """Rank 0 sends three messages. No label is needed: they cannot overtake each other."""
    got = []
    for number in (1, 2, 3):
        message = torch.tensor([number if mesh.rank == 0 else 0], device=mesh.device)
        if mesh.rank == 0:
            dist.send(message, dst=1)
        elif mesh.rank == 1:
            dist.recv(message, src=0)
            got.append(int(message))
    return got


def both_send_first(mesh: Mesh) -> float:
    """The deadlock. A send is over when the other side receives; here it only does so later.

    NCCL copies small messages into a buffer and lets this pass, until one is larger than the buffer:
    a program that works in the test and hangs with the real model. So this part always runs over
    gloo, in a group of its own. `send` is `isend` and a wait; here the wait ends after LIMIT.
    Returns seconds until it gave up.
    """
    group = dist.new_group(backend="gloo", timeout=mesh.limit)  # all ranks make it, two use it
    if mesh.rank > 1:
        return 0.0
    began, other = time.perf_counter(), 1 - mesh.rank
    try:
        sending = dist.isend(torch.ones(4), dst=other, group=group)
        sending.wait(LIMIT)
        dist.recv(torch.empty(4), src=other, group=group)
    except RuntimeError as error:  # gloo: "Timed out waiting …", or the other gave up first
        words = str(error).splitlines()[0].rpartition(".cc:")[2].partition(". ")[0]
        print(f"rank {mesh.rank} gave up: {words.partition('] ')[2]}")
    return time.perf_counter() - began


def take_turns(mesh: Mesh, mine: Tensor, other: int) -> Tensor:
    """First cure: the lower rank sends first, the higher one receives first."""
    got = torch.empty_like(mine)
    if mesh.rank < other:
        dist.send(mine, dst=other)
        dist.recv(got, src=other)
    else:
        dist.recv(got, src=other)
        dist.send(mine, dst=other)
    return got


def at_once(mine: Tensor, to: int, source: int) -> Tensor:
    """Second cure: start both, then wait for both. Neither tensor may be touched in between.

    NCCL needs the batch, which makes one operation of the two; gloo takes isend and irecv one by one
    as well.
    """
    got = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, got, source)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return got


def around_the_ring(mesh: Mesh, mine: Tensor) -> Tensor:
    """Everyone passes on what it got last, N - 1 times, and adds it up: all ranks end with the sum."""
    after, before = (mesh.rank + 1) % mesh.world, (mesh.rank - 1) % mesh.world
    total, moving = mine.clone(), mine
    for _ in range(mesh.world - 1):
        moving = at_once(moving, after, before)
        total += moving
    return total


def main() -> None:
    with joined() as mesh:
        if mesh.world == 1:
            print("one rank has nobody to send to: start two or more with --nproc_per_node")
            return
        got = mesh.gather(in_order(mesh))[1]
        assert got == [1, 2, 3], f"arrived as {got}"

        waited = mesh.gather(both_send_first(mesh))[:2]
        lock = LIMIT.total_seconds()
        assert max(waited) >= 0.9 * lock, f"two blocking sends passed after {waited} s"

        mine = torch.full((4,), float(mesh.rank + 1), device=mesh.device)
        if mesh.rank < 2:  # isend and irecv one by one, in turns: safe on NCCL and gloo
            other = 1 - mesh.rank
            assert take_turns(mesh, mine, other).tolist() == [other + 1.0] * 4
            message = mine.clone()
            request = dist.isend(message, 1) if mesh.first else dist.irecv(message, 0)
            request.wait()  # until then `message` belongs to the request
            assert message.tolist() == [1.0] * 4

        total, reduced = around_the_ring(mesh, mine), mine.clone()
        dist.all_reduce(reduced)
        assert torch.equal(total, reduced), f"ring {total.tolist()}, all_reduce {reduced.tolist()}"
        if mesh.first:
            print(
                f"messages arrive in order {got}; two blocking sends were stuck for {max(waited):.1f} s; "
                f"taking turns and batches pass; {mesh.world - 1} ring steps sum to "
                f"{total[0]:.0f} like all_reduce"
            )


if __name__ == "__main__":
    main()
