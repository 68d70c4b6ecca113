"""systems/distributed-training/01-ddp-basics: each lesson on real ranks, and what breaks its claim."""

from __future__ import annotations

import re
import signal

import pytest

from course import COURSE, broken, devices, said, start, torchrun
from hosts import hosts, needs_namespaces  # noqa: F401
from processes import PROGRAMS, python_path

LESSONS = COURSE / "01-ddp-basics"
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.both
@pytest.mark.full
def test_digits_are_learnt_by_two_ranks_as_by_one_process(tmp_path):
    words = torchrun("01-ddp-basics/ddp_mnist.py", "--save", tmp_path / "digits.pt")
    assert "images scored: 347, of 347" in words
    found = re.search(r"claim holds on 2 rank\(s\): accuracy ([\d.]+)%, weights identical", words)
    assert found
    assert float(found[1]) > 90
    assert (tmp_path / "digits.pt").stat().st_size > 500_000
    assert not (tmp_path / "digits.pt.part").exists()


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        pytest.param(
            "(plain, device_ids=devices)",
            "(plain, device_ids=devices).module",
            "gradient is off",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "Subset(test, range(mesh.rank, len(test), mesh.world))",
            "Subset(test, list(DistributedSampler(test, mesh.world, mesh.rank)))",
            "348 images scored, there are 347",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_first_lesson_notices_ranks_that_do_not_share(tmp_path, line, instead, complaint):
    script = broken("01-ddp-basics/ddp_mnist.py", line, instead, tmp_path)
    words = torchrun(script, "--epochs=1", f"--save={tmp_path / 'd.pt'}", fails=True)
    assert complaint in words


# Ranks do not end before they have heard the signal, however late it comes.
HELD = """
import os
if "RANK" in os.environ:
    import time
    import torch
    real, taken = torch.optim.AdamW.step, []
    def step(*args, **kwargs):
        from muster.observe import stopping
        taken.append(1)
        while len(taken) > 5 and not stopping.asked.is_set():
            time.sleep(0.02)
        return real(*args, **kwargs)
    torch.optim.AdamW.step = step
"""


@pytest.mark.guides
def test_training_stopped_by_a_signal_goes_on_and_equals_one_process(tmp_path):
    command = [*TORCHRUN, "01-ddp-basics/ddp_training.py", "--folder", str(tmp_path)]
    command += ["training.steps=8", "checkpoint.every_steps=null"]
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "sitecustomize.py").write_text(HELD)
    first = start(*command, **devices(2), **python_path(tmp_path / "held"))
    lines = []
    for line in first.stdout:
        lines.append(line)
        if line.startswith("step 2/8"):
            first.send_signal(signal.SIGTERM)
    first.wait()
    stopped = re.search(r"stopped after step (\d+) of 8", "".join(lines))
    assert stopped, "".join(lines)
    words = said(*command, **devices(2))
    assert f"resumed after step {stopped[1]} of 8" in words
    assert f"step {int(stopped[1]) + 1}/8" in words
    assert f"step {stopped[1]}/8" not in words
    assert f"norm of {8 - int(stopped[1])} steps within" in words
    assert "stopped after 4 and resumed differs by 0\n" in words
    other = said(*command, "training.global_batch_size=8", fails=True, **devices(2))
    assert "has seed, global batch and steps [42, 16, 8], this run [42, 8, 8]" in other


@pytest.mark.guides
def test_a_finished_run_begins_again_on_other_ranks_and_touches_nothing_else(tmp_path):
    theirs = tmp_path / "stopped.pt"
    theirs.write_text("not ours")
    command = ["01-ddp-basics/ddp_training.py", "--folder", tmp_path, "training.steps=1"]
    first, second = (torchrun(*command, ranks=ranks) for ranks in (2, 1))
    assert "beginning again" not in first
    assert "all 1 steps were done: beginning again\nstep 1/1" in second
    for ranks, words in ((2, first), (1, second)):
        assert f"claim holds on {ranks} rank(s): loss and gradient norm of 1 steps" in words
        assert "begun again differs by 0\n" in words
    assert theirs.read_text() == "not ours"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "finished.pt", theirs]


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        pytest.param(
            "(loss * mesh.world / units)",
            "(loss / units)",
            "norm is off by",
            marks=pytest.mark.guides,
        ),
        pytest.param(
            'optimizer.load_state_dict(saved["optimizer"])',
            "pass",
            "resumed is off by",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_template_notices_other_maths(tmp_path, line, instead, complaint):
    script = broken("01-ddp-basics/ddp_training.py", line, instead, tmp_path)
    words = torchrun(script, "--folder", tmp_path, "training.steps=6", fails=True)
    assert complaint in words


@pytest.mark.full
@needs_namespaces
def test_the_guides_two_nodes_train_as_one_process(hosts, tmp_path):  # noqa: F811
    both = [
        host.start(
            *["torchrun", "--nnodes=2", "--nproc_per_node=1"],
            *f"--node_rank={i} --master_addr={hosts[0].address} --master_port=29500".split(),
            str(LESSONS / "ddp_training.py"),
            f"--folder={tmp_path / host.name}",  # no disk that both see
            folder=COURSE,
            CUDA_VISIBLE_DEVICES="",  # both would take the first GPU
        )
        for i, host in enumerate(hosts)
    ]
    words = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], words
    assert "claim holds on 2 rank(s): loss and gradient norm of 12 steps" in words[0]


@pytest.mark.full
def test_the_benchmark_measures_what_it_says():
    words = torchrun("01-ddp-basics/ddp_benchmark.py", "--steps=2")
    found = re.search(
        r"1 rank +(\d+)\n2 ranks +(\d+) .* weak-scaling efficiency ([\d.]+), grad", words, re.DOTALL
    )
    assert found
    alone, together, efficiency = map(float, found.groups())
    assert efficiency == pytest.approx(together / (2 * alone), abs=0.02)
    assert "3.8 MB all-reduced a step" in words


@pytest.fixture
def pretend(tmp_path):
    """Programs for PATH: a torchrun that shows what it was given, a python that counts GPUs."""

    def make(gpus: int) -> dict[str, str]:
        for name, text in (
            ("torchrun", 'echo "$@" omp=$OMP_NUM_THREADS'),
            ("python", f"echo {gpus}"),
        ):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        return {"PATH": f"{tmp_path}:{PROGRAMS}"}

    return make


def test_the_launcher_takes_every_gpu_and_leaves_settings_alone(pretend):
    script = str(LESSONS / "launch_ddp.sh")
    assert said(script, **pretend(4)) == (
        f"--standalone --nproc_per_node=4 {LESSONS}/ddp_training.py omp=1\n"
    )
    assert said(script, "3", "ddp_mnist.py", "--epochs=1", **pretend(8), OMP_NUM_THREADS="7") == (
        f"--standalone --nproc_per_node=3 {LESSONS}/ddp_mnist.py --epochs=1 omp=7\n"
    )
    assert "2 CPU ranks\n--standalone --nproc_per_node=2" in said(script, **pretend(0))
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    assert said(script, **pretend(4), **nodes).startswith(
        "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 --nproc_per_node=4"
    )
    assert "set NODE_RANK to 0 … 1" in said(script, **pretend(4), NNODES="2", fails=True)
