"""The page for Prometheus, read as Prometheus does, and the Grafana dashboard that asks for it."""

import json
import re
import socket
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster import run_directory
from muster.errors import RecipeError
from muster.observe import prometheus
from muster.recipe.load import load
from muster.worker.observer import make_observer

pytest.importorskip("prometheus_client", reason="pip install 'muster-train[prometheus]'")
DASHBOARD = Path(__file__).parents[2] / "docs" / "examples" / "grafana-dashboard.json"


@pytest.fixture
def folder(tmp_path):
    """Of a run of four ranks, two on each of two nodes; rank 3 has not begun."""
    run = tmp_path / "small-1"
    (run / "ranks").mkdir(parents=True)
    step = {"step": 7, "epoch": 0, "loss": 2.5, "grad_norm": None, "lr": 1e-3, "step_time_s": 0.5}
    (run / "metrics.jsonl").write_text(
        json.dumps(step | {"loss": 3.0}) + "\n" + json.dumps(step) + "\n"
    )
    times = {"compute_s": 0.25, "comm_wait_s": 0.1, "data_wait_s": 0.05, "step_time_s": 0.5}
    for rank in range(3):
        line = {"step": 7, **times, "memory_gib": 0.5}
        (run / "ranks" / f"{rank}.jsonl").write_text(json.dumps(line) + "\n")
        device = {"utilisation": 0.9, "memory_gib": 2.0, "memory_total_gib": 80.0, "power_w": None}
        beat = {"host": f"node{rank // 2}", "time": time.time() - 3, "device": device}
        (run / "ranks" / f"{rank}.heartbeat.json").write_text(json.dumps(beat))
    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(exporter: prometheus.Exporter) -> dict[tuple, float]:
    """What Prometheus' own parser makes of the page."""
    from prometheus_client.parser import text_string_to_metric_families

    port = free_port()
    exporter.start("127.0.0.1", port)
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
    finally:
        exporter.close()
    families = text_string_to_metric_families(page.decode())
    return {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples}


def test_the_node_of_rank_0_tells_of_the_run_and_its_own_ranks(folder):
    exporter = prometheus.Exporter(folder, range(2), lambda: {"slowest_over_mean": 1.25})
    exporter.scores["validation"] = {"wer": 0.25}
    found = read(exporter)
    run, node = ("run", "small-1"), ("node", "node0")
    assert found["muster_step", run] == 7
    assert found["muster_loss", run] == 2.5
    assert found["muster_balance_slowest_over_mean", run] == 1.25
    assert found["muster_score", run, ("score", "wer"), ("split", "validation")] == 0.25
    assert found["muster_rank_compute_seconds", node, ("rank", "1"), run] == 0.25
    assert found["muster_rank_memory_bytes", node, ("rank", "1"), run] == 2**29
    assert found["muster_device_utilisation", node, ("rank", "0"), run] == 0.9
    assert found["muster_device_memory_total_bytes", node, ("rank", "0"), run] == 80 * 2**30
    assert 2.9 < found["muster_rank_heartbeat_age_seconds", node, ("rank", "0"), run] < 30
    names = {key[0] for key in found}
    assert names & {"muster_grad_norm", "muster_device_power_watts", "muster_mfu"} == set()
    assert {dict(key[1:])["rank"] for key in found if "rank" in dict(key[1:])} == {"0", "1"}


def test_another_node_tells_of_its_ranks_alone(folder):
    found = read(prometheus.Exporter(folder, range(2, 4), lambda: {"slowest_over_mean": 1.25}))
    assert {key[0].split("_")[1] for key in found} == {"rank", "device"}
    assert {dict(key[1:])["rank"] for key in found} == {"2"}


def test_ranks_of_a_node_need_not_follow_each_other(tmp_path, monkeypatch):
    """As srun --distribution=cyclic places them."""
    made = []
    monkeypatch.setattr(prometheus, "serve", lambda exporter, *_: made.append(exporter))
    recipe = load("gpt-micro", ["logging.to=[]", "logging.prometheus=9000"])
    mesh: Any = SimpleNamespace(
        first=False, rank=1, local_rank=0, world=4, gather=lambda own: ["other", own, "other", own]
    )
    make_observer(recipe, mesh, run_directory.create(tmp_path, "x", {}), 0).close()
    assert [list(exporter.ranks) for exporter in made] == [[1, 3]]


def test_before_the_first_step_the_page_is_empty(tmp_path):
    assert read(prometheus.Exporter(tmp_path, range(1), dict)) == {}


def test_a_port_that_is_taken_is_a_warning_that_names_the_key(folder, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        made = prometheus.Exporter(folder, range(1), dict)
        assert prometheus.serve(made, "127.0.0.1", port) is None
    assert f"logging.prometheus: port {port} of 127.0.0.1 cannot be served" in caplog.text
    assert "Address already in use" in caplog.text


def test_a_missing_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(prometheus, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'muster-train\[prometheus\]'"):
        prometheus.refuse_missing()


def test_the_dashboard_asks_for_metrics_that_exist_and_for_most_of_them():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = " ".join(t["expr"] for panel in panels for t in panel.get("targets", []))
    asked = set(re.findall(r"muster_\w+", queries))
    known = {metric.name for metric in prometheus.ALL}
    assert asked - known == set()
    assert known - asked == {"muster_epoch", "muster_step_seconds", "muster_mfu"}


def test_the_manual_names_every_metric():
    page = (DASHBOARD.parents[1] / "trackers.md").read_text()
    assert [metric.name for metric in prometheus.ALL if f"`{metric.name}`" not in page] == []
