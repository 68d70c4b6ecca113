"""start_training.sh and the launchers on a fresh machine, in an image, in an active environment: which
Python they take, and when they install. Stand-ins for Python write down what they are asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "$0 $@" | head -n 1 >> {told}
case "$*" in
  *find_spec*) exit {without_muster} ;;
  *version_info*) exit 0 ;;
  "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *"import torch"*) echo 2 0 ;;
esac
"""


class Machine:
    """A copy of the scripts, and a PATH with nothing but a shell's own programs and stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, folder / "told"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in (
            "bash",
            "cat",
            "cksum",
            "cp",
            "dirname",
            "env",
            "head",
            "mkdir",
            "nproc",
            "rm",
        ):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        for name in ("sh", "touch", "tr"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        for name in ("start_training.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        for name in ("tools", "systems/multi-gpu", "systems/mwc-asr"):
            (folder / name).mkdir(parents=True)
            for script in (ROOT / name).glob("*.sh"):
                shutil.copy(script, folder / name)

    def python(self, name: str, muster: bool) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON.format(told=self.told, without_muster=int(not muster)))
        path.chmod(0o755)
        return path

    def call(self, *command: str, path: Path | None = None, **variables: str) -> list[str]:
        """What the stand-ins were asked for, other than which modules they have."""
        self.told.write_text("")
        search = os.pathsep.join(str(p) for p in (path, self.bin) if p)
        env = {"PATH": search, "HOME": str(self.folder), **variables}
        done = subprocess.run(
            [*command], cwd=self.folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = self.told.read_text().splitlines()
        return [line.replace(f"{self.folder}/", "") for line in lines if not line.endswith(" -c ")]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def installs(lines: list[str]) -> list[str]:
    return [line for line in lines if " pip " in line or " venv " in line]


START = "-P -m muster.entrypoints.start_training --5"


@pytest.mark.parametrize("name", ["python", "python3"])
def test_an_image_with_muster_in_its_python_installs_nothing(machine, name):
    machine.python(f"bin/{name}", muster=True)
    assert machine.call("./start_training.sh", "--5") == [f"bin/{name} {START}"]
    assert not (machine.folder / ".venv").exists()
    started = machine.call("systems/mwc-asr/start_training.sh", "--5")
    assert started == [f"bin/{name} systems/mwc-asr/scripts/start_training.py --5"]


def test_an_active_environment_goes_before_the_system(machine):
    machine.python("bin/python3", muster=True)
    conda = machine.python("conda/bin/python", muster=True).parent
    assert machine.call("./start_training.sh", "--5", path=conda) == [f"conda/bin/python {START}"]
    named = {"PYTHON": str(machine.folder / "bin" / "python3")}
    assert machine.call("./start_training.sh", "--5", path=conda, **named) == [
        f"bin/python3 {START}"
    ]


def test_a_machine_with_nothing_but_python_is_set_up_once(machine):
    machine.python("bin/python3", muster=False)
    first = machine.call("./start_training.sh", "--5")
    assert len(installs(first)) == 2, first
    assert first[-1] == f".venv/bin/python {START}"
    assert machine.call("./start_training.sh", "--5") == first[-1:]
    active = machine.folder / ".venv" / "bin"
    assert machine.call("./start_training.sh", "--5", path=active) == first[-1:]


def test_the_launcher_of_the_trainer_installs_accelerate_too(machine):
    machine.python("bin/python3", muster=False)
    first = machine.call("bash", "systems/multi-gpu/run_nvidia_all.sh", "hf")
    assert [line.partition("-e ")[2] for line in installs(first)] == [
        "",
        f"{machine.folder}[trainer]",
    ]
    ranks = "-m torch.distributed.run --standalone --nproc_per_node=2 systems/multi-gpu/"
    assert first[-1] == f".venv/bin/python {ranks}run_hf_standalone.py"
    for words in (["hf"], []):  # nothing is missing now
        again = machine.call("bash", "systems/multi-gpu/run_nvidia_all.sh", *words)
        assert not installs(again)


def test_a_launcher_in_an_image_with_muster_installs_nothing(machine):
    machine.python("bin/python3", muster=True)
    for script in ("run_nvidia_all.sh", "run_amd_all.sh"):
        lines = machine.call("bash", f"systems/multi-gpu/{script}", "hf", NUM_GPUS="2")
        assert not installs(lines)
        assert lines[-1].startswith("bin/python3 -m torch.distributed.run --standalone")
