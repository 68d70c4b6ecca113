"""Which variables a machine gets. No machine with four linked GPUs is at hand here: the inventories
are written down, the values are those of the guides."""

from __future__ import annotations

import itertools
import socket
from dataclasses import replace

import psutil
import pytest
from stand_ins import write

from muster.hardware import environment
from muster.hardware.environment import apply, data_workers, left_out, nccl_version, variables
from muster.hardware.inventory import Gpu, Inventory
from muster.hardware.network import InfinibandPort

GUIDE = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_DISABLE": "0",
    "NCCL_SOCKET_IFNAME": "^lo,docker",
    "NCCL_NET_GDR_LEVEL": "5",
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_NVLS_ENABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}
HSA = dict.fromkeys(("HSA_NO_SCRATCH_RECLAIM", "HSA_ENABLE_SDMA", "HSA_FORCE_FINE_GRAIN_PCIE"), "1")
SOCKETS = {  # a cluster without InfiniBand, in guide 003
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_BUFFSIZE": "4194304",
}
PORT = InfinibandPort("mlx5_0", 1, True, "400 Gb/sec (4X NDR)", "InfiniBand")


def own_address() -> tuple[str, str]:
    """An address of this host that others could reach, and its interface: the route is real."""
    for name, known in psutil.net_if_addrs().items():
        for entry in known:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address, name
    return "127.0.0.1", "lo"


MASTER, DOOR = own_address()
networked = pytest.mark.skipif(DOOR == "lo", reason="this machine has only the loopback")


def machine(name="NVIDIA H200", gpus=4, links="all", nvswitch=True, interfaces=("eth0", "lo")):
    pairs = {
        "all": tuple(itertools.combinations(range(gpus), 2)),
        "bridges": ((0, 1), (2, 3)),
        "none": (),
    }
    cards = tuple(Gpu(i, name, 140.0, f"GPU-{i}") for i in range(gpus))
    return Inventory(cards, 64, 512.0, "host", pairs[links], nvswitch, interfaces)


def instinct(gpus=4):
    found = machine("AMD Instinct MI300X", gpus, nvswitch=False)
    return replace(found, gpus=tuple(replace(gpu, vendor="amd") for gpu in found.gpus))


def wanted(found, ranks=4, strategy="ddp", env=None, **more):
    return {v.name: v.value for v in variables(found, ranks, strategy, env or {}, **more)}


def test_a_machine_with_nvswitch_gets_the_guides_list():
    found = variables(machine(), 4, env={})
    expected = {"OMP_NUM_THREADS": "16", **ALLOCATOR, **RECORDER, **GUIDE}
    assert {v.name: v.value for v in found} == expected
    assert all(v.reason and not v.set_by_user for v in found)
    assert left_out(machine(), 4, env={}) == {}


@pytest.mark.parametrize(
    ("found", "strategy", "without"),
    [
        (machine("NVIDIA H100 NVL", links="bridges", nvswitch=False), "ddp", {"NCCL_NVLS_ENABLE"}),
        (machine("NVIDIA A100-SXM4-80GB"), "ddp", {"NCCL_NVLS_ENABLE"}),
        (
            machine("NVIDIA L40S", links="none", nvswitch=False),
            "ddp",
            {"NCCL_NVLS_ENABLE", "NCCL_P2P_LEVEL"},
        ),
        (machine(interfaces=("docker0", "lo")), "ddp", {"NCCL_SOCKET_IFNAME"}),
        (machine(), "fsdp", {"CUDA_DEVICE_MAX_CONNECTIONS"}),
    ],
)
def test_what_would_do_harm_is_left_out_with_its_reason(found, strategy, without):
    assert set(GUIDE) - set(wanted(found, strategy=strategy)) == without
    assert set(left_out(found, 4, strategy, env={})) == without


def test_bridged_pairs_say_how_the_others_talk():
    found = machine("NVIDIA H100 NVL", links="bridges", nvswitch=False)
    (level,) = [v for v in variables(found, 4, env={}) if v.name == "NCCL_P2P_LEVEL"]
    assert "pairs without one go through host memory" in level.reason


@pytest.mark.parametrize(
    ("found", "ranks", "expected"),
    [
        (machine(gpus=0, links="none"), 4, {"OMP_NUM_THREADS": "16", **RECORDER}),
        (machine(), 1, {"OMP_NUM_THREADS": "64", **ALLOCATOR}),
        (machine(gpus=0, links="none"), 1, {"OMP_NUM_THREADS": "64"}),
    ],
)
def test_nccl_is_left_alone_where_it_is_not_used(found, ranks, expected):
    assert wanted(found, ranks) == expected
    assert len(left_out(found, ranks, env={})) == 1


def test_a_bound_rank_keeps_the_threads_of_its_own_cores():
    """srun or mpirun gave this rank 16 cores of 64, and the three others theirs."""
    found = replace(machine(), cpus=16)
    assert wanted(found, sharing=1)["OMP_NUM_THREADS"] == "16"
    assert wanted(found)["OMP_NUM_THREADS"] == "4", "16 for all four"


def test_an_open_strategy_leaves_the_queues_of_cuda_alone_and_says_why():
    """CUDA reads the variable before the planner has chosen."""
    reason = left_out(machine(), 4, "auto", env={})["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert "CUDA reads it before strategy auto is resolved" in reason
    assert "auto" not in left_out(machine(), 4, "fsdp", env={})["CUDA_DEVICE_MAX_CONNECTIONS"]


def test_ranks_that_share_a_console_hear_only_warnings_of_nccl():
    for logged, level in ((True, "INFO"), (False, "WARN")):
        found = variables(machine(), 4, env={}, logged=logged)
        assert [v.value for v in found if v.name == "NCCL_DEBUG"] == [level]


def test_threads_are_at_least_one():
    assert wanted(replace(machine(gpus=0, links="none"), cpus=2), 8)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("ranks", [1, 4])
def test_rocm_gets_the_guides_list_and_nothing_of_nvidias(ranks):
    found = wanted(instinct(), ranks)
    assert {n: v for n, v in found.items() if n.startswith("HSA")} == HSA
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    names = set(found) | set(left_out(instinct(), ranks, env={}))
    assert not names & {"NCCL_P2P_LEVEL", "NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"}
    assert ("NCCL_DEBUG" in found) == (ranks > 1)
    assert not [name for name in wanted(machine()) if name.startswith("HSA")]


@networked
def test_nodes_without_infiniband_get_sockets_through_the_interface_that_leads_to_the_others():
    found = wanted(machine(), nodes=2, master=MASTER)
    assert {name: found.get(name) for name in SOCKETS} == SOCKETS
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == (f"={DOOR}", DOOR)
    assert "NCCL_NET_GDR_LEVEL" in left_out(machine(), 4, env={}, nodes=2, master=MASTER)
    assert found["NCCL_P2P_LEVEL"] == "NVL", "within a node NVLink goes on"


def test_nodes_with_infiniband_use_it():
    found = wanted(replace(machine(), infiniband=(PORT,)), nodes=2, master=MASTER)
    assert (found["NCCL_IB_DISABLE"], found["NCCL_NET_GDR_LEVEL"]) == ("0", "2")
    assert not set(found) & (set(SOCKETS) - {"NCCL_IB_DISABLE"})
    down = replace(machine(), infiniband=(replace(PORT, active=False),))
    assert wanted(down, nodes=2, master=MASTER)["NCCL_IB_DISABLE"] == "1"


def test_one_gpu_on_each_of_two_nodes_is_not_alone():
    assert (
        wanted(machine(gpus=1, links="none"), 1, nodes=2, master=MASTER)["NCCL_IB_DISABLE"] == "1"
    )


@networked
def test_cpu_nodes_meet_through_gloo():
    found = wanted(machine(gpus=0, links="none"), 2, nodes=2, master=MASTER)
    assert found == {"OMP_NUM_THREADS": "32", **RECORDER, "GLOO_SOCKET_IFNAME": DOOR}


@pytest.mark.parametrize(
    ("master", "why"),
    [(None, "no master address"), ("127.0.0.1", "loopback"), ("nobody.invalid", "no route")],
)
def test_an_interface_is_only_named_where_the_way_is_known(master, why):
    names = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert not names & set(wanted(machine(), nodes=2, master=master))
    reasons = left_out(machine(), 4, env={}, nodes=2, master=master)
    assert all(why in reasons[name] for name in names)


def test_what_the_user_set_wins():
    env = {"NCCL_DEBUG": "WARN", "NCCL_P2P_LEVEL": ""}
    found = variables(machine(), 4, env=env)
    assert {v.name: v.value for v in found if v.set_by_user} == env
    apply(found, env)
    assert (env["NCCL_DEBUG"], env["NCCL_P2P_LEVEL"]) == ("WARN", "")
    assert env["NCCL_NVLS_ENABLE"] == "1"


def test_what_the_user_set_against_advice_is_kept_and_shown_with_the_advice():
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    (mine,) = [v for v in variables(machine(), 4, "fsdp", env) if v.set_by_user]
    assert (mine.name, mine.value) == ("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "all-gathers" in mine.reason
    assert left_out(machine(), 4, "fsdp", env) == {}


@pytest.mark.parametrize("name", environment.ALLOCATOR)
def test_the_allocators_setting_is_not_given_twice_under_two_names(name):
    found = variables(machine(), 4, env={name: "max_split_size_mb:64"})
    allocator = [(v.name, v.value) for v in found if "ALLOC_CONF" in v.name]
    assert allocator == [(name, "max_split_size_mb:64")]


def test_gpus_that_differ_are_numbered_as_nvidia_smi_does():
    found = machine(links="none")
    assert "CUDA_DEVICE_ORDER" not in wanted(found)
    mixed = replace(found, gpus=(replace(found.gpus[0], name="NVIDIA T4"), *found.gpus[1:]))
    assert wanted(mixed)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("version", "known"), [("2.16.5", False), ("2.17.1", True), ("2.28.9", True), ("2.9.8", False)]
)
def test_a_variable_the_nccl_at_hand_does_not_know_is_left_out(
    monkeypatch, tmp_path, version, known
):
    told = f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {version}"
    write(tmp_path, **{f"nvidia_nccl_cu13-{version}.dist-info/METADATA": told})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nccl_version() == tuple(map(int, version.split(".")))
    assert ("NCCL_NVLS_ENABLE" in wanted(machine())) == known
    if not known:
        reasons = left_out(machine(), 4, env={})
        assert f"from 2.17.0 on, and this is {version}" in reasons["NCCL_NVLS_ENABLE"]


def test_decoding_threads_leave_a_core_to_their_rank():
    assert data_workers(16, None, ranks=4, gpu=True) == 8
    assert data_workers(4, None, ranks=4, gpu=True) == 3
    assert data_workers(1, None, ranks=4, gpu=True) == 1
    assert data_workers(16, None, ranks=4, gpu=False) == 1


def test_ranks_share_the_quota_of_their_container():
    assert data_workers(16, 15.5, ranks=4, gpu=True) == 3
    assert data_workers(16, 2.0, ranks=4, gpu=True) == 1
    assert data_workers(16, 200.0, ranks=4, gpu=True) == 8


@pytest.mark.gpu
def test_the_version_read_from_the_package_is_the_one_torch_runs():
    import torch

    if nccl_version() is None:
        pytest.skip("this torch brought NCCL in no package of its own")
    assert nccl_version() == torch.cuda.nccl.version()
