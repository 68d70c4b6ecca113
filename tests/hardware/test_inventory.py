"""Which GPUs a process may use, with a driver that stands in for NVIDIA's."""

import json
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from stand_ins import UUIDS, write

from muster.hardware import inventory
from muster.hardware.inventory import Pcie, Process


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("0,,1", [0]),
        ("GPU-bb33", [2]),
        ("GPU-bb,GPU-aa1", [2, 0]),
        ("GPU-zz,0", []),
        ("1,1", []),
        ("0,GPU-aa11", []),
        ("GPU-aa", []),
    ],
)
def test_the_mask_is_read_as_cuda_reads_it_and_what_it_hides_is_listed(driver, mask, expected):
    found = inventory.detect(env={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert [gpu.uuid for gpu in found.gpus] == [UUIDS[i] for i in expected]
    assert [gpu.memory_gib for gpu in found.gpus] == [10.0 * (i + 1) for i in expected]
    assert [gpu.index for gpu in found.gpus] == list(range(len(expected))), "counted as CUDA will"
    assert [gpu.physical for gpu in found.gpus] == expected
    others = [i for i in range(4) if i not in expected]
    assert [(gpu.physical, gpu.uuid) for gpu in found.hidden] == [(i, UUIDS[i]) for i in others]
    assert {gpu.by for gpu in found.hidden} <= {"CUDA_VISIBLE_DEVICES"}


def test_the_mask_of_this_process_counts(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = inventory.detect()
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-aa22"]
    assert found.describe_hidden() == ["GPU 0, 2, 3 hidden by CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("mask", "links", "words"),
    [
        (None, ((0, 1), (2, 3)), "GPU 0↔1, 2↔3"),
        ("3,0,2", ((0, 2),), "GPU 0↔2"),
        ("0,2", (), "none"),
        ("1", (), "one GPU, nothing to link"),
    ],
)
def test_links_are_those_of_the_gpus_this_process_may_use(driver, mask, links, words):
    found = inventory.detect(env={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert found.links == links
    assert found.describe_links() == words
    assert not found.nvswitch


def test_gpus_behind_switches_are_all_linked(driver):
    driver.nvmlDeviceGetP2PStatus = lambda a, b, index: 0
    switch = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    driver.nvmlDeviceGetNvLinkRemoteDeviceType = lambda i, link: switch
    found = inventory.detect()
    assert len(found.links) == 6
    assert found.nvswitch
    assert found.describe_links() == "between all GPUs, through NVSwitch"
    driver.nvmlDeviceGetNvLinkState = lambda i, link: 0
    assert not inventory.detect().nvswitch, "no link is up"


@pytest.mark.parametrize("silent", ["nvmlDeviceGetP2PStatus", "nvmlDeviceGetNvLinkState"])
def test_a_driver_that_does_not_know_links_means_none(driver, silent):
    delattr(driver, silent)
    found = inventory.detect()
    assert len(found.gpus) == 4
    assert not found.nvswitch
    if silent == "nvmlDeviceGetP2PStatus":
        assert found.links == ()


def test_what_the_driver_knows_of_each_gpu(driver, tmp_path):
    nodes = {f"sys/bus/pci/devices/0000:{i + 10:02x}:00.0/numa_node": i // 2 for i in range(3)}
    unknown = {"sys/bus/pci/devices/0000:0d:00.0/numa_node": -1}
    found = inventory.detect(write(tmp_path / "root", **nodes, **unknown))
    assert [gpu.bus_id for gpu in found.gpus[:2]] == ["0000:0a:00.0", "0000:0b:00.0"]
    assert [gpu.numa for gpu in found.gpus] == [0, 0, 1, None]
    assert [gpu.free_gib for gpu in found.gpus] == [9.0, 18.0, 27.0, 36.0]
    assert found.gpus[0].pcie == Pcie(1, 16, 5, 16)
    assert found.gpus[2].pcie == Pcie(1, 8, 5, 16)
    assert [gpu.nvlinks for gpu in found.gpus] == [12] * 4
    assert [gpu.ecc_errors for gpu in found.gpus] == [0, 2, 0, 0]
    assert [gpu.xids for gpu in found.gpus] == [(), (94, 79), (), ()]
    assert [gpu.processes for gpu in found.gpus] == [(), (), (), (Process(4711, 3.0),)]
    assert found.paths[0] == (0, 1, "PHB")
    assert found.paths[1] == (0, 2, "SYS")
    assert found.driver == "580.65.06"
    assert json.loads(json.dumps(found.as_dict()))["gpus"][2]["pcie"]["width"] == 8


def test_what_the_driver_does_not_tell_is_unknown_not_zero(driver, program):
    for name in list(vars(driver)):
        if any(word in name for word in ("Pcie", "Ecc", "Ancestor", "Processes", "PciInfo")):
            delattr(driver, name)
    program("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    found = inventory.detect()
    gpu = found.gpus[1]
    assert (gpu.pcie, gpu.ecc_errors, gpu.xids, gpu.processes) == (None, None, None, None)
    assert (gpu.bus_id, gpu.numa, found.paths) == (None, None, ())


@pytest.mark.parametrize(
    ("mask", "seen", "unseen"),
    [
        (None, "MIG-one", {"GPU-aa22", "GPU-bb33", "GPU-cc44", "MIG-two"}),
        ("0", "MIG-one", {"GPU-aa22", "GPU-bb33", "GPU-cc44", "MIG-two"}),
        ("MIG-two", "MIG-two", {"GPU-aa22", "GPU-bb33", "GPU-cc44", "MIG-one"}),
        ("1", "GPU-aa22", {"GPU-bb33", "GPU-cc44", "MIG-one", "MIG-two"}),
    ],
)
def test_of_a_gpu_cut_in_slices_a_process_sees_one_slice(driver, mask, seen, unseen):
    parts = {"one": SimpleNamespace(uuid="MIG-one"), "two": SimpleNamespace(uuid="MIG-two")}
    named, sized = driver.nvmlDeviceGetName, driver.nvmlDeviceGetMemoryInfo
    driver.nvmlDeviceGetMigMode = lambda i: (int(i == 0), 0)
    driver.nvmlDeviceGetMaxMigDeviceCount = lambda i: 7
    driver.nvmlDeviceGetMigDeviceHandleByIndex = lambda i, n: list(parts.values())[n]
    driver.nvmlDeviceGetUUID = lambda h: getattr(h, "uuid", None) or UUIDS[h]
    driver.nvmlDeviceGetName = lambda h: "Test GPU MIG 1g.5gb" if hasattr(h, "uuid") else named(h)
    small = SimpleNamespace(total=5 * 2**30, free=4 * 2**30)
    driver.nvmlDeviceGetMemoryInfo = lambda h: small if hasattr(h, "uuid") else sized(h)
    found = inventory.detect(env={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert [gpu.uuid for gpu in found.gpus] == [seen]
    assert {gpu.uuid for gpu in found.hidden} == unseen
    if seen.startswith("MIG"):
        assert (found.gpus[0].mig, found.gpus[0].memory_gib) == (True, 5.0)
        assert found.gpus[0].name == "Test GPU MIG 1g.5gb"
    if mask is None:
        assert any("one MIG slice" in line for line in found.describe_hidden())


def test_interfaces_are_those_that_are_up(driver):
    stats = psutil.net_if_stats()
    assert set(inventory.detect().interfaces) == {name for name in stats if stats[name].isup}


def test_every_gpu_is_a_device_and_a_machine_without_has_one(driver, monkeypatch):
    found = inventory.detect()
    assert found.rank_count() == 4
    assert found.describe() == "4 × Test GPU 0 (10 GiB)"
    assert found.as_dict()["gpus"][1]["name"] == "Test GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = inventory.detect()
    assert found.rank_count() == 1
    assert found.describe().startswith("no GPU, ")
    assert found.cpus >= 1
    assert found.memory_gib > 0


def test_a_lost_gpu_is_named_and_the_others_are_used(driver):
    def read(number):
        if number == 2:
            raise RuntimeError("GPU is lost")
        return UUIDS[number]

    driver.nvmlDeviceGetUUID = read
    found = inventory.detect()
    assert [gpu.physical for gpu in found.gpus] == [0, 1, 3]
    assert found.describe_hidden() == ["GPU 2 hidden since the driver cannot read it: GPU is lost"]
    found = inventory.detect(env={"CUDA_VISIBLE_DEVICES": "3"})
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-cc44"], "numbers are the driver's"


def test_the_driver_is_let_go_even_when_it_fails(driver):
    inventory.detect()
    assert driver.calls == ["init", "shutdown"]

    def fail():
        raise RuntimeError("driver is gone")

    driver.nvmlDeviceGetCount = fail
    with pytest.raises(RuntimeError):
        inventory.detect()
    assert driver.calls == ["init", "shutdown"] * 2


def test_without_a_driver_or_its_library_there_is_no_gpu(driver, monkeypatch, tmp_path):
    def fail():
        raise RuntimeError("Driver Not Loaded")

    driver.nvmlInit = fail
    assert inventory.detect(tmp_path).gpus == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert inventory.detect(tmp_path).gpus == ()


def test_looking_at_the_hardware_does_not_import_torch():
    code = "import sys; from muster.hardware import inventory; inventory.detect(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_the_real_driver_and_torch_count_the_same_gpus():
    import torch

    found = inventory.detect()
    assert len(found.gpus) == torch.cuda.device_count()
    for gpu in found.gpus:
        real = torch.cuda.get_device_properties(gpu.index)
        assert gpu.name == real.name
        assert gpu.uuid.removeprefix("GPU-") == str(real.uuid)
        assert gpu.memory_gib == pytest.approx(real.total_memory / 2**30, rel=0.02)
        assert gpu.free_gib is not None
        assert 0 < gpu.free_gib <= gpu.memory_gib
        assert gpu.pcie is not None
        assert gpu.pcie.width <= gpu.pcie.best_width


@pytest.mark.gpu
def test_this_process_is_found_on_its_gpu():
    import torch

    torch.ones(1, device="cuda")
    processes = inventory.detect().gpus[torch.cuda.current_device()].processes
    assert processes, "the driver lists who computes, under its own pid in a container"
