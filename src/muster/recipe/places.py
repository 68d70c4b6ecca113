"""Settings of SLURM and Kubernetes jobs."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from muster.recipe.section import Positive, Section, free


class Slurm(Section):
    """`--on slurm`."""

    partition: str | None = free(None, description="Partition; default: the cluster's own.")
    account: str | None = free(None, description="Account to charge.")
    qos: str | None = free(None, description="Quality of service.")
    time: str | None = free(
        None, description="Time limit as sbatch takes it, in quotes: '24:00:00', '2-00:00:00'."
    )
    tasks: Literal["node", "gpu"] = free(
        "node",
        description="`node`: one task per node, which starts a rank per GPU; `gpu`: one task per GPU.",
    )
    cpus_per_rank: Positive = free(8, description="CPU cores for each rank.")
    signal_s: Annotated[int, Field(gt=0, le=65535)] = free(
        90, description="Seconds before the time limit at which the run saves and ends."
    )
    requeue: bool = free(
        True, description="Queue the job again after a preemption or its time limit."
    )
    setup: list[str] = free(
        [],
        description="Shell lines before training: `module load cuda`, `source env/bin/activate`.",
    )
    options: list[str] = free(
        [], description="More #SBATCH options, as written: `--exclusive`, `--gres=gpu:a100:4`."
    )

    @field_validator("time", mode="before")
    @classmethod
    def _in_quotes(cls, value: object) -> object:
        """YAML takes 24:00:00 for a number to the base of 60, and sbatch a number for minutes."""
        if isinstance(value, int):
            raise ValueError("write the time limit in quotes: '24:00:00', or '90' for 90 minutes")
        return value

    @field_validator("partition", "account", "qos")
    @classmethod
    def _word(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.,:+-]+", value):
            raise ValueError(f"got {value!r}, but such names have no spaces or special signs")
        return value

    @field_validator("options")
    @classmethod
    def _not_ours(cls, options: list[str]) -> list[str]:
        for option in options:
            name = re.split(r"[= ]", option)[0]
            if not re.fullmatch(r"--?[a-zA-Z][^\x00-\x1f\x7f-\x9f\u2028\u2029]*", option):
                raise ValueError(f"got {option!r}, expected one sbatch option such as --exclusive")
            if name in SET_BY_MUSTER:
                raise ValueError(f"{name} is not for slurm.options: {SET_BY_MUSTER[name]}")
        return options

    @model_validator(mode="after")
    def _time_to_save(self) -> Slurm:
        limit = None if self.time is None else in_seconds(self.time)
        if limit is not None and limit <= self.signal_s + 60:  # SLURM may warn a minute early
            raise ValueError(
                f"slurm.time {self.time} leaves no time to train: the run is signalled to save "
                f"slurm.signal_s={self.signal_s} and up to 60 s before it"
            )
        return self


SET_BY_MUSTER = {
    **dict.fromkeys(("--gpus-per-task", "--ntasks-per-gpu", "--gpu-bind"),
        "a rank must see its peers' GPUs for NCCL to use NVLink, and takes its own by itself"),
    **dict.fromkeys(("--nodes", "-N"), "say --nodes to muster train"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "say --gpus, or set slurm.tasks"),
    **dict.fromkeys(("--cpus-per-task", "-c", "--cpus-per-gpu"), "set slurm.cpus_per_rank"),
    **dict.fromkeys(("--signal",), "set slurm.signal_s"),
    **dict.fromkeys(("--no-kill", "-k"), "say --nodes MIN:MAX to muster train"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "set slurm.requeue"),
    **dict.fromkeys(("--partition", "-p"), "set slurm.partition"),
    **dict.fromkeys(("--account", "-A"), "set slurm.account"),
    **dict.fromkeys(("--qos", "-q"), "set slurm.qos"),
    **dict.fromkeys(("--time", "-t"), "set slurm.time"),
    **dict.fromkeys(("--output", "-o", "--open-mode", "--error", "-e"),
        "the log is in the run directory"),
    **dict.fromkeys(("--array", "-a"), "one run is one job"),
}  # fmt: skip


# Folders of an image over which nothing is mounted.
SYSTEM = frozenset(
    ["bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr"]
)


def in_seconds(limit: str) -> int | None:
    """sbatch's time limits: minutes, 90:30, 24:00:00, 2-12, 2-12:30, 2-12:30:00; None is no limit."""
    if limit.lower() in ("infinite", "unlimited", "0"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        raise ValueError(
            f"sbatch cannot read {limit!r} as a time limit; write 24:00:00 or 2-00:00:00"
        )
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:  # minutes, and perhaps seconds
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class Kubernetes(Section):
    """`--on kubernetes`."""

    image: str | None = free(None, description="Container image with muster in it; needed.")
    namespace: str = free("default", description="Namespace of the job.")
    kind: Literal["auto", "trainjob", "job"] = free(
        "auto",
        description="`trainjob` for Kubeflow's operator, `job` for a plain Indexed Job; `auto` detects "
        "it, and without a cluster writes a plain job.",
    )
    runtime: str = free("torch-distributed", description="Kubeflow runtime a TrainJob refers to.")
    gpu_resource: str = free("nvidia.com/gpu", description="amd.com/gpu on ROCm.")
    infiniband: str | None = free(
        None,
        description="RDMA resource of which each pod gets one, such as rdma/hca_shared_devices_a; "
        "also allows locked memory (IPC_LOCK).",
    )
    cpus: Positive = free(8, description="CPU cores each pod asks for.")
    memory: str = free("64Gi", description="Host memory each pod asks for.")
    shared_memory: str = free(
        "16Gi",
        description="Size of /dev/shm, used for communication between ranks; a part of `memory`.",
    )
    volume_claim: str | None = free(
        None, description="PersistentVolumeClaim for data and runs; several nodes need one."
    )
    mount_path: str = free(
        "/workspace", description="Where the claim is mounted; relative paths start here."
    )
    user: Positive = free(1000, description="User id inside the container; never root.")
    restarts: Positive = free(
        3,
        description="backoffLimit: failures of each pod before the job fails, without preemptions.",
    )
    grace_s: Positive = free(
        120, description="terminationGracePeriodSeconds: for the current step and a checkpoint."
    )

    @field_validator("namespace", "runtime", "volume_claim")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", value):
            raise ValueError(
                f"got {value!r}, but a name in Kubernetes has only small letters, digits, - and ."
            )
        return value

    @field_validator("memory", "shared_memory")
    @classmethod
    def _quantity(cls, value: str) -> str:
        in_bytes(value)
        return value

    @field_validator("image")
    @classmethod
    def _reference(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-zA-Z0-9][\w.:/@-]*", value, re.ASCII):
            raise ValueError(f"got {value!r}, expected an image such as ghcr.io/someone/muster:1")
        return value

    @field_validator("gpu_resource", "infiniband")
    @classmethod
    def _resource(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(
            r"([a-z0-9][a-z0-9.-]*/)?[a-zA-Z0-9][\w.-]*", value, re.ASCII
        ):
            raise ValueError(f"got {value!r}, expected a resource such as nvidia.com/gpu")
        return value

    @field_validator("mount_path")
    @classmethod
    def _own_folder(cls, value: str) -> str:
        parts = value.split("/")
        if not re.fullmatch(r"(/[\w .,+@%=-]+)+", value) or {".", ".."} & set(parts):
            raise ValueError(f"got {value!r}, expected a folder from the root, such as /workspace")
        if parts[1] in SYSTEM:
            raise ValueError(f"/{parts[1]} is the image's own; give a folder such as /workspace")
        return value

    @field_validator("user", mode="before")
    @classmethod
    def _not_root(cls, value: object) -> object:
        if value == 0:
            raise ValueError(
                "0 is root, which no run needs; give the user id that owns the claim's files, "
                "such as 1000"
            )
        return value

    @model_validator(mode="after")
    def _shared_memory_fits(self) -> Kubernetes:
        if in_bytes(self.shared_memory) >= in_bytes(self.memory):
            raise ValueError(
                f"shared_memory {self.shared_memory} counts towards memory {self.memory}: "
                "raise kubernetes.memory above it"
            )
        return self


def in_bytes(quantity: str) -> float:
    """An amount of memory as Kubernetes writes it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGTP]i)|([kMGTP]))?", quantity)
    if found is None:
        raise ValueError(f"got {quantity!r}, expected an amount of memory such as 64Gi or 500M")
    number, binary, decimal = found.groups()
    base, letter = (1024, binary[0].lower()) if binary else (1000, (decimal or "").lower())
    return float(number) * float(base ** (" kmgtp".index(letter or " ")))
