"""What is known of accelerators: the catalogue's own soundness, and finding one by any of its names."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import yaml
from stand_ins import write

from muster.errors import DataError, RecipeError
from muster.hardware import catalogue, cpus
from muster.hardware.catalogue import find, own, recognise

DOCUMENT = yaml.safe_load(catalogue.DATA.read_text())
NAMES = list(DOCUMENT["accelerators"])
ASKED_FOR = [
    *("v100-16", "v100-32", "a100-40", "a100-80", "l4", "l40s", "rtx-3090", "rtx-4090", "rtx-5090"),
    *("h100-sxm", "h100-pcie", "h100-nvl", "h200", "b200", "mi250x", "mi300x"),
]
DRIVER_NAMES = [
    ("NVIDIA H200", 139.8, "h200"),
    ("NVIDIA H200 NVL", 139.8, "h200-nvl"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
    ("NVIDIA A100-SXM4-40GB", None, "a100-40"),
    ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
    ("NVIDIA A100 80GB PCIe", 79.2, "a100-80-pcie"),
    ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40-pcie"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
    ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
    ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
    ("NVIDIA B200", 178.35, "b200"),
    ("NVIDIA GH200 480GB", 94.5, "gh200-96"),
    ("NVIDIA GeForce RTX 3090", 23.69, "rtx-3090"),
    ("NVIDIA GeForce RTX 4090", 23.64, "rtx-4090"),
    ("NVIDIA GeForce RTX 5090", 31.36, "rtx-5090"),
    ("NVIDIA RTX 6000 Ada Generation", 47.5, "rtx-6000-ada"),
    ("NVIDIA L4", 22.17, "l4"),
    ("NVIDIA L40S", 44.53, "l40s"),
    ("NVIDIA A10G", 22.2, "a10g"),
    ("Tesla T4", 14.76, "t4"),
    ("Tesla V100-SXM2-16GB", 15.78, "v100-16"),
    ("Tesla V100-SXM2-32GB", 31.75, "v100-32"),
    ("Tesla V100-PCIE-16GB", 15.78, "v100-16-pcie"),
    ("AMD Instinct MI250X", 63.98, "mi250x"),
    ("AMD Instinct MI300X", 191.69, "mi300x"),
    ("AMD Instinct MI300X OAM", 191.98, "mi300x"),
]
STRANGERS = [
    (
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        39.4,
    ),  # as much memory as an A100 of 40 GB, half the chip
    ("NVIDIA A100-SXM-64GB", 63.4),  # made for one supercomputer
    ("NVIDIA GeForce RTX 4090", 47.4),  # rebuilt with twice the memory
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7),
    ("NVIDIA GeForce RTX 3090 Ti", 23.7),
    ("NVIDIA GB200", 184.0),
    ("NVIDIA A100-SXM4", None),  # of 40 or 80 GB: nobody said
    ("Test GPU 0", 10.0),
]


def bench_file(folder, name, **document):
    path = folder / f"device-{name}.json"
    path.write_text(json.dumps(document))
    return path


def test_every_accelerator_that_was_asked_for_is_there():
    assert set(ASKED_FOR) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_complete_and_plausible(name):
    """Bounds that catch a wrong unit (TB, Gb, both directions) or a rate with sparsity."""
    known = find(name)
    assert known.name == name
    assert known.sources
    assert all(source.startswith("https://") for source in known.sources)
    assert known.vendor in ("nvidia", "amd")
    rates = known.matrix_tflops
    assert rates["fp32"] < rates["fp16"]
    assert ("bf16" in rates) != name.startswith(("v100", "t4"))
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    assert 5 < rates["fp32"] < 200
    assert 12 < known.memory_gib < 300
    assert 250 < known.memory_gb_per_s < 10_000
    # operations per byte of memory: without sparsity none of them reaches 450
    assert 50 < 1e3 * rates["fp16"] / known.memory_gb_per_s < 450
    # in one clock a unit does at most 8,192 operations, dense; no clock is above 2.6 GHz
    assert rates["fp16"] * 1e12 / known.units < 8192 * 2.6e9
    assert 32 <= known.units <= 320
    assert known.host_gb_per_s in (15.8, 31.5, 63, 36, 450)
    assert known.network_gb_per_s <= 50
    assert known.per_node in (1, 4, 8)
    if known.link == "pcie":
        assert known.link_gb_per_s == known.host_gb_per_s
    else:
        assert known.link == ("nvlink" if known.vendor == "nvidia" else "xgmi")
        assert 150 <= known.link_gb_per_s <= 900


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        *[("a100", 312), ("h100", 989), ("h100-pcie", 756), ("h100-nvl", 835), ("h200", 989)],
        *[("b200", 2250), ("l4", 121), ("l40s", 362), ("3090", 71), ("4090", 165), ("5090", 209)],
        *[("mi250x", 191), ("mi300x", 1307)],
    ],
)
def test_rates_are_dense(name, tflops):
    """The sheets' headline figures count sparsity: 1,979 for an H100 is twice the truth."""
    assert find(name).matrix_tflops["bf16"] == pytest.approx(tflops, abs=1)


@pytest.mark.parametrize(("alias", "name"), DOCUMENT["aliases"].items())
def test_aliases_resolve(alias, name):
    assert find(alias).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100 SXM", "h100-sxm"),
        ("A100", "a100-80"),
        ("a100-40gb", "a100-40"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("nvidia-h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("Instinct MI300X", "mi300x"),
    ],
)
def test_spellings_of_one_name(spelling, name, tmp_path):
    assert find(spelling, tmp_path).name == name


def test_an_unknown_name_is_answered_with_the_nearest_and_what_to_do(tmp_path):
    with pytest.raises(RecipeError) as caught:
        find("h100-sxmm", tmp_path)
    words = str(caught.value)
    assert "'h100-sxmm'" in words
    assert "nearest are h100-sxm and " in words
    assert "muster plan --gpu list" in words
    assert "muster bench device" in words


@pytest.mark.parametrize(("device", "memory", "name"), DRIVER_NAMES)
def test_drivers_names_are_recognised(device, memory, name):
    assert recognise(device, memory).name == name


@pytest.mark.parametrize(("device", "memory"), STRANGERS)
def test_what_only_looks_like_a_known_one_is_not_recognised(device, memory):
    assert recognise(device, memory) is None


def test_measured_figures_override_and_stay_away_where_there_are_none(tmp_path):
    assert own(find("h200"), tmp_path).measured == {}
    bench_file(tmp_path, "h200", measured={"bf16_tflops": 760.5, "launch_us": 4})
    assert own(find("h200"), tmp_path).measured == {"bf16_tflops": 760.5, "launch_us": 4.0}
    assert own(find("h100"), tmp_path).measured == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", "cannot be read as JSON"),
        ("[]", "measured is None"),
        ('{"measured": 3}', "measured is 3"),
        ('{"measured": {"bf16_tflops": "fast"}}', "measured.bf16_tflops is 'fast'"),
        ('{"measured": {"bf16_tflops": true}}', "measured.bf16_tflops is True"),
        ('{"measured": {"launch_us": -1}}', "measured.launch_us is -1"),
        ('{"measured": {"launch_us": NaN}}', "measured.launch_us is nan"),
        ('{"measured": {"speed": 1}}', "measured.speed is no known figure"),
    ],
)
def test_a_broken_measurement_is_named_with_its_key(tmp_path, text, words):
    path = tmp_path / "device-h200.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        own(find("h200"), tmp_path)
    assert f"{path}" in str(caught.value)
    assert words in str(caught.value)
    assert "muster bench device" in str(caught.value)


def test_a_device_of_ones_own_is_found_by_its_file(tmp_path):
    mine = find("rtx-3090").as_dict() | {"title": "NVIDIA GeForce RTX 3080", "memory_gib": 9.8}
    measured = {"bf16_tflops": 55.0}
    bench_file(tmp_path, "nvidia-geforce-rtx-3080", accelerator=mine, measured=measured)
    found = find("RTX 3080", tmp_path)
    assert found.name == "nvidia-geforce-rtx-3080"
    assert (found.memory_gib, found.units) == (9.8, 82)
    assert found.measured == measured
    assert "nvidia-geforce-rtx-3080" in catalogue.names(tmp_path)
    with pytest.raises(RecipeError):
        find("RTX 3080", tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_gib": None}, "memory_gib is None"),
        ({"units": "many"}, "units is 'many'"),
        ({"link": "string"}, "link is 'string'"),
        ({"matrix_tflops": {"int4": 3}}, "matrix_tflops is {'int4': 3}"),
        ({"matrix_tflops": {"bf16": "x"}}, "matrix_tflops.bf16 is 'x'"),
    ],
)
def test_a_broken_device_of_ones_own_is_named_with_its_key(tmp_path, change, words):
    mine = find("rtx-3090").as_dict() | change
    path = bench_file(tmp_path, "mine", accelerator=mine, measured={})
    with pytest.raises(DataError) as caught:
        find("mine", tmp_path)
    assert f"{path}: mine.{words}" in str(caught.value)


def test_a_missing_field_is_named(tmp_path):
    mine = find("rtx-3090").as_dict()
    del mine["per_node"]
    bench_file(tmp_path, "mine", accelerator=mine, measured={})
    with pytest.raises(DataError, match="per_node is missing"):
        find("mine", tmp_path)


def test_all_names_can_be_found(tmp_path):
    assert catalogue.names(tmp_path) == [*NAMES, "cpu"]
    for name in catalogue.names(tmp_path):
        assert find(name, tmp_path).name == name


def test_ranks_share_the_processor():
    alone, four = catalogue.cpu(1), catalogue.cpu(4)
    assert four.per_node == 4
    assert four.memory_gib == pytest.approx(alone.memory_gib / 4)
    assert four.memory_gb_per_s == pytest.approx(alone.memory_gb_per_s / 4)
    assert four.matrix_tflops["fp32"] == pytest.approx(alone.matrix_tflops["fp32"] / 4)
    assert alone.units == cpus.find(Path("/")).usable


def test_ranks_share_what_was_measured_of_the_processor(tmp_path):
    measured = {"fp32_tflops": 0.4, "memory_gb_per_s": 20, "launch_us": 5, "link_gb_per_s": 2}
    bench_file(tmp_path, "cpu", measured=measured)
    assert own(catalogue.cpu(4), tmp_path).measured == {
        "fp32_tflops": 0.1,
        "memory_gb_per_s": 5.0,
        "launch_us": 5.0,
        "link_gb_per_s": 2.0,
    }


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 3 * 2**30},
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/memory.max": 3 * 2**30,
        },
        {
            "proc/self/cgroup": "4:memory:/job",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 3 * 2**30,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        },
    ],
)
def test_a_cgroup_limits_the_hosts_memory(tmp_path, files, monkeypatch):
    total = psutil.virtual_memory()._replace(total=64 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: total)
    assert catalogue.cpu(2, write(tmp_path / "none")).memory_gib == 32
    assert catalogue.cpu(2, write(tmp_path / "some", **files)).memory_gib == 1.5
