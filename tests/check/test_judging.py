"""Findings from the ranks' reports: hardware and networks that no test machine has."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from check.people import only, rank_names
from muster.checks import devices, links, network, ranks, software
from muster.checks.context import Options
from muster.checks.findings import Finding, Report, find_outliers
from muster.checks.judge import Judge
from muster.checks.messages import MessageStore
from muster.hardware import inventory
from muster.hardware.inventory import Gpu, Inventory, Pcie


@pytest.fixture
def four_gpus(monkeypatch):
    """NVIDIA's driver on a machine with four idle GPUs."""
    module = ModuleType("pynvml")
    module.NVML_NVLINK_MAX_LINKS, module.NVML_P2P_CAPS_INDEX_NVLINK = 18, 2
    module.NVML_DEVICE_MIG_ENABLE = 1
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 4
    module.nvmlDeviceGetHandleByIndex = lambda i: i
    module.nvmlDeviceGetUUID = lambda i: f"GPU-{i}"
    module.nvmlDeviceGetName = lambda i: "NVIDIA H100"
    module.nvmlDeviceGetMemoryInfo = lambda i: SimpleNamespace(total=80 * 2**30, free=79 * 2**30)
    module.nvmlDeviceGetComputeRunningProcesses = lambda i: []
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def on_this_machine(count: int, **mask: str) -> list[Finding]:
    said = devices.device_report(inventory.detect(env=mask)) | {"competitors": []}
    return devices.judge({0: said} | {r: {} for r in range(1, count)}, rank_names(*["a"] * count))


def test_a_masked_device_is_named_with_its_mask(four_gpus):
    assert only(on_this_machine(4), "ok").words == "a: 4 × NVIDIA H100 (80 GiB)"
    fail = only(on_this_machine(4, CUDA_VISIBLE_DEVICES="0,2,9"), "fail")
    assert "4 ranks, but 2 × NVIDIA H100" in fail.words
    assert "GPU 1, 3 hidden by CUDA_VISIBLE_DEVICES" in fail.words
    assert "mask" in fail.cause
    note = only(on_this_machine(2, CUDA_VISIBLE_DEVICES="0,2"), "note")
    assert "GPU 1, 3 hidden by CUDA_VISIBLE_DEVICES" in note.words
    warn = only(on_this_machine(2, CUDA_VISIBLE_DEVICES=""), "warn")
    assert "GPU 0, 1, 2, 3 hidden by CUDA_VISIBLE_DEVICES" in warn.words


def test_too_few_gpus_and_idle_ones_are_told(four_gpus):
    assert "8 ranks, but 4 × NVIDIA H100" in only(on_this_machine(8), "fail").words
    assert "3 of 4 GPUs stay idle" in only(on_this_machine(1), "warn").words


def test_gpus_in_use_full_or_failing_are_named(four_gpus):
    four_gpus.nvmlDeviceGetComputeRunningProcesses = lambda i: (
        [SimpleNamespace(pid=2**30, usedGpuMemory=None)] if i == 1 else []
    )
    free = {2: 40}
    four_gpus.nvmlDeviceGetMemoryInfo = lambda i: SimpleNamespace(
        total=80 * 2**30, free=free.get(i, 79) * 2**30
    )
    four_gpus.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, four_gpus.NVML_VOLATILE_ECC = 1, 0
    four_gpus.nvmlDeviceGetTotalEccErrors = lambda i, kind, when: 3 * (i == 3)
    used, full, failing = on_this_machine(4)
    assert used.words == f"a: GPU 1 is in use by pid {2**30}"
    assert full.words == "a: GPU 2 has 40.0 of 80.0 GiB free"
    assert failing.words.startswith("a: GPU 3 reports 3 uncorrected memory errors")


def rank_report(**changes) -> dict:
    usual = {"device": "cpu", "uuid": None, "bound": True, "contexts": {}}
    return usual | {"cores": [0], "reachable": [0, 1, 2, 3]} | changes


def gpu_report(uuid: str, **changes) -> dict:
    return rank_report(uuid=uuid, device="cuda:0", name="NVIDIA H100", **changes)


def test_two_ranks_on_one_gpu_are_named():
    said = {r: gpu_report(f"u{r % 3}") for r in range(4)}
    fail = only(ranks.judge(said, rank_names("a", "a", "a", "a")), "fail")
    assert fail.words == "ranks 0, 3 share one GPU of a (u0)"
    assert fail.ranks == (0, 3)


def test_ranks_may_share_cores_only_where_none_is_free():
    apart = {0: rank_report(cores=[0, 1]), 1: rank_report(cores=[2, 3])}
    assert only(ranks.judge(apart, rank_names("a", "a")), "ok").words.startswith(
        "Rank: 0/2, cores 0,1"
    )
    clash = {0: rank_report(cores=[0, 1]), 1: rank_report(cores=[1])}
    assert (
        "ranks 0 and 1 share core 1 of a"
        in only(ranks.judge(clash, rank_names("a", "a")), "fail").words
    )
    crowded = {r: rank_report(cores=[0, 1, 2, 3]) for r in range(8)}
    only(ranks.judge(crowded, rank_names(*["a"] * 8)), "ok")
    only(ranks.judge(clash, rank_names("a", "b")), "ok")  # the same numbers, other machines


def test_contexts_beside_the_ranks_own_are_counted():
    tidy = {r: gpu_report(f"u{r}", contexts={"GPU-u0": 1, "GPU-u1": 1}) for r in range(2)}
    only(ranks.judge(tidy, rank_names("a", "a")), "ok")
    stray = {r: gpu_report(f"u{r}", contexts={"GPU-u0": 2, "GPU-u1": 1}) for r in range(2)}
    assert (
        "2 contexts on GPU GPU-u0 of a"
        in only(ranks.judge(stray, rank_names("a", "a")), "warn").words
    )
    loose = {0: gpu_report("u0"), 1: gpu_report("u1", bound=False)}
    assert (
        "rank 1 on a: torch's current device"
        in only(ranks.judge(loose, rank_names("a", "a")), "fail").words
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            rank_names("a", "a", local_rank={0: 1, 1: 0}),
            "ranks are not consecutive: rank 0 is local",
        ),
        (
            rank_names("a", "a", local_rank={1: 0}),
            "the local ranks are not 0 to 1: rank 0 is local rank 0, rank 1",
        ),
        (rank_names("a", "a", "b", local_rank={1: 2}), "the local ranks are not 0 to 1"),
        (
            rank_names("a", "a", local_world={0: 4, 1: 4}),
            "2 ranks joined, but LOCAL_WORLD_SIZE is [4]",
        ),
    ],
)
def test_a_wrong_rank_mapping_is_named(names, words):
    said = {r: rank_report(cores=[r]) for r in names.registered}
    fail = only(ranks.judge(said, names), "fail")
    assert fail.words.startswith("wrong rank mapping on a: ")
    assert words in fail.words


def test_ranks_dealt_out_in_turn_over_hosts_are_named_on_each():
    said = {r: rank_report(cores=[r]) for r in range(4)}
    found = ranks.judge(said, rank_names("a", "b", "a", "b"))
    assert [f.hosts for f in found] == [("a",), ("b",)]
    assert all("ranks are not consecutive" in f.words for f in found)


def software_report(**changes) -> dict:
    usual = {"muster": "1", "python": "3.11", "torch": "2.13.0", "CUDA": "13.0", "ROCm": None}
    usual |= {"NCCL": "2.28", "usable": True, "gpus": 2, "vendor": "nvidia", "driver": "580.1"}
    return (
        usual | {"driver_cuda": [13, 0], "capabilities": [[9, 0]], "built_for": ["sm_90"]} | changes
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.5.1"}, "torch 2.5.1 is older than muster supports"),
        ({"CUDA": None, "usable": False}, "2 GPU(s), but this torch was built for CPUs only"),
        ({"driver_cuda": [12, 4]}, "torch was built for CUDA 13.0; driver 580.1 runs up to 12.4"),
        (
            {"capabilities": [[9, 0], [12, 0]]},
            "this torch has no kernels for sm_120 (it has sm_90)",
        ),
        ({"built_for": ["sm_80", "sm_86"]}, "this torch has no kernels for sm_90"),
        (
            {"capabilities": [[8, 0]], "built_for": ["sm_86"]},
            "this torch has no kernels for sm_80",
        ),
        ({"usable": False}, "the driver sees 2 GPU(s), torch cannot use them"),
    ],
)
def test_versions_that_do_not_go_together(changes, words):
    fail = only(software.judge({0: software_report(**changes)}, rank_names("a")), "fail")
    assert fail.words.startswith(f"a: {words}")


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"driver_cuda": [13, 2]},
        {"CUDA": "12.8", "driver_cuda": [13, 0]},
        {"capabilities": [[8, 9]], "built_for": ["sm_80"]},
        {"capabilities": [[12, 0]], "built_for": ["sm_80", "compute_90"]},
        {"built_for": ["sm_90a"]},
        {"gpus": 0, "CUDA": None, "usable": False, "driver": None, "driver_cuda": None},
    ],
)
def test_versions_that_do_go_together(fine):
    only(software.judge({0: software_report(**fine)}, rank_names("a")), "ok")


def test_a_host_with_another_version_is_named():
    said = {r: software_report() for r in range(3)} | {3: software_report(NCCL="2.21")}
    fail = only(software.judge(said, rank_names("a", "a", "b", "c")), "fail")
    assert fail.words == "rank 3 on c has NCCL 2.21, the others have 2.28"
    assert find_outliers({0: "x", 1: "y"}) == ("x", [1])


def box(pairs: dict[tuple[int, int], float], **changes) -> dict[int, dict]:
    """Accounts of ranks that measured these speeds."""
    world = 1 + max(max(pair) for pair in pairs)
    usual = {"all_reduce": 2.0, "copy": 8.0, "gpu": False, "network": 12.5, "rates": {}}
    usual["routes"] = {}
    return {
        r: usual
        | {"pairs": {str(sum(p) - r): speed for p, speed in pairs.items() if r in p}}
        | changes
        for r in range(world)
    }


def test_a_slow_pair_is_named():
    speeds = {(a, b): 2.0 for b in range(4) for a in range(b)}
    only(links.judge(box(speeds), rank_names(*"aaaa")), "ok")
    warn = only(links.judge(box(speeds | {(1, 3): 0.9}), rank_names(*"aaaa")), "warn")
    assert warn.words.startswith("slow pairs: rank 1 on a ↔ rank 3 on a: 0.9 GB/s")
    assert warn.ranks == (1, 3)
    crawling = only(links.judge(box({(0, 1): 0.3}), rank_names(*"aa")), "warn")
    assert "rank 0 on a ↔ rank 1 on a: 0.3 GB/s where the hardware has 8" in crawling.words
    only(links.judge(box({(0, 1): 5.0}, all_reduce=5.0), rank_names(*"ab")), "ok")
    network_ = only(links.judge(box({(0, 1): 0.5}, all_reduce=5.0), rank_names(*"ab")), "warn")
    assert "where the hardware has 12.5" in network_.words
    only(links.judge(box({(0, 1): 0.5}, network=None, all_reduce=0.1), rank_names(*"ab")), "ok")
    together = only(links.judge(box({(0, 1): 2.0}, all_reduce=0.1), rank_names(*"aa")), "warn")
    assert together.words.startswith("all-reduce runs at 0.1 GB/s")


def test_gpus_are_held_to_their_links():
    pcie = Pcie(1, 16, 5, 16)  # asleep: generation 1 of 5
    gpus = tuple(Gpu(i, "NVIDIA H100 NVL", 94.0, f"u{i}", nvlinks=12, pcie=pcie) for i in range(4))
    paths = ((0, 1, "PIX"), (0, 2, "PXB"), (0, 3, "SYS"))
    found = Inventory(gpus, 64, 512.0, "a", ((0, 1), (2, 3)), paths=paths)
    routes = links.gpu_routes(found, 0, {})
    assert routes == {1: links.NVLINK, 2: links.PCIE, 3: links.HOST}
    found_rates = links.gpu_rates(found, 0, routes, copy=10.0)
    assert found_rates == {1: 300.0, 2: pytest.approx(63, 0.01), 3: 10.0}
    rates = {str(i): rate for i, rate in found_rates.items()}
    said = box({(0, 1): 40.0}, gpu=True, rates=rates, all_reduce=200.0)
    warn = only(links.judge(said, rank_names(*"aa")), "warn")
    assert "40 GB/s where the hardware has 300" in warn.words
    only(
        links.judge(
            box({(0, 1): 200.0}, gpu=True, rates=rates, all_reduce=200.0), rank_names(*"aa")
        ),
        "ok",
    )


@pytest.mark.parametrize(
    ("env", "routes"),
    [
        ({"NCCL_P2P_LEVEL": "NVL"}, [links.NVLINK, links.HOST, links.HOST]),
        ({"NCCL_P2P_LEVEL": "PHB"}, [links.NVLINK, links.PCIE, links.HOST]),
        ({"NCCL_P2P_LEVEL": "sys"}, [links.NVLINK, links.PCIE, links.PCIE]),
        ({"NCCL_P2P_LEVEL": "3"}, [links.NVLINK, links.PCIE, links.HOST]),
        ({"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}, [links.NVLINK] + [links.HOST] * 2),
    ],
)
def test_pairs_that_nccl_keeps_apart_go_through_host_memory(env, routes):
    gpus = tuple(Gpu(i, "NVIDIA H100 NVL", 94.0, f"u{i}") for i in range(4))
    paths = ((0, 2, "NODE"), (0, 3, "SYS"))
    found = Inventory(gpus, 64, 512.0, "a", ((0, 1), (2, 3)), paths=paths)
    assert list(links.gpu_routes(found, 0, env).values()) == routes


def test_the_guides_machine_is_not_slow():
    """Four H100 NVL in two bridged pairs: by NCCL_P2P_LEVEL=NVL four of six pairs go through host memory."""
    pcie = Pcie(5, 16, 5, 16)
    gpus = tuple(Gpu(i, "NVIDIA H100 NVL", 94.0, f"u{i}", nvlinks=12, pcie=pcie) for i in range(4))
    paths = tuple((a, b, "NODE") for b in range(4) for a in range(b))
    found = Inventory(gpus, 64, 512.0, "a", ((0, 1), (2, 3)), paths=paths)
    speeds = {(a, b): 220.0 if (a, b) in found.links else 9.0 for b in range(4) for a in range(b)}
    said = box(speeds, gpu=True, all_reduce=8.0)
    for rank, report in said.items():
        routes = links.gpu_routes(found, rank, {"NCCL_P2P_LEVEL": "NVL"})
        rates = links.gpu_rates(found, rank, routes, copy=12.0)
        report["rates"] = {str(i): rate for i, rate in rates.items()}
        report["routes"] = {str(i): route for i, route in routes.items()}
    only(links.judge(said, rank_names(*"aaaa")), "ok")
    said[1]["pairs"]["3"] = said[3]["pairs"]["1"] = 2.0  # of at least 4, a third of copying
    warn = only(links.judge(said, rank_names(*"aaaa")), "warn")
    assert (warn.ranks, list(warn.figures)) == ((1, 3), ["1-3_gb_s"])


def network_report(**changes) -> dict:
    usual = {"interfaces": {}, "usable": ["eth0"], "infiniband": [], "interface": "eth0"}
    names = {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "localhost": ["127.0.0.1", "::1"]}
    return usual | {"names": names, "master": ["10.0.0.1", ["10.0.0.1"]]} | changes


def test_hosts_that_do_not_know_each_other_are_named():
    good = network_report()
    assert "by eth0" in only(network.judge({0: good, 1: good}, rank_names("a", "b")), "ok").words
    both = network_report(names=good["names"] | {"b": ["127.0.1.1", "10.0.0.2"]})
    only(network.judge({0: good, 1: both}, rank_names("a", "b")), "ok")
    loop = network_report(names=good["names"] | {"b": ["127.0.1.1"]})
    warn = only(network.judge({0: good, 1: loop}, rank_names("a", "b")), "warn")
    assert warn.words == "b: its own name b resolves to only 127.0.1.1 there"
    assert "GLOO_SOCKET_IFNAME=eth0" in warn.cure
    blind = network_report(names=good["names"] | {"a": []}, master=["a", []])
    warn, fail = network.judge({0: good, 1: blind}, rank_names("a", "b"))
    assert warn.words == "b cannot resolve a"
    assert (fail.status, fail.words) == ("fail", "b cannot resolve the master address a")


@pytest.mark.parametrize("addresses", [[], ["10.1.1.1"]])
def test_a_machine_without_a_loopback_name_is_told(addresses):
    only(network.judge({0: network_report(), 1: {}}, rank_names("a", "a")), "ok")
    said = {0: network_report(names={"localhost": addresses}), 1: {}}
    assert "localhost resolves to" in only(network.judge(said, rank_names("a", "a")), "fail").words


def test_hosts_of_one_name_are_told_apart_by_their_addresses():
    names = rank_names("a", "b", host={1: "a"})
    assert list(names.hosts()) == ["a (10.0.0.0)", "a (10.0.0.1)"]


def test_every_complaint_has_a_cause_and_a_cure():
    with pytest.raises(ValueError, match="needs a cause and a cure"):
        Finding("ranks", "warn", "it is slow", cause="somehow")


def test_the_verdict_counts_failures_and_warnings():
    fine, warn = Finding("a", "ok", "x"), Finding("b", "warn", "x", "y", "z")
    fail = Finding("c", "fail", "x", "y", "z")
    assert Report([fine], 1, ["h"], 0.0).verdict == "fit to train on"
    assert Report([fine, warn], 1, ["h"], 0.0).verdict == "fit to train on, with 1 warning(s)"
    assert Report([fine, warn, fail], 1, ["h"], 0.0).verdict == "not fit to train on: c"
    assert Report([fail], 1, ["h"], 0.0).as_dict()["fit"] is False


def test_ranks_that_talk_at_once_share_their_host_s_network(monkeypatch):
    monkeypatch.setattr(links, "interface_speed", lambda address: 12.0)
    mesh = SimpleNamespace(device=torch.device("cpu"), local_rank=0)
    found = inventory.detect()
    assert links.link_report(mesh, "127.0.0.1", found, 1)["network"] == 12.0
    assert links.link_report(mesh, "127.0.0.1", found, 4)["network"] == 3.0
    monkeypatch.setattr(links, "interface_speed", lambda address: None)
    assert links.link_report(mesh, "127.0.0.1", found, 4)["network"] is None


CLOSED = {"time": 0.0, "kind": "RuntimeError", "message": "Connection closed by peer"}


@pytest.mark.parametrize("others", [{"0": {"error": CLOSED}}, {}], ids=["complain", "still work"])
def test_a_rank_that_died_after_its_account_is_named_and_not_those_it_left(others):
    messages, started = MessageStore(dist.HashStore()), time.monotonic()
    for rank, said in rank_names("a", "a").registered.items():
        messages.post(f"registered/{rank}", said)
        messages.post(f"done/{rank}", True)
    for rank, report in {"1": {}, **others}.items():
        messages.post(f"report/0/{rank}", report)

    def exits() -> dict[int, str]:  # seen a moment after the others' errors
        return {1: "was killed by SIGKILL"} if time.monotonic() > started + 0.1 else {}

    report = Judge(messages, 2, Options(timeout_s=20.0), exits).run()
    (fail,) = [finding for finding in report.findings if finding.status == "fail"]
    assert (fail.ranks, fail.words) == ((1,), "rank 1 on a was killed by SIGKILL")


def test_a_rank_that_dies_while_others_arrive_is_named_and_not_those_on_their_way():
    messages = MessageStore(dist.HashStore())
    for rank in (1, 2):
        messages.post(f"registered/{rank}", rank_names("a", "a", "a").registered[rank])
    gone = {1: "was killed by SIGKILL"}
    report = Judge(messages, 3, Options(timeout_s=20.0), lambda: gone).run()
    (fail,) = report.findings
    assert fail.ranks == (1,)
    assert fail.words.startswith(
        "rank 1 was killed by SIGKILL, before all ranks had joined; joined: "
    )
