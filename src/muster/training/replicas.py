"""Ranks that hold the same weights compare them, before each checkpoint and every `checkpoint.verify_steps` steps.

Only hashes are sent: one of each part of the model and, where two of those differ, one of each of its
tensors, to name the rank and the tensor. Ranks on devices of another kind may round differently, and are
compared among themselves.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from muster.errors import ReplicaError
from muster.observe.heartbeat import beat
from muster.parallel.mesh import Mesh
from muster.parallel.replicas import by_part, combined

if TYPE_CHECKING:
    from muster.training.job import Job

Hashes = Sequence[tuple[str, int]]  # name and hash of each tensor of a part


def compare(job: Job, done: int) -> None:
    """After `done` steps. Where a rank differs, all ranks end, and nothing is saved of them."""
    if job.mesh.world == 1 or not job.recipe.checkpoint.verify_replicas:
        return
    begin = time.perf_counter()
    beat("comparing replicas")
    tensors = list(job.engine.held())
    shared = _shared(job.mesh, {held.part for held in tensors})
    if not shared:
        return
    mine = shared[job.mesh.rank]
    problem = difference(job.mesh, by_part(held for held in tensors if held.part in mine))
    if problem is not None:
        job.checkpoints.wait()  # for an earlier one that is being written
        raise ReplicaError(
            f"after step {done} {problem}; nothing was saved of it, and {job.checkpoints.newest_complete()}; find "
            "the faulty device with muster check, then go on without it from that checkpoint"
        )
    job.compared(time.perf_counter() - begin)


def _shared(mesh: Mesh, parts: set[str]) -> list[set[str]]:
    """Of each rank, the parts that another rank on a device of its kind holds too; empty if no rank has any."""
    told = mesh.gather((kind(mesh.device), sorted(parts)))
    holders = Counter((its, part) for its, found in told for part in found)
    shared = [{part for part in found if holders[its, part] > 1} for its, found in told]
    return shared if any(shared) else []


def difference(mesh: Mesh, mine: Mapping[str, Hashes]) -> str | None:
    """Which rank holds other values than those that should hold the same; the same words on all ranks."""
    own_kind = kind(mesh.device)
    keys = {part: f"{part} {own_kind} {combined([n for n, _ in h])}" for part, h in mine.items()}
    own = {keys[part]: combined([value for _, value in h]) for part, h in mine.items()}
    values: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, found in enumerate(mesh.gather(own)):
        for key, value in found.items():
            values[key][rank] = value
    unequal = [key for key, ranks in values.items() if len(set(ranks.values())) > 1]
    if not unequal:
        return None
    first = min(unequal)
    here = next((mine[part] for part, key in keys.items() if key == first), ())
    return _words(values[first], mesh.gather((mesh.place, here)))


def _words(values: Mapping[int, str], told: Sequence[tuple[str, Hashes]]) -> str:
    """`values` of the ranks that hold a part; `told` by all ranks: where they are, and their hashes."""
    most, count = Counter(values.values()).most_common(1)[0]
    right = [rank for rank, value in values.items() if value == most]
    wrong = [rank for rank in values if rank not in right]
    pairs = zip(told[right[0]][1], told[wrong[0]][1], strict=True)
    names = [name for (name, value), (_, other) in pairs if value != other]
    what = names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
    if count * 2 <= len(values):
        several = " and ".join(f"rank {rank} ({told[rank][0]})" for rank in sorted(values))
        return (
            f"{several} hold different values of {what}, which should be equal: the memory or a computation of "
            "one of them is faulty"
        )
    odd = " and ".join(f"rank {rank} ({told[rank][0]})" for rank in wrong)
    others = ", ".join(map(str, sorted(right)))
    differ = "differs" if len(wrong) == 1 else "differ"
    return (
        f"{odd} {differ} from the other ranks ({others}) in {what}, where all should be equal: memory or a "
        "computation there is faulty"
    )


def kind(device: torch.device) -> str:
    """Devices of one kind round alike."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
