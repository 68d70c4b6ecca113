"""The page's server: who may ask, what it answers, and how it follows a run."""

from __future__ import annotations

import errno
import gzip
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.errors import LaunchError
from muster.page import live, read
from muster.page.compare import compare_runs
from page import synthetic
from processes import MUSTER, start

pytest.importorskip("uvicorn", reason="pip install 'muster-train[page]'")
pytest.importorskip("starlette", reason="pip install 'muster-train[page]'")

from muster.page.live import LiveRuns
from muster.page.server import BYTES_PER_S, listen, make_app, make_server

TOKEN = "a-token-of-the-test"


@dataclass
class Server:
    root: Path
    port: int

    def get(
        self, path: str, *, method: str = "GET", token: str = TOKEN, **headers: str
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, f"/{token}{path}", headers=headers)
        return connection.getresponse()

    def json(self, path: str) -> Any:
        answer = self.get(path)
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())

    def events(self, path: str, token: str = TOKEN) -> Iterator[tuple[str, Any]]:
        answer, kind = self.get(path, token=token), ""
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"event: "):
                kind = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield kind, json.loads(line[6:])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("runs")
    listening = listen(None)
    listening.listen()
    serving = make_server(make_app(LiveRuns(root), TOKEN))
    thread = threading.Thread(target=serving.run, args=([listening],))
    thread.start()
    yield Server(root, listening.getsockname()[1])
    serving.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def run(server: Server) -> Path:
    return synthetic.write(server.root / "one", ranks=2, steps=20)


def test_the_list_and_a_run(server: Server, run: Path) -> None:
    listed = server.json("/api/runs")["runs"]
    assert "one" in [line["name"] for line in listed]
    document = server.json("/api/runs/one")
    assert document["run"]["progress"] == {"step": 20, "steps": 40}
    assert len(document["ranks"]["rows"]) == 2
    assert document["version"] > 0


def test_a_document_is_sent_compressed(server: Server, run: Path) -> None:
    answer = server.get("/api/runs/one", **{"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(answer.read()))["run"]["name"] == "one"


@pytest.mark.parametrize("token", ["", "another", TOKEN + "x", TOKEN[:-1], "t%C3%B6ken"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/assets/page.js"])
def test_a_wrong_token_gets_403(server: Server, run: Path, token: str, path: str) -> None:
    answer = server.get(path, token=token)
    assert answer.status == 403
    told = "has a wrong token" if token else "lacks the token"
    words = answer.read().decode()
    assert words.startswith(f"The address {told}. The right address is in the terminal")
    assert "one" not in words


@pytest.mark.parametrize(
    "host", ["example.com", "127.0.0.1.example.com", "localhost.example.com:80", "10.0.0.1", ""]
)
def test_a_name_of_another_host_is_refused(server: Server, run: Path, host: str) -> None:
    assert server.get("/api/runs", Host=host).status == 403


def test_who_names_no_host_is_refused(server: Server, run: Path) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(f"GET /{TOKEN}/api/runs HTTP/1.0\r\n\r\n".encode())
        assert b" 403 " in connection.recv(100)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:80", "[::1]"]
)
def test_a_loopback_name_at_any_port_is_taken(server: Server, run: Path, host: str) -> None:
    assert server.get("/api/runs", Host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(server: Server, run: Path, method: str) -> None:
    assert server.get("/api/runs", method=method).status == 405


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "one%2f..%2fone",
        "latest",
        "%2Ftmp",
        "one%00",
        "nothing",
    ],
)
def test_a_name_is_never_a_path(server: Server, run: Path, name: str) -> None:
    (server.root / "latest").unlink(missing_ok=True)
    (server.root / "latest").symlink_to("one")
    for path in (f"/api/runs/{name}", f"/api/stream?run={name}", f"/api/compare?a={name}&b=one"):
        assert server.get(path).status == 404, path


@pytest.mark.parametrize("clip", ["..%2Frun.json", "17.flac", "18", "17%00", "%D9%A1"])
def test_only_a_clip_of_the_run_is_played(server: Server, run: Path, clip: str) -> None:
    (run / "mistakes").mkdir(exist_ok=True)
    (run / "mistakes" / "17.flac").write_bytes(b"fLaC")
    assert server.get(f"/api/runs/one/audio/{clip}").status == 404
    answer = server.get("/api/runs/one/audio/17")
    assert (answer.status, answer.read()) == (200, b"fLaC")
    assert answer.headers["content-type"] == "audio/flac"


@pytest.mark.parametrize(
    "path", ["/assets/../server.py", "/assets/%2e%2e/server.py", "/assets/..%2fserver.py"]
)
def test_assets_are_only_those_of_the_folder(server: Server, path: str) -> None:
    assert server.get(path).status == 404


def test_nothing_may_be_loaded_from_elsewhere(server: Server, run: Path) -> None:
    for path in ("/", "/api/runs", "/assets/page.js"):
        headers = server.get(path).headers
        policy = headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'self'"
        assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= {*policy}
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def test_it_listens_on_the_loopback_address_only(server: Server) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no other address")
        own = probe.getsockname()[0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own, server.port), timeout=5)


def test_a_port_in_use_is_an_error_that_names_the_option(server: Server) -> None:
    with pytest.raises(LaunchError, match=f"--port {server.port}: .* in use"):
        listen(server.port)


def test_the_stream_sends_only_what_changed_and_says_when_the_run_is_gone(server: Server) -> None:
    path = synthetic.write(server.root / "streamed", ranks=1, steps=10, state="finished")
    seen = server.json("/api/runs/streamed")["version"]
    events = server.events(f"/api/stream?run=streamed&seen={seen}")
    row = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"step": 11, "loss": 77.0}) + "\n")
    kind, update = next(events)
    assert kind == "update"
    assert set(update["sections"]) == {"run", "curves"}
    assert update["sections"]["curves"]["series"]["loss"]["mean"][-1] == 77.0
    shutil.rmtree(path)
    assert next(events)[0] == "gone"
    assert next(events, None) is None


@pytest.mark.full
def test_ctrl_c_ends_the_page_and_its_open_streams_without_an_error(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "run", ranks=1, steps=3)
    serving = start([*MUSTER, "page", "--dir", tmp_path], tmp_path, errors=subprocess.PIPE)
    try:
        assert serving.stdout is not None
        _, _, host, token, _ = serving.stdout.readline().strip().split("/")
        events = Server(tmp_path, int(host.split(":")[1])).events("/api/stream", token)
        assert next(events)[0] == "update"
        serving.send_signal(signal.SIGINT)
        assert all(kind == "update" for kind, _ in events)
        assert serving.communicate(timeout=30)[1] == ""
    finally:
        serving.kill()


def test_the_list_follows_new_runs(server: Server, run: Path) -> None:
    events = server.events("/api/stream")
    assert "late" not in str(next(events))
    synthetic.write(server.root / "late", ranks=1, steps=3)
    kind, update = next(events)
    assert kind == "update"
    assert "late" in [line["name"] for line in update["sections"]["runs"]]


@pytest.mark.full
def test_a_large_part_is_sent_less_often_than_a_small_one(server: Server) -> None:
    path = synthetic.write(server.root / "many", ranks=64, steps=600)
    size = len(json.dumps(server.json("/api/runs/many")["heat"]))
    assert size > 3 * BYTES_PER_S
    events = server.events("/api/stream?run=many")
    assert "heat" in next(events)[1]["sections"]
    file = path / "ranks" / "0.jsonl"
    row = json.loads(file.read_text().splitlines()[-1])
    with file.open("a") as out:
        out.write(json.dumps(row | {"step": 601}) + "\n")
    parts = [set(next(events)[1]["sections"])]
    assert "ranks" in parts[0]
    assert "heat" not in parts[0]
    while "heat" not in parts[-1]:
        parts.append(set(next(events)[1]["sections"]))
    assert len(parts) < 10


def test_two_runs_compared(server: Server, run: Path) -> None:
    synthetic.write(server.root / "other", ranks=2, steps=20, seed=1, lr=2e-3)
    found = server.json("/api/compare?a=one&b=other")
    assert found["recipe"] == [{"key": "training.lr", "a": 1e-3, "b": 2e-3}]
    assert found["data"] == found["environment"] == []
    assert found["first_difference"]["step"] == 1
    same = server.json("/api/compare?a=one&b=one")
    assert same["recipe"] == []
    assert same["first_difference"] is None


def test_what_a_run_is_called_and_where_it_is_makes_no_difference(tmp_path: Path) -> None:
    one, other = (synthetic.write(tmp_path / name, ranks=1, steps=3) for name in ("one", "other"))
    recipe = other / "recipe.yaml"
    text = recipe.read_text()
    assert "name: synthetic\n" in text
    assert "dir: runs\n" in text
    recipe.write_text(text.replace("name: synthetic", "name: x").replace("dir: runs", "dir: y"))
    assert compare_runs(one, other)["recipe"] == []


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    paths = [synthetic.write(tmp_path / name / "run", ranks=1, steps=3) for name in ("a", "b")]
    runs = LiveRuns(tmp_path, paths)
    assert runs.paths() == {"run": paths[0], "run-2": paths[1]}
    os.rename(paths[0], tmp_path / "away")
    assert [line["name"] for line in json.loads(runs.list().texts["runs"])] == ["run-2"]


def test_a_run_whose_storage_fails_leaves_the_others_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        synthetic.write(tmp_path / name, ranks=1, steps=3)
    read_last = read.read_last

    def read_or_fail(path: Path) -> dict[str, Any]:
        if path.parent.name == "one":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_last(path)

    monkeypatch.setattr(read, "read_last", read_or_fail)
    assert [line["name"] for line in json.loads(LiveRuns(tmp_path).list().texts["runs"])] == ["two"]


def test_the_steps_of_only_a_few_runs_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_KEPT", 2)
    for name in ("one", "two", "three"):
        synthetic.write(tmp_path / name, ranks=1, steps=3)
    runs = LiveRuns(tmp_path)
    first, second, _ = (runs.run(name) for name in ("one", "two", "three"))
    assert runs.run("two") is second
    assert runs.run("one") is not first


def test_the_newest_run_is_read_before_someone_asks(tmp_path: Path) -> None:
    LiveRuns(tmp_path).read_newest()
    synthetic.write(tmp_path / "run", ranks=1, steps=10)
    runs = LiveRuns(tmp_path)
    runs.read_newest()
    assert "curves" in runs.run("run").sections.texts
