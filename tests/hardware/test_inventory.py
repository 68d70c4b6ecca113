"""Which GPUs a process may use, with a driver that stands in for NVIDIA's."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import psutil
import pynvml
import pytest

from muster.hardware import inventory

LINK_NAMES = ("NVML_P2P_CAPS_INDEX_NVLINK", "NVML_P2P_STATUS_OK", "NVML_NVLINK_MAX_LINKS")
LINK_NAMES += ("NVML_NVLINK_DEVICE_TYPE_SWITCH",)
UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.fixture
def driver(monkeypatch):
    """A machine with four GPUs; GPU i has 10·(i + 1) GiB, and NVLink bridges join 0↔1 and 2↔3."""
    module = ModuleType("pynvml")
    module.calls = []
    module.nvmlInit = lambda: module.calls.append("init")
    module.nvmlShutdown = lambda: module.calls.append("shutdown")
    module.nvmlDeviceGetCount = lambda: len(UUIDS)
    module.nvmlDeviceGetHandleByIndex = lambda i: i
    module.nvmlDeviceGetUUID = lambda i: UUIDS[i]
    module.nvmlDeviceGetName = lambda i: f"Test GPU {i}"
    module.nvmlDeviceGetMemoryInfo = lambda i: SimpleNamespace(total=(i + 1) * 10 * 2**30)
    for name in LINK_NAMES:  # NVIDIA's own numbers
        setattr(module, name, getattr(pynvml, name))
    bridged = {(0, 1), (2, 3)}
    unsupported = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    module.nvmlDeviceGetP2PStatus = lambda a, b, index: (
        pynvml.NVML_P2P_STATUS_OK
        if index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and (min(a, b), max(a, b)) in bridged
        else unsupported
    )
    module.nvmlDeviceGetNvLinkState = lambda i, link: link == 2  # the first two are down
    module.nvmlDeviceGetNvLinkRemoteDeviceType = lambda i, link: pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


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
def test_the_mask_is_read_as_cuda_reads_it(driver, monkeypatch, mask, expected):
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    gpus = inventory.detect().gpus
    assert [gpu.uuid for gpu in gpus] == [UUIDS[i] for i in expected]
    assert [gpu.memory_gib for gpu in gpus] == [10.0 * (i + 1) for i in expected]
    assert [gpu.index for gpu in gpus] == list(range(len(expected))), "counted as CUDA will"


@pytest.mark.parametrize(
    ("mask", "links", "words"),
    [
        (None, ((0, 1), (2, 3)), "GPU 0↔1, 2↔3"),
        ("3,0,2", ((0, 2),), "GPU 0↔2"),
        ("0,2", (), "none"),
        ("1", (), "one GPU, nothing to link"),
    ],
)
def test_links_are_those_of_the_gpus_this_process_may_use(driver, monkeypatch, mask, links, words):
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    found = inventory.detect()
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


def test_interfaces_are_those_that_are_up(driver):
    stats = psutil.net_if_stats()
    assert set(inventory.detect().interfaces) == {name for name in stats if stats[name].isup}


def test_every_gpu_is_a_device_and_a_machine_without_has_one(driver, monkeypatch):
    found = inventory.detect()
    assert found.devices == 4
    assert found.describe() == "4 × Test GPU 0 (10 GiB)"
    assert found.as_dict()["gpus"][1]["name"] == "Test GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = inventory.detect()
    assert found.devices == 1
    assert found.describe().startswith("no GPU, ")
    assert found.cpus >= 1
    assert found.memory_gib > 0


def test_the_driver_is_let_go_even_when_it_fails(driver):
    inventory.detect()
    assert driver.calls == ["init", "shutdown"]

    def fail(_):
        raise RuntimeError("GPU is lost")

    driver.nvmlDeviceGetUUID = fail
    with pytest.raises(RuntimeError):
        inventory.detect()
    assert driver.calls == ["init", "shutdown"] * 2


def test_without_a_driver_or_its_library_there_is_no_gpu(driver, monkeypatch):
    def fail():
        raise RuntimeError("Driver Not Loaded")

    driver.nvmlInit = fail
    assert inventory.detect().gpus == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert inventory.detect().gpus == ()


def test_looking_at_the_hardware_does_not_import_torch():
    code = "import sys; from muster.hardware import inventory; inventory.detect(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
