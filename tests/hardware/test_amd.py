"""AMD's GPUs from each of the three places that know them, and the masks of ROCm."""

import json
import sys
from enum import IntEnum
from types import ModuleType

import pytest
from stand_ins import write

from muster.hardware import inventory
from muster.hardware.inventory import Pcie, Process

NODES = "sys/class/kfd/kfd/topology/nodes"
SERIALS = ["0x2f1b5a1ce24de9bf", "0xe2a3f09d13c34b4a", "0x9b7c66f1a5d0e312"]
IDS = ["GPU-" + serial[2:] for serial in SERIALS]
BUSES = ["0000:05:00.0", "0000:26:00.0", "0000:46:00.0"]
TOTAL, USED = 206141652992, 298643456  # bytes of an MI300X
ALL = ((0, 1), (0, 2), (1, 2))


def machine(root):
    """Three GPUs behind one processor, as Linux's amdgpu driver lays them out; node 0 is the
    processor. XGMI joins all but 1 and 2, which meet over PCIe; a process holds memory on GPU 1."""
    write(root, **{f"{NODES}/0/properties": "cpu_cores_count 96\nsimd_count 0"})
    write(root, **{"sys/module/amdgpu/version": "6.12.12"})
    for i, bus in enumerate(BUSES):
        node, place = f"{NODES}/{i + 1}", int(bus[5:7], 16) << 8
        told = f"simd_count 1216\nlocation_id {place}\ndomain 0\ndrm_render_minor {128 + i}"
        write(root, **{f"{node}/properties": told, f"{node}/gpu_id": 5000 + i})
        write(root, **{f"{node}/io_links/0/properties": f"type 2\nnode_from {i + 1}\nnode_to 0"})
        device = f"sys/devices/pci0000:00/{bus}"
        numbers = {"mem_info_vram_total": TOTAL, "mem_info_vram_used": USED, "numa_node": i // 2}
        words = {"product_name": "AMD Instinct MI300X OAM", "unique_id": SERIALS[i][2:]}
        words |= {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
        numbers |= {"current_link_width": 16, "max_link_width": 16}
        words |= {"ras/umc_err_count": f"ue: {i}\nce: 7"}
        write(root, **{f"{device}/{name}": value for name, value in (numbers | words).items()})
        for link in (f"sys/class/drm/renderD{128 + i}/device", f"sys/bus/pci/devices/{bus}"):
            (root / link).parent.mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(root / device)
    for number, (a, b, kind) in enumerate([(0, 1, 11), (0, 2, 11), (1, 2, 2)], start=1):
        for here, there in ((a, b), (b, a)):
            link = f"{NODES}/{here + 1}/io_links/{number}/properties"
            write(root, **{link: f"type {kind}\nnode_from {here + 1}\nnode_to {there + 1}"})
    write(root, **{"sys/class/kfd/kfd/proc/815/vram_5001": 2**30})
    write(root, **{"sys/class/kfd/kfd/proc/815/vram_5002": 0})
    return root


def told_by_rocm_smi(series="Card Series"):
    cards = {
        f"card{i}": {
            "Unique ID": SERIALS[i],
            "PCI Bus": BUSES[i],
            "VRAM Total Memory (B)": str(TOTAL),
            "VRAM Total Used Memory (B)": str(USED),
            series: "AMD Instinct MI300X",
            "Card Model": "0x74a1",
            "(Topology) Numa Node": str(i // 2),
        }
        for i in range(3)
    }
    links = {f"(Topology) Link type between DRM devices {a} and {b}": "XGMI" for a, b in ALL}
    return cards | {"system": links}


class Kind(IntEnum):
    """The library's own numbers."""

    INTERNAL = 0
    PCIE = 1
    XGMI = 2


def library():
    """The calls of AMD's amdsmi that muster makes, with answers in the library's shapes."""
    module = ModuleType("amdsmi")
    module.AmdSmiLinkType = Kind
    module.open = 0

    def count(step):
        module.open += step

    module.amdsmi_init = lambda: count(1)
    module.amdsmi_shut_down = lambda: count(-1)
    module.amdsmi_get_processor_handles = lambda: [0, 1, 2]
    module.amdsmi_get_gpu_asic_info = lambda i: {
        "market_name": "AMD Instinct MI300X VF",
        "asic_serial": SERIALS[i].upper().replace("X", "x"),
    }
    module.amdsmi_get_gpu_vram_usage = lambda i: {"vram_total": 196592, "vram_used": 284}
    module.amdsmi_get_gpu_device_bdf = lambda i: BUSES[i].upper()
    module.amdsmi_topo_get_link_type = lambda a, b: {"hops": 1, "type": Kind.XGMI if a == 0 else 1}
    return module


@pytest.fixture
def rocm(tmp_path, monkeypatch, program, no_masks):
    """No NVIDIA driver, no amdsmi, a rocm-smi that fails, and a torch built for ROCm."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    program("rocm-smi", "exit 1")
    built = "cuda: Optional[str] = None\nhip: Optional[str] = '7.1.52802'"
    write(tmp_path / "site", **{"torch/__init__.py": "", "torch/version.py": built})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return machine(tmp_path / "root")


def common(found):
    assert [gpu.uuid for gpu in found.gpus] == IDS
    assert [gpu.vendor for gpu in found.gpus] == ["amd"] * 3
    assert [round(gpu.memory_gib) for gpu in found.gpus] == [192] * 3
    assert [gpu.memory_gib - gpu.free_gib for gpu in found.gpus] == pytest.approx([0.278] * 3, 1e-2)
    assert [gpu.bus_id for gpu in found.gpus] == BUSES
    assert [gpu.numa for gpu in found.gpus] == [0, 0, 1]
    assert found.gpus[0].pcie == Pcie(5, 16, 5, 16)
    assert [gpu.ecc_errors for gpu in found.gpus] == [0, 1, 2]
    assert [gpu.processes for gpu in found.gpus] == [(), (Process(815, 1.0),), ()]
    assert found.driver == "6.12.12"
    assert found.hidden == ()


def test_sysfs_alone_tells_enough(rocm):
    found = inventory.detect(rocm)
    common(found)
    assert found.gpus[0].name == "AMD Instinct MI300X OAM"
    assert found.links == ((0, 1), (0, 2))
    assert found.describe_links() == "GPU 0↔1, 0↔2"


@pytest.mark.parametrize("series", ["Card Series", "Card series"])
def test_rocm_smi_is_asked_before_sysfs(rocm, program, series):
    answer = json.dumps(told_by_rocm_smi(series))
    program(
        "rocm-smi",
        f"echo 'WARNING: AMD GPU device(s) is/are in a low-power state'\necho '{answer}'",
    )
    found = inventory.detect(rocm)
    common(found)
    assert found.gpus[0].name == "AMD Instinct MI300X"
    assert found.links == ALL
    assert found.describe_links() == "between all GPUs"


def test_the_library_is_asked_before_rocm_smi(rocm, program, monkeypatch):
    program("rocm-smi", f"echo '{json.dumps(told_by_rocm_smi())}'")
    module = library()
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    found = inventory.detect(rocm)
    common(found)
    assert found.gpus[0].name == "AMD Instinct MI300X VF"
    assert found.links == ((0, 1), (0, 2))
    assert module.open == 0, "the library is let go"


def test_a_library_that_fails_leaves_the_word_to_the_next(rocm, monkeypatch):
    module = library()
    del module.amdsmi_get_gpu_vram_usage
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    common(inventory.detect(rocm))
    assert module.open == 0


@pytest.mark.parametrize(
    ("masks", "seen", "hidden"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0], {1: "HIP_VISIBLE_DEVICES"}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1], dict.fromkeys((0, 2), "CUDA_VISIBLE_DEVICES")),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0,1"},
            [0, 1],
            {2: "HIP_VISIBLE_DEVICES"},
        ),
        ({"ROCR_VISIBLE_DEVICES": IDS[1]}, [1], dict.fromkeys((0, 2), "ROCR_VISIBLE_DEVICES")),
        (
            {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"},
            [2],
            {0: "ROCR_VISIBLE_DEVICES", 1: "HIP_VISIBLE_DEVICES"},
        ),
        ({"HIP_VISIBLE_DEVICES": ""}, [], dict.fromkeys((0, 1, 2), "HIP_VISIBLE_DEVICES")),
    ],
)
def test_the_masks_of_rocm_are_honoured_in_their_order_and_named(rocm, masks, seen, hidden):
    found = inventory.detect(rocm, masks)
    assert [gpu.physical for gpu in found.gpus] == seen
    assert [gpu.uuid for gpu in found.gpus] == [IDS[i] for i in seen]
    assert [gpu.index for gpu in found.gpus] == list(range(len(seen)))
    assert {gpu.physical: gpu.by for gpu in found.hidden} == hidden


def test_links_follow_the_mask(rocm):
    assert inventory.detect(rocm, {"HIP_VISIBLE_DEVICES": "1,2"}).links == ()
    assert inventory.detect(rocm, {"HIP_VISIBLE_DEVICES": "2,0"}).links == ((0, 1),)


def test_another_torch_cannot_use_them_and_the_inventory_says_so(rocm, tmp_path):
    write(tmp_path / "site", **{"torch/version.py": "hip: Optional[str] = None"})
    found = inventory.detect(rocm)
    assert found.gpus == ()
    assert found.rank_count() == 1
    assert found.describe_hidden() == ["GPU 0, 1, 2 hidden since torch is not built for ROCm"]


def test_a_device_the_container_was_not_given_is_not_counted(rocm):
    (rocm / "sys/class/drm/renderD129/device").unlink()
    found = inventory.detect(rocm)
    assert [gpu.uuid for gpu in found.gpus] == [IDS[0], IDS[2]]
    assert found.links == ((0, 1),)


def test_a_machine_without_amds_driver_is_not_asked(rocm, program, tmp_path):
    program("rocm-smi", f"touch {tmp_path}/asked")
    assert inventory.detect(tmp_path / "empty").gpus == ()
    assert not (tmp_path / "asked").exists()
