"""A SLURM of two nodes on this machine, with its own daemons, key and ports, gone after the tests.

Each node is a slurmd in a mount and host-name namespace of its own, so that `node1` and `node2` are
names that resolve, as on a real cluster. Both share the machine's address and its cores. SLURM
believes that each has two GPUs, and gives them out; they are other devices that every machine has.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NODES = ("node1", "node2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
FAST = "batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters={fast}
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no SLURM here."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "running SLURM's daemons needs root"
    if subprocess.call(["unshare", "--mount", "--uts", "true"], stderr=subprocess.DEVNULL):
        return "this machine does not allow namespaces of its own"
    return None if _own_address() != "0.0.0.0" else "two nodes need an address beside the loopback"


@dataclass(frozen=True)
class Slurm:
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __call__(self, *command: str) -> str:
        done = subprocess.run(
            command, env={**os.environ, **self.variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))


@contextmanager
def start() -> Iterator[Slurm]:
    """A short path: the name of a socket may have a hundred characters."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        slurm = Slurm(folder)
        _configure(folder)
        for name, command in _daemons(folder):
            stack.enter_context(_daemon(name, command, slurm))
        _until_ready(slurm)
        stack.callback(_end_jobs, slurm)
        yield slurm


def _configure(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    address, (control_port, *ports) = _own_address(), _free_ports(1 + len(NODES))
    host = socket.gethostname()
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host}\n{address} {' '.join(NODES)}\n")
    nodes = "".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 Gres=gpu:2\n"
        for name, port in zip(NODES, ports, strict=True)
    )
    text = CONFIGURATION.format(
        host=host, address=address, control_port=control_port, folder=folder, fast=FAST
    )
    (folder / "slurm.conf").write_text(nodes + text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")


def _own_address() -> str:
    """Any that other machines could use: ranks of several nodes refuse to meet on the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _daemons(folder: Path) -> Iterator[tuple[str, list[str]]]:
    names = {"key-file": "munge.key", "socket": "munge.sock", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    files = [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged-own.log"]
    yield "munged", ["munged", "--foreground", "--force", *options, *files]
    yield "slurmctld", ["slurmctld", "-D"]
    for name in NODES:
        lines = f"mount --bind {folder}/hosts /etc/hosts; hostname {name}; exec slurmd -D -N {name}"
        yield name, ["unshare", "--mount", "--uts", "sh", "-ec", lines]


@contextmanager
def _daemon(name: str, command: list[str], slurm: Slurm) -> Iterator[None]:
    with (slurm.folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **slurm.variables}, stdout=log, stderr=log
        )
    try:
        if name == "munged":  # the others need it from their first second
            _until(lambda: (slurm.folder / "munge.sock").exists(), slurm)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(slurm: Slurm) -> None:
    def ready() -> bool:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(
            command, env={**os.environ, **slurm.variables}, capture_output=True, text=True
        )
        return done.stdout.split().count("idle") == 2 * len(NODES)  # in both partitions

    _until(ready, slurm)


def _until(condition, slurm: Slurm, limit: float = 90.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, slurm.logs()
        time.sleep(0.05)


def _end_jobs(slurm: Slurm) -> None:
    slurm("scancel", "--user=root")
    _until(lambda: not slurm("squeue", "--noheader"), slurm)
