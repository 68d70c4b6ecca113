"""Every command of the guides behind `systems/`, as printed: ./run_tests.sh --guides.

Each is run by a shell in a copy of its system's folder, on CPU ranks. Of each kind one is `real`: all
its processes are new interpreters. For the others, Python programs are forked (`fork_server.py`): the
same launchers, but torch is imported already. Words added at the end make a training short; addresses
of other machines are those of two hosts in network namespaces. Left out is what needs a GPU
(`nvidia-smi`, `nsys`, a number of ranks read from `torch.cuda`) or runs until it is stopped
(`tensorboard`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

import slurm
from hosts import Host, hosts, needs_namespaces  # noqa: F401
from processes import PROGRAMS, fixed_port, forking_environment, free_port, start

pytestmark = [pytest.mark.guides, pytest.mark.timeout(420)]

SYSTEMS = Path(__file__).parents[2] / "systems"
MWC, LMU, COURSE, MULTI = "mwc-asr", "lmu-asr", "distributed-training", "multi-gpu"
LIMIT_S = 400
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # as on a machine without GPUs, also where there are some
SPEECH = ["training.steps=2", "training.warmup_steps=1", "evaluation.every_steps=null"]
SPEECH += ["evaluation.final=false", "data.max_seconds=1.3"]  # few clips are decoded
LMU_SHORT = [*SPEECH, "data.max_parquet_files=1"]
WHISPER_SHORT = [*SPEECH, "data.spec_augment=null"]
TEXT_SHORT = ["training.steps=2", "training.warmup_steps=1", "data.sequence_length=32"]
TEXT_SHORT += ["evaluation.final=false"]
# Without --follow it returns at once, and training goes on in the background.
STARTED = ["--follow", *WHISPER_SHORT]
TRAIN_ASR = "torchrun --nproc_per_node=4 --standalone scripts/train_asr.py "
TRAIN_ASR += "--config config/training_config.yaml"


@dataclass(frozen=True)
class Command:
    folder: str
    words: str  # as the guide prints them
    more: tuple[str, ...] = ()
    shows: str = ""  # a pattern in what it prints
    ranks: int = 0  # of the run it leaves
    real: bool = False  # its processes are new interpreters


def training(
    folder: str, words: str, ranks: int, more: list[str], files: int = 0, real: bool = False
) -> Command:
    """`files`: parquet files, of ten, that it says it reads."""
    said = rf"{files} of 10 parquet file[\s\S]*" if files else ""
    return Command(folder, words, tuple(more), f"{said}finished: 2 steps", ranks, real)


CORES = min(2, len(os.sched_getaffinity(0)))
COMMANDS = [
    training(MWC, "./start_training.sh", 1, STARTED, 10, real=True),
    training(MWC, "./start_training.sh --5", 1, STARTED, 5),
    training(MWC, "./start_training.sh --10", 1, STARTED, 10),
    training(MWC, "./start_training.sh --all", 1, STARTED, 10),
    training(MWC, "./start_training.sh --distributed", CORES, STARTED, 10, real=True),
    training(MWC, "./launch_distributed.sh", CORES, STARTED, 10),
    training(MWC, "./start_training.sh --distributed --all", CORES, STARTED, 10),
    training(MWC, "./start_training.sh --distributed --gpus=2 --5", 2, STARTED, 5),
    training(MWC, "./start_training.sh --distributed --gpus=2 --10", 2, STARTED, 10),
    training(MWC, "./start_training.sh --distributed --gpus=4", 4, STARTED, 10),
    training(MWC, "./start_training.sh --distributed --gpus=4 --all", 4, STARTED, 10),
    Command(MWC, "./start_training.sh --clean", ("--yes",), "nothing to remove"),
    training(MWC, TRAIN_ASR, 4, WHISPER_SHORT, real=True),
    training(MWC, f"{TRAIN_ASR} --max-parquet-files 10", 4, WHISPER_SHORT),
    Command(
        MWC,
        "torchrun --nproc_per_node=4 --standalone validate_distributed.py",
        shows=r"Rank: 3/4, [\s\S]*\n(fit to train on|not fit to train on: balance)",
    ),
    training(LMU, "torchrun --nproc_per_node=2 scripts/train_torchrun.py", 2, LMU_SHORT),
    training(LMU, "torchrun --nproc_per_node=4 scripts/train_torchrun.py", 4, LMU_SHORT),
    training(LMU, "torchrun --nproc_per_node=8 scripts/train_torchrun.py", 8, LMU_SHORT),
    training(LMU, "python scripts/train_distributed.py", CORES, LMU_SHORT, real=True),
    training(LMU, "python scripts/train.py", 1, LMU_SHORT),
    Command(
        LMU,
        "python test_distributed_setup.py",
        shows=r"Rank: 1/2, [\s\S]*\n(fit to train on|not fit to train on: balance)",
    ),
    Command(
        LMU,
        "torchrun --nproc_per_node=1 test_distributed_setup.py",
        shows=r"Rank: 0/1, [\s\S]*\nfit to train on",
    ),
    Command(
        LMU,
        """python -c "import torch; print(f'GPUs available: {torch.cuda.device_count()}')\"""",
        shows=r"^GPUs available: 0$",
    ),
    Command(
        LMU,
        'python -c "import torch; print(torch.distributed.is_nccl_available())"',
        shows=r"^(True|False)$",
    ),
    Command(
        COURSE,
        """python -c "import torch; print(f'GPUs: {torch.cuda.device_count()}')\"""",
        shows="^GPUs: 0$",
    ),
    Command(
        COURSE,
        """python -c "import torch.distributed as dist; """
        """print('NCCL available:', dist.is_nccl_available())\"""",
        shows="^NCCL available: (True|False)$",
    ),
    Command(
        COURSE,
        "torchrun --nproc_per_node=4 01-ddp-basics/ddp_mnist.py",
        ("--epochs=1",),
        r"images scored: 347, of 347",
    ),
    Command(
        COURSE,
        "deepspeed --num_gpus=4 03-deepspeed/deepspeed_train.py "
        "--deepspeed_config 03-deepspeed/configs/zero2_config.json",
        ("--length", "32", "--steps", "2"),
        r"ZeRO-2 on 4 rank\(s\): losses and gradient norms within",
        real=True,
    ),
    training(MULTI, "bash run_nvidia_all.sh", CORES, TEXT_SHORT, real=True),
    training(MULTI, "bash run_amd_all.sh", CORES, TEXT_SHORT),
    training(MULTI, "torchrun --nproc_per_node=$NUM_GPUS run_hf_standalone.py", 2, TEXT_SHORT),
    training(MULTI, "torchrun --nproc_per_node=$NUM_GPUS run_fsdp_standalone.py", 2, TEXT_SHORT),
    training(MULTI, "torchrun --nproc_per_node=4 run_hf_standalone.py", 4, TEXT_SHORT),
    training(MULTI, "torchrun --nproc_per_node=8 run_hf_standalone.py", 8, TEXT_SHORT),
    training(MULTI, "python3 run_hf_standalone.py", 1, TEXT_SHORT, real=True),
    training(
        MULTI,
        "torchrun --nproc_per_node=8 --master_port=29500 run_hf_standalone.py",
        8,
        TEXT_SHORT,
    ),
]


def copy_of(folder: str, into: Path) -> Path:
    """The system's folder as a fresh clone has it; but data that an earlier command of this process
    wrote there is there again, since writing it takes longer than the training."""
    ignored = shutil.ignore_patterns("data", "logs", "runs", "__pycache__")
    copy = into / "systems" / folder
    shutil.copytree(SYSTEMS / folder, copy, ignore=ignored)
    if folder in written:
        shutil.copytree(written[folder], copy / "data", copy_function=os.link)
    return copy


written: dict[str, Path] = {}  # by system


def run_in_shell(line: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """All that the line has started ends with it."""
    process = start(
        ["bash", "-c", line], folder, errors=subprocess.PIPE, env=env, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(line, process.returncode, out, err)


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return forking_environment(tmp_path_factory.mktemp("environment"))


def test_every_command_is_printed_in_its_system_s_pages():
    for command in COMMANDS:
        pages = [page.read_text() for page in (SYSTEMS / command.folder).rglob("*.md")]
        text = " ".join(" ".join(pages).replace("\\\n", " ").split())
        assert " ".join(command.words.split()) in text, f"{command.folder}: {command.words}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.folder}: {c.words}")
def test_a_command_of_the_guides_does_what_it_says(tmp_path, forking, command: Command):
    folder = copy_of(command.folder, tmp_path)
    env = {**NO_GPU, **({"VIRTUAL_ENV": sys.prefix, "PATH": PROGRAMS} if command.real else forking)}
    if "$NUM_GPUS" in command.words:
        env["NUM_GPUS"] = "2"
    if "--master_port" not in command.words:
        env["PET_MASTER_PORT"] = str(free_port())  # two of these commands may run at the same time
    line = " ".join([command.words, *command.more])
    named = "--master_port=29500" in line or line.startswith("deepspeed")  # whose default it is
    with fixed_port(29500) if named else nullcontext():
        done = run_in_shell(line, folder, env)
    said = done.stdout + done.stderr
    uneven = "not fit to train on: balance" in said and not command.ranks  # beside other tests
    assert done.returncode == 0 or uneven, said
    assert re.search(command.shows, done.stdout, re.MULTILINE), said
    if (folder / "data").is_dir():
        written.setdefault(command.folder, folder / "data")
    if command.ranks:
        (results,) = folder.rglob("latest/training_results.json")
        found = json.loads(results.read_text())
        assert (found["status"], found["world_size"]) == ("finished", command.ranks)


NODES = "torchrun --nnodes=2 --nproc_per_node=4 --node_rank={} --master_addr={} --master_port=29500"


@needs_namespaces
@pytest.mark.parametrize(
    ("system", "script", "address", "more", "shows"),
    [
        (LMU, "scripts/train_torchrun.py", "192.168.1.1", LMU_SHORT, "finished: 2 steps"),
        (COURSE, "01-ddp-basics/ddp_training.py", "10.0.0.1", [], r"claim holds on 8 rank\(s\)"),
    ],
)
def test_two_nodes_train_as_the_guides_start_them(
    hosts: tuple[Host, Host],  # noqa: F811
    tmp_path: Path,
    system: str,
    script: str,
    address: str,
    more: list[str],
    shows: str,
):
    """Node 0 gets the guide's own address beside its own. One of the two is real."""
    hosts[0].add_address(f"{address}/24")
    hosts[1].add_address(f"{address.rpartition('.')[0]}.2/24")
    folder = copy_of(system, tmp_path)
    both = [
        hosts[i].start(
            *NODES.format(i, address).split(),
            script,
            *more,
            folder=folder,
            real=system == LMU,
            **NO_GPU,
        )
        for i in (0, 1)
    ]
    said = [process.communicate(timeout=LIMIT_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert re.search(shows, said[0]), said[0]


@pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))
def test_srun_starts_the_first_lesson_as_the_guide_prints_it(tmp_path):
    """The guide's machine has four cores at least; this one shares what it has."""
    command = "srun --gpus=4 --ntasks=4 python 01-ddp-basics/ddp_mnist.py --epochs=1"
    with slurm.start() as cluster:
        env = {**cluster.variables, **NO_GPU, "SLURM_OVERCOMMIT": "1"}
        process = start(command.split(), copy_of(COURSE, tmp_path), env=env)
        said = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, said
    assert "images scored: 347, of 347" in said
