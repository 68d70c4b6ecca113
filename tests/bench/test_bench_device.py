"""`muster bench device`, for real on this machine's processor."""

from __future__ import annotations

import json
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from muster.bench import device as bench_device
from muster.bench.device import Timer, bench
from muster.errors import LaunchError
from muster.hardware import catalogue
from muster.writing import write_json
from processes import muster

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU")


@pytest.mark.serial
def test_the_median_is_of_one_call_however_many_make_a_sample():
    """A nap of 2 ms is timed several to a sample of 20; naps take longer than they should where the
    machine is busy, and are measured one by one too."""

    def one_by_one() -> float:
        took = []
        for _ in range(50):
            began = time.perf_counter()
            time.sleep(0.002)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    before = one_by_one()
    calls = iter(range(10**6))
    timer = Timer(CPU)
    took = timer.median("nap", lambda: (next(calls), time.sleep(0.002)), 0.3)
    assert 0.002 <= took < 2 * max(before, one_by_one())
    assert timer.samples["nap"] >= bench_device.REPEATS
    assert next(calls) >= 4 * timer.samples["nap"]


def test_short_budgets_still_take_enough_samples():
    timer = Timer(CPU)
    timer.median("nap", lambda: time.sleep(0.01), 0.001)
    assert timer.samples["nap"] == bench_device.REPEATS


def test_rates_are_counted_as_defined(monkeypatch):
    """With a clock that says one call takes a millisecond: 2·n³ operations, bytes read and written."""
    sizes = []

    def one_millisecond(self, figure, work, seconds):
        work()
        sizes.append(figure)
        return 1e-3

    monkeypatch.setattr(Timer, "median", one_millisecond)
    monkeypatch.setitem(bench_device.SIDES, "cpu", (64, 128))
    tflops, side = bench_device.matrix_tflops(Timer(CPU), "fp32", 100.0)
    assert (tflops, side) == (pytest.approx(2 * 128**3 / 1e-3 / 1e12), 128)
    assert sizes == ["fp32_tflops_64", "fp32_tflops_128"]
    monkeypatch.setattr(bench_device, "free_bytes", lambda device: 8 * 10**6)
    assert bench_device.memory_gb_per_s(Timer(CPU), 1.0) == pytest.approx(2.0)  # 2 × 1 MB
    assert bench_device.launch_us(Timer(CPU), 1.0) == pytest.approx(1000)


def test_the_copy_is_larger_than_the_caches(monkeypatch):
    copied = []
    monkeypatch.setattr(bench_device, "last_cache_bytes", lambda: 10**8)
    monkeypatch.setattr(
        Timer, "median", lambda self, figure, work, seconds: copied.append(work()) or 1.0
    )
    bench_device.memory_gb_per_s(Timer(CPU), 1.0)
    assert copied[0].nbytes == 4 * 10**8
    assert copied[0].min() == 1


@on_cpu
def test_a_real_measurement_is_kept_and_used_by_the_catalogue(tmp_path):
    threads = torch.get_num_threads()
    document, path = bench(tmp_path / "some" / "folder", 1.0)
    assert torch.get_num_threads() == threads
    assert path == tmp_path / "some/folder/device-cpu.json"
    assert json.loads(path.read_text()) == document
    assert [p.name for p in path.parent.iterdir()] == ["device-cpu.json"]
    figures = document["measured"]
    assert set(figures) == {"bf16_tflops", "fp32_tflops", "memory_gb_per_s", "launch_us"}
    cores = catalogue.cpu(1).units
    assert 1e-4 < figures["fp32_tflops"] < 0.5 * cores
    assert 0.1 < figures["memory_gb_per_s"] < 2000
    assert 0.1 < figures["launch_us"] < 1000
    assert document["torch"] == torch.__version__
    method = document["method"]
    assert (method["statistic"], method["warm_up_calls"]) == ("median", bench_device.WARM_UP)
    assert min(method["samples"].values()) >= bench_device.REPEATS
    assert 1 <= document["threads"] <= cores
    found = catalogue.own(catalogue.cpu(2), path.parent)
    assert found.measured["fp32_tflops"] == pytest.approx(figures["fp32_tflops"] / 2)
    assert found.measured["launch_us"] == figures["launch_us"]


@on_cpu
def test_a_product_as_fast_as_plain_torch():
    """Against a bare loop: neither a tenth of it nor ten times."""
    rate, side = bench_device.matrix_tflops(Timer(CPU), "fp32", 1.0)
    a = torch.randn(side, side)
    took = []
    for _ in range(20):
        began = time.perf_counter()
        a @ a
        took.append(time.perf_counter() - began)
    plain = 2 * side**3 / sorted(took)[10] / 1e12
    assert plain / 10 < rate < plain * 10


def test_a_gpu_that_nobody_knows_is_found_again_by_its_file(tmp_path, monkeypatch):
    """CUDA's answers stand in for a GPU; what was measured stands in for its peaks."""
    gpu = SimpleNamespace(total_memory=11 * 2**30, multi_processor_count=68, major=7, minor=5)
    answers = {
        "get_device_name": lambda device: "NVIDIA GeForce RTX 2080 Ti",
        "get_device_properties": lambda device: gpu,
        "is_bf16_supported": lambda including_emulation: False,
        "device_count": lambda: 3,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    measured = {
        **{"fp16_tflops": 50.0, "fp32_tflops": 12.0, "memory_gb_per_s": 520.0},
        **{"host_gb_per_s": 12.0, "launch_us": 5.0},
    }
    cuda = torch.device("cuda", 0)
    assert bench_device.known_as(cuda) is None
    stranger = bench_device.unknown(cuda, measured)
    assert stranger.name == "nvidia-geforce-rtx-2080-ti"
    document = {"accelerator": stranger.as_dict(), "measured": measured}
    write_json(catalogue.file_of(stranger.name, tmp_path), document)
    found = catalogue.find("2080 ti", tmp_path)
    assert found.matrix_tflops == {"fp16": 50.0, "fp32": 12.0}
    assert (found.memory_gib, found.units, found.per_node) == (11.0, 68, 3)
    assert (found.host_gb_per_s, found.memory_gb_per_s) == (12.0, 520.0)
    assert found.measured == measured


@pytest.mark.gpu
@pytest.mark.serial
def test_a_gpu_reaches_a_share_of_its_peaks_and_never_more(tmp_path):
    document, path = bench(tmp_path, 5.0)
    assert path.exists()
    assert {"host_gb_per_s", "launch_us", "fp32_tflops"} <= set(document["measured"])
    assert set(document["copies"]) == {"host_to_device_gb_per_s", "device_to_host_gb_per_s"}
    for key, peak in document["peaks"].items():
        assert 0.1 < document["measured"][key] / peak < 1.05, key
    assert catalogue.find(document["name"], tmp_path).name == document["name"]


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench_device, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(LaunchError, match="--dir"):
        bench(tmp_path / "file" / "folder", 1.0)


@pytest.mark.guides
@on_cpu
def test_the_command_prints_a_table_or_json_and_keeps_the_file(tmp_path):
    done = muster("bench", "device", "--seconds", "1", folder=tmp_path)
    for words in ("matrix product, fp32", "TFLOP/s", "GB/s", "µs", "runs/bench/device-cpu.json"):
        assert words in done.stdout
    kept = json.loads((tmp_path / "runs/bench/device-cpu.json").read_text())
    assert kept["name"] == "cpu"
    words = ["--seconds", "1", "--dir", "here", "--json"]
    done = muster("bench", "device", *words, folder=tmp_path)
    assert json.loads(done.stdout) == json.loads((tmp_path / "here/device-cpu.json").read_text())


def test_the_table_sets_the_peak_beside_the_figure(capsys):
    from muster.cli.bench.device import _show

    document = {
        "title": "NVIDIA H200",
        "torch": "2.13",
        "measured": {"bf16_tflops": 791.5, "host_gb_per_s": 50.4, "launch_us": 4.2},
        "copies": {"host_to_device_gb_per_s": 56.7, "device_to_host_gb_per_s": 50.4},
        "peaks": bench_device.peaks(catalogue.find("h200")),
    }
    _show(document, catalogue.file_of("h200"))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert rows["matrix product, bf16"] == ["792 TFLOP/s", "989.4", "80%"]
    assert rows["host to device"] == ["56.7 GB/s", "63", "90%"]
    assert rows["starting a kernel"] == ["4.2 µs", "–", "–"]
