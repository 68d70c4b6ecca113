"""Which variables a machine gets. No machine with four linked GPUs is at hand here: the inventories
are written down, the values are those of the guide."""

from __future__ import annotations

import itertools

import pytest

from muster.hardware.environment import apply, data_workers, left_out, variables
from muster.hardware.inventory import Gpu, Inventory

GUIDE = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_DISABLE": "0",
    "NCCL_SOCKET_IFNAME": "^lo,docker",
    "NCCL_NET_GDR_LEVEL": "5",
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_NVLS_ENABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def machine(name="NVIDIA H200", gpus=4, links="all", nvswitch=True, interfaces=("eth0", "lo")):
    pairs = {
        "all": tuple(itertools.combinations(range(gpus), 2)),
        "bridges": ((0, 1), (2, 3)),
        "none": (),
    }
    cards = tuple(Gpu(i, name, 140.0, f"GPU-{i}") for i in range(gpus))
    return Inventory(cards, 64, 512.0, "host", pairs[links], nvswitch, interfaces)


def wanted(found, ranks=4, strategy="ddp", env=None):
    return {v.name: v.value for v in variables(found, ranks, strategy, env or {})}


def test_a_machine_with_nvswitch_gets_the_guides_list():
    found = variables(machine(), 4, env={})
    assert {v.name: v.value for v in found} == {"OMP_NUM_THREADS": "16", **GUIDE}
    assert all(v.reason and not v.set_by_user for v in found)
    assert left_out(machine(), 4) == {}


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
    assert set(left_out(found, 4, strategy)) == without


def test_bridged_pairs_say_how_the_others_talk():
    found = machine("NVIDIA H100 NVL", links="bridges", nvswitch=False)
    (level,) = [v for v in variables(found, 4, env={}) if v.name == "NCCL_P2P_LEVEL"]
    assert "pairs without one go through host memory" in level.reason


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 4), (4, 1)])
def test_nccl_is_left_alone_where_it_is_not_used(gpus, ranks):
    found = machine(gpus=gpus, links="none")
    assert wanted(found, ranks) == {"OMP_NUM_THREADS": str(64 // ranks)}
    assert len(left_out(found, ranks)) == 1


def test_what_the_user_set_wins():
    env = {"NCCL_DEBUG": "WARN", "NCCL_P2P_LEVEL": ""}
    found = variables(machine(), 4, env=env)
    assert {v.name: v.value for v in found if v.set_by_user} == env
    apply(found, env)
    assert (env["NCCL_DEBUG"], env["NCCL_P2P_LEVEL"]) == ("WARN", "")
    assert env["NCCL_NVLS_ENABLE"] == "1"


def test_decoding_threads_share_the_cores():
    assert data_workers(machine()) == 8
    assert data_workers(Inventory(machine().gpus, 16, 1.0, "host")) == 3
    assert data_workers(machine(gpus=0, links="none")) == 1
