"""Ranks that share GPUs: who may, what they are told, and what each of them gets."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import pool
from muster.bench import ranks as bench_ranks
from muster.bench.scaling import most_ranks
from muster.checks import devices, judge, ranks
from muster.checks.context import Options
from muster.checks.findings import RankNames
from muster.cli import app
from muster.errors import LaunchError
from muster.hardware import environment, rehearsal
from muster.hardware.devices import Gpu, Hidden
from muster.hardware.inventory import Inventory
from muster.launch import addresses, rendezvous
from muster.launch.cluster import Node, RankInfo
from muster.parallel import mesh as meshes

H200 = Gpu(0, "NVIDIA H200", 140.0, "GPU-1")
ONE = Inventory(gpus=(H200,), cpus=16, memory_gib=128.0, host="box", interfaces=("eth0", "lo"))


@pytest.fixture
def rehearsing(monkeypatch):
    monkeypatch.setenv(rehearsal.VARIABLE, "1")


def cuda(monkeypatch, visible: int) -> list[torch.device]:
    """A torch that sees so many GPUs; the devices that were made current."""
    bound: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    return bound


def test_without_a_gpu_there_is_nothing_to_rehearse():
    env: dict[str, str] = {}
    with pytest.raises(LaunchError, match=r"CPU ranks need no rehearsal: .* --gpus 3 "):
        rehearsal.begin(0, 3, env)
    assert not rehearsal.active(env)
    rehearsal.begin(1, 3, env)
    assert rehearsal.active(env)


def test_more_ranks_than_gpus_are_refused_with_the_flag(monkeypatch):
    with pytest.raises(LaunchError, match=r"offers 1 × NVIDIA H200 .* --rehearse 4"):
        ONE.rank_count(4)
    monkeypatch.setenv(rehearsal.VARIABLE, "1")
    assert ONE.rank_count(4) == 4


@pytest.mark.parametrize(("visible", "indexes"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])])
def test_ranks_are_shared_out_evenly(monkeypatch, rehearsing, visible, indexes):
    bound = cuda(monkeypatch, visible)
    found = [meshes.bind_device(local_rank).index for local_rank in range(4)]
    assert found == [device.index for device in bound] == indexes


def test_a_launcher_may_show_each_rank_its_own_gpu(monkeypatch):
    """`srun --gpus-per-task=1`: every rank sees one. With two, the third rank has none."""
    cuda(monkeypatch, 1)
    assert meshes.bind_device(3) == torch.device("cuda", 0)
    cuda(monkeypatch, 2)
    with pytest.raises(LaunchError, match=r"local rank 2 has no GPU: 2 visible; .* --rehearse"):
        meshes.bind_device(2)


def test_each_rank_gets_its_share_less_a_cuda_context():
    share = rehearsal.share_of(140 * 2**30, 4)
    assert share == 35 * 2**30 - rehearsal.CONTEXT_BYTES
    with pytest.raises(LaunchError, match="rehearse fewer ranks"):
        rehearsal.share_of(2 * 2**30, 4)


def test_each_rank_is_a_host_of_its_own_to_nccl():
    one, other = {}, {}
    rehearsal.set_host_id(0, one)
    rehearsal.set_host_id(1, other)
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"]


def test_nccl_connects_through_the_loopback():
    rules = {v.name: v.value for v in environment.variables(ONE, 4, env={rehearsal.VARIABLE: "1"})}
    assert rules["NCCL_SOCKET_IFNAME"] == "=lo"
    assert rules["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_NET_GDR_LEVEL" not in rules
    ordinary = {v.name: v.value for v in environment.variables(ONE, 4, env={})}
    assert ordinary["NCCL_SOCKET_IFNAME"] == "^lo,docker"


def test_ranks_on_one_gpu_register_in_a_rehearsal_only(monkeypatch):
    store = torch.distributed.HashStore()
    infos = [RankInfo(rank, 2, rank, 2) for rank in range(2)]
    entry = {"host": os.uname().nodename, "pid": 1, "device": "GPU-1"}
    store.set("registered/1", json.dumps(entry))
    with pytest.raises(LaunchError, match=r"ranks 0 and 1 share one GPU .* --rehearse N"):
        rendezvous.register(store, infos[0], "GPU-1", 1.0)
    monkeypatch.setenv(rehearsal.VARIABLE, "1")
    rendezvous.register(store, infos[0], "GPU-1", 1.0)


def test_nodes_of_a_rehearsal_may_be_one_machine(monkeypatch):
    with pytest.raises(LaunchError, match="loopback"):
        addresses.refuse_loopback("127.0.0.1")
    monkeypatch.setenv(rehearsal.VARIABLE, "1")
    addresses.refuse_loopback("127.0.0.1")


@pytest.mark.parametrize(
    ("found", "version", "said"),
    [
        (ONE, None, r"is built without CUDA; install torch from PyPI .* CUDA_VISIBLE_DEVICES= "),
        (ONE, "13.0", r"CUDA does not start: .*; update the driver"),
        (
            Inventory((), 8, 32.0, "box", hidden=(Hidden(0, "MI300X", "", meshes.NO_ROCM),)),
            None,
            r"AMD GPUs are here, but torch is not built for ROCm; .* HIP_VISIBLE_DEVICES= ",
        ),
    ],
)
def test_gpus_that_torch_cannot_use_are_not_passed_over(monkeypatch, found, version, said):
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(LaunchError, match=said):
        meshes.refuse_unusable_gpus(found)


def test_masked_gpus_and_small_ones_of_a_display_leave_the_cpu():
    for hidden in ((), (Hidden(0, "Radeon", "", "CUDA_VISIBLE_DEVICES"),)):
        meshes.refuse_unusable_gpus(Inventory((), 8, 32.0, "box", hidden=hidden))


def test_the_check_notes_that_gpus_are_shared(monkeypatch, rehearsing):
    where = {"host": "box", "net": 1, "local_world": 2, "address": "127.0.0.1"}
    names = RankNames({rank: {**where, "local_rank": rank} for rank in range(2)})
    gpu = {"index": 0, "memory_gib": 140.0, "free_gib": 139.0, "ecc_errors": 0, "xids": []}
    report = {"devices": "1 × NVIDIA H200", "gpus": [{**gpu, "pids": []}], "hidden": []}
    seen = {"uuids": ["GPU-1"]}
    (note,) = devices.judge({0: report | seen, 1: seen}, names)
    assert (note.status, "2 ranks share 1 × NVIDIA H200" in note.words) == ("note", True)
    both = {"uuid": "GPU-1", "bound": True, "contexts": {}, "device": "cuda:0", "name": "H200"}
    assert [f.status for f in ranks.judge({0: both, 1: both}, names)] == ["ok"]
    monkeypatch.delenv(rehearsal.VARIABLE)
    (fail,) = ranks.judge({0: both, 1: both}, names)
    assert "--rehearse N" in fail.cure


def test_the_check_does_not_send_ranks_what_compares_speeds(rehearsing):
    class Messages:
        def post(self, *_: object) -> None:
            raise AssertionError("ranks were sent a step")

    one = judge.Judge(Messages(), 2, Options())
    for step in judge.STEPS:
        if step.name in ("balance", "links", "data"):
            (note,) = one._run_step(step)
            assert (note.status, rehearsal.WORDS in note.words) == ("note", True)


def test_times_are_not_measured_in_a_rehearsal(rehearsing):
    for measure in (lambda: most_ranks(2), lambda: bench_ranks.measure("overlap", {}, 2, Node())):
        with pytest.raises(LaunchError, match=r"measures times, and ranks share GPUs"):
            measure()


@pytest.mark.parametrize("form", ["scaling", "overlap"])
def test_benchmarks_of_time_refuse_the_flag_and_name_what_takes_it(form):
    with pytest.raises(LaunchError, match=r"leave --rehearse out.*bench collectives"):
        CliRunner().invoke(app, ["bench", form, "--rehearse", "2"], catch_exceptions=False)


def rehearse_on(mesh, total: int) -> tuple[str, int, float]:
    """What a rank that joins is told of its GPU, which is pretended; and its host for NCCL."""
    limits: list[float] = []
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=total, uuid="GPU-1")
    torch.cuda.set_per_process_memory_fraction = lambda share, _: limits.append(share)
    ranks = meshes._share_gpu(torch.device("cuda", 0), mesh.world)
    return os.environ.get("NCCL_HOSTID", ""), ranks, limits[0]


@pytest.mark.guides
def test_ranks_that_join_have_hosts_and_shares_of_their_own(rehearsing):
    """A pool of its own: the variable holds while the ranks join."""
    own = pool.RankPool(2)
    try:
        found = own(rehearse_on, 140 * 2**30)
    finally:
        own.close()
    assert len({host for host, _, _ in found}) == 2
    assert all(host for host, _, _ in found)
    share = (70 * 2**30 - rehearsal.CONTEXT_BYTES) / (140 * 2**30)
    assert [(ranks, limit) for _, ranks, limit in found] == [(2, share)] * 2
