"""Which rank this process is, or which node it starts ranks on.

Read from the environment variables of the launcher, here and nowhere else, step-level ones first.
Variables that contradict each other are refused by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from muster.errors import LaunchError

Env = Mapping[str, str]
PORT = 29500  # torch's own default


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is, and where rank 0 is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"  # MASTER_ADDR: the machine of rank 0 or of its agent
    port: int = 0  # MASTER_PORT; 0: any free one, with world size 1 only
    launcher: str = "alone"
    agent: bool = False  # an elastic agent of torch's started this process and hosts the store
    store_prefix: str = ""  # another one for each restart
    restarts: int = 0  # TORCHELASTIC_RESTART_COUNT

    @property
    def attempt(self) -> str:
        """In the names of what ranks say of a failure; "" without an agent, which starts them once."""
        return attempt_name(self.store_prefix) if self.store_prefix.strip("/") else ""


@dataclass(frozen=True)
class Node:
    """One machine of the job; this process starts its ranks.

    With `least`, of an elastic run: that many of at most `nodes` machines are enough, and but for 0 `rank`
    only says that this is not node 0, which gives out the ranks."""

    rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    least: int | None = None

    @property
    def asked(self) -> str:
        """For --nodes."""
        return str(self.nodes) if self.least is None else f"{self.least}:{self.nodes}"

    @property
    def label(self) -> str:
        """In the names of its files."""
        return os.uname().nodename if self.least and self.rank else str(self.rank)


def attempt_name(store_prefix: str) -> str:
    return hashlib.sha256(store_prefix.encode()).hexdigest()[:8]


class Launcher(Protocol):
    """One way of starting processes."""

    name: str

    def detect(self, env: Env) -> bool: ...
    def rank_info(self, env: Env) -> RankInfo: ...


class Torchrun:
    """torchrun, muster's own launcher, deepspeed, and all else that sets torch's variables."""

    name = "torchrun"
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

    def detect(self, env: Env) -> bool:
        return "RANK" in env and "WORLD_SIZE" in env

    def rank_info(self, env: Env) -> RankInfo:
        missing = [name for name in self.needed if name not in env]
        if missing:
            raise LaunchError(
                f"RANK and WORLD_SIZE are set, but {', '.join(missing)} is not; start with torchrun or "
                "muster train, or unset RANK and WORLD_SIZE"
            )
        local_world = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "LOCAL_SIZE"
        if local_world not in env:
            local_world = "WORLD_SIZE"
        return replace(
            _rank_info(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", local_world),
            address=env["MASTER_ADDR"],
            port=number(env, "MASTER_PORT"),
            launcher=self.name,
            agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store_prefix=f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '')}",
            restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )


class Slurm:
    """`srun`, one task per rank. A batch script, or a lone task that starts ranks, is not a rank."""

    name = "srun"

    def detect(self, env: Env) -> bool:
        return "SLURM_PROCID" in env and self.tasks(env) > 1

    @staticmethod
    def tasks(env: Env) -> int:
        """Tasks of this step. A job's batch script runs in no step, though it has a SLURM_PROCID and
        the job's SLURM_NTASKS."""
        name = "SLURM_STEP_NUM_TASKS"
        return number(env, name) if name in env else 1

    def rank_info(self, env: Env) -> RankInfo:
        node = slurm_node(env)
        per_node = _task_counts(env)
        local_world = per_node[node.rank] if per_node else self.tasks(env) // node.nodes
        return RankInfo(
            rank=number(env, "SLURM_PROCID"),
            world=self.tasks(env),
            local_rank=number(env, "SLURM_LOCALID"),
            local_world=local_world,
            address=node.address,
            port=node.port,
            launcher=self.name,
        )


class Mpi:
    """`mpirun`: Open MPI's variables, or those of MPICH and Intel MPI."""

    name = "mpirun"
    KINDS = (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )

    def detect(self, env: Env) -> bool:
        return any(kind[0] in env and number(env, kind[1]) > 1 for kind in self.KINDS)

    def rank_info(self, env: Env) -> RankInfo:
        kind = next(kind for kind in self.KINDS if kind[0] in env)
        rank_info = _rank_info(env, *kind)
        if rank_info.local_world == rank_info.world:
            address = env.get("MASTER_ADDR", "127.0.0.1")
        elif "MASTER_ADDR" in env:
            address = env["MASTER_ADDR"]
        else:
            raise LaunchError(
                f"mpirun started {rank_info.world} ranks on several machines, but MASTER_ADDR is "
                "not set; add: mpirun -x MASTER_ADDR=ADDRESS_OF_RANK_0 …"
            )
        job = env.get("PMIX_NAMESPACE") or env.get("PMI_JOBID") or str(os.getppid())
        return replace(rank_info, address=address, port=_port(env, job), launcher=self.name)


LAUNCHERS: tuple[Launcher, ...] = (Torchrun(), Slurm(), Mpi())


def detect(env: Env) -> RankInfo:
    """Which rank this process is, by the variables of its launcher; without one, rank 0 of 1."""
    found = [launcher for launcher in LAUNCHERS if launcher.detect(env)]
    if not found:
        return RankInfo()
    rank_info = found[0].rank_info(env)
    if "TORCHELASTIC_RUN_ID" not in env:  # under torchrun, srun's or mpirun's tasks are whole nodes
        for other in found[1:]:
            _refuse_contradiction(rank_info, other.rank_info(env))
    return rank_info


def own_arguments(arguments: Sequence[str]) -> list[str]:
    """Without the `--local_rank=N` that the deepspeed command adds; LOCAL_RANK has it already."""
    return [
        argument for argument in arguments if not re.fullmatch(r"--local[_-]rank=\d+", argument)
    ]


def export(rank_info: RankInfo, env: MutableMapping[str, str]) -> None:
    """Set torch's variables, for libraries that read nothing else."""
    env.update(
        RANK=str(rank_info.rank),
        WORLD_SIZE=str(rank_info.world),
        LOCAL_RANK=str(rank_info.local_rank),
        LOCAL_WORLD_SIZE=str(rank_info.local_world),
        MASTER_ADDR=rank_info.address,
        MASTER_PORT=str(rank_info.port),
    )


def _refuse_contradiction(one: RankInfo, other: RankInfo) -> None:
    for field, argument in (("rank", "rank"), ("world", "number of ranks")):
        mine, theirs = getattr(one, field), getattr(other, field)
        if mine != theirs:
            raise LaunchError(
                f"{one.launcher}'s variables say {argument} {mine}, {other.launcher}'s say {theirs}; unset "
                f"the leftovers of {one.launcher} (RANK, WORLD_SIZE, LOCAL_RANK …), or start with one "
                "launcher only"
            )


def count_range(flag: str, text: str) -> tuple[int | None, int]:
    """`4`, or `2:4`: the fewest that are enough, and the most."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text)
    most = int(found[2]) if found else 0
    least = int(found[1]) if found and found[1] else None
    if most < 1 or not 1 <= (least or most) <= most or (found and found[1] and not least):
        raise LaunchError(
            f"{flag}: got {text!r}, expected a whole number above 0, or MIN:MAX such as 2:4"
        )
    return least, most


def node(
    env: Env, nodes: int | str = 0, rank: int | None = None, address: str = "", port: int = 0
) -> Node:
    """Which node this machine is: by the command line, else by the scheduler's variables. `nodes` is a
    number, or MIN:MAX."""
    least, most = count_range("--nodes", str(nodes)) if nodes else (None, 0)
    if least is not None:
        return _elastic_node(env, least, most, rank, address, port)
    return _fixed_node(env, most, rank, address, port)


def _elastic_node(
    env: Env, least: int, most: int, rank: int | None, address: str, port: int
) -> Node:
    """Only node 0 is told apart: by its --node-rank, or because the address is its own."""
    found = slurm_launcher(env)
    if found:
        # With an address of its own, node 0 is another machine than SLURM's first.
        rank = found.rank if rank is None and not address else rank
        address, port = address or found.address, port or found.port
    if kubeflow_node(env):
        raise LaunchError(
            f"--nodes {least}:{most}, but Kubeflow's operator gives a job a fixed number of nodes; set "
            "kubernetes.kind=job"
        )
    if not address:
        raise LaunchError(
            f"--nodes {least}:{most} needs --master-addr: on each machine give --master-addr ADDRESS_OF_NODE_0"
        )
    if rank is None:
        rank = 0 if _is_own(address) else 1
    return Node(rank, most, address, port or PORT, least)


def _is_own(address: str) -> bool:
    from muster.launch import addresses

    addresses.refuse_loopback(address)
    return addresses.resolve(address) in addresses.own_addresses()


def _fixed_node(env: Env, nodes: int, rank: int | None, address: str, port: int) -> Node:
    found = next((read(env) for read in (kubeflow_node, slurm_launcher) if read(env)), None)
    if found and nodes and found.nodes != nodes:
        raise LaunchError(
            f"--nodes {nodes}, but the scheduler gave this job {found.nodes}; leave --nodes out"
        )
    if found and found.nodes > 1:
        return Node(
            found.rank if rank is None else rank,
            found.nodes,
            address or found.address,
            port or found.port,
        )
    if nodes <= 1:
        return Node(port=port)
    if rank is None or not address:
        flag = "--node-rank" if rank is None else "--master-addr"
        raise LaunchError(
            f"--nodes {nodes} needs {flag}: on each machine give "
            f"--node-rank 0 … {nodes - 1} and --master-addr ADDRESS_OF_NODE_0"
        )
    if rank >= nodes:
        raise LaunchError(f"--node-rank {rank} does not exist with --nodes {nodes}: count from 0")
    return Node(rank, nodes, address, port or PORT)


def kubeflow_node(env: Env) -> Node | None:
    """From the PET_ variables that Kubeflow's operator sets for torchrun."""
    if not env.get("PET_NNODES", "").isdecimal():
        return None
    nodes = number(env, "PET_NNODES")
    rank = number(env, "PET_NODE_RANK") if nodes > 1 else 0
    port = number(env, "PET_MASTER_PORT") if "PET_MASTER_PORT" in env else PORT
    return Node(rank, nodes, env.get("PET_MASTER_ADDR", ""), port)


def slurm_launcher(env: Env) -> Node | None:
    """Under `srun --ntasks-per-node=1`, where each task starts its machine's ranks."""
    if "SLURM_PROCID" not in env:
        return None
    found, tasks = slurm_node(env), Slurm.tasks(env)
    return found if tasks == found.nodes else None


def slurm_node(env: Env) -> Node:
    names = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    hosts = hostnames(names)
    nodes = number(env, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in env else len(hosts)
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    address = env.get("MASTER_ADDR") or (hosts[0] if nodes > 1 else "127.0.0.1")
    rank = number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    return Node(rank, nodes, address, _port(env, job))


def torchruns_folder(env: Env) -> Path | None:
    """Of this rank, in a folder that torchrun made for want of a --log-dir."""
    own = Path(env.get("TORCHELASTIC_ERROR_FILE", "")).parent  # torchelastic_X/ID_Y/attempt_0/RANK
    return own if own.parent.parent.parent.name.startswith("torchelastic_") else None


def hostnames(text: str) -> list[str]:
    """SLURM's short form written out: `gpu[01-03,7],login` → gpu01 gpu02 gpu03 gpu7 login."""
    names = []
    for argument in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        parts = re.split(r"\[([^\]]*)\]", argument)
        grown = [parts[0]]
        for inner, after in zip(parts[1::2], parts[2::2], strict=True):
            grown = [name + one + after for name in grown for one in _numbers(inner)]
        names += grown
    return names


def _numbers(text: str) -> list[str]:
    found = []
    for argument in text.split(","):
        first, _, last = argument.partition("-")
        stop = int(last or first)
        found += [str(n).zfill(len(first)) for n in range(int(first), stop + 1)]
    return found


def _task_counts(env: Env) -> list[int]:
    """`2(x3),1` → 2 2 2 1: the tasks of each node of this step."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _rank_info(env: Env, rank: str, world: str, local_rank: str, local_world: str) -> RankInfo:
    names = (rank, world, local_rank, local_world)
    missing = [name for name in names if name not in env]
    if missing:
        raise LaunchError(f"{rank} is set, but {', '.join(missing)} is not")
    values = [number(env, name) for name in names]
    for mine, all_of_them in ((0, 1), (2, 3)):
        if values[mine] >= values[all_of_them]:
            raise LaunchError(
                f"{names[mine]}={values[mine]} does not exist with {names[all_of_them]}="
                f"{values[all_of_them]}"
            )
    return RankInfo(values[0], values[1], values[2], values[3])


def number(env: Env, name: str) -> int:
    text = env.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(f"{name} is {text!r}, expected a whole number")
    return int(text)


def _port(env: Env, job: str) -> int:
    """MASTER_PORT, else a port derived from the job's id, the same in all its processes."""
    if "MASTER_PORT" in env:
        return number(env, "MASTER_PORT")
    return 20000 + zlib.crc32(job.encode()) % 10000
