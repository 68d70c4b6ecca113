"""Which GPUs a process may use, with a driver that stands in for NVIDIA's."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from muster.hardware import inventory

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.fixture
def driver(monkeypatch):
    """A machine with four GPUs; GPU i has 10·(i + 1) GiB."""
    module = ModuleType("pynvml")
    module.calls = []
    module.nvmlInit = lambda: module.calls.append("init")
    module.nvmlShutdown = lambda: module.calls.append("shutdown")
    module.nvmlDeviceGetCount = lambda: len(UUIDS)
    module.nvmlDeviceGetHandleByIndex = lambda i: i
    module.nvmlDeviceGetUUID = lambda i: UUIDS[i]
    module.nvmlDeviceGetName = lambda i: f"Test GPU {i}"
    module.nvmlDeviceGetMemoryInfo = lambda i: SimpleNamespace(total=(i + 1) * 10 * 2**30)
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
