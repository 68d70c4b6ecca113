"""`muster page`, `muster watch --web` and `muster compare` in the terminal."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muster.cli import app
from muster.errors import MusterError
from muster.page.live import LiveRuns
from page import synthetic


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    synthetic.write(root / "one", ranks=2, steps=20)
    synthetic.write(root / "other", ranks=2, steps=20, seed=1, lr=2e-3)
    return root


def test_compare_names_what_differs(runs: Path) -> None:
    told = CliRunner().invoke(app, ["compare", "one", "other", "--dir", str(runs)]).output
    assert "speed, the median" in told
    assert "training.lr" in told
    assert "data: the same" in told
    assert "environment: the same" in told
    assert "The loss differs first at step 1: " in told
    assert "training.steps" not in told


def test_compare_as_json_is_the_whole_comparison(runs: Path) -> None:
    words = ["compare", "one", "other", "--dir", str(runs), "--json"]
    found = json.loads(CliRunner().invoke(app, words).output)
    assert found["recipe"] == [{"key": "training.lr", "a": 0.001, "b": 0.002}]
    assert len(found["curves"]["b"]["step"]) == 20


def test_compare_writes_a_page_of_both(runs: Path, tmp_path: Path) -> None:
    words = ["compare", "one", "other", "--dir", str(runs), "-o", str(tmp_path / "both.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    page = (tmp_path / "both.html").read_text()
    assert "<script" in page
    assert "other" in page


def test_the_page_without_its_extra_says_what_to_install(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "starlette" else real(name)
    )
    for words in (["page"], ["watch", "one", "--web"]):
        error = CliRunner().invoke(app, [*words, "--dir", str(runs)]).exception
        assert isinstance(error, MusterError)
        assert str(error) == "the page needs starlette: pip install 'muster-train[page]'"


def test_the_page_prints_its_address_and_the_way_there(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pytest.importorskip("muster.page.server")
    given: list[Any] = []

    class Served:
        def run(self, sockets: Any) -> None:
            given.extend(sockets)

    monkeypatch.setattr(server, "make_server", lambda app: Served())
    told = CliRunner().invoke(app, ["page", "one", "--dir", str(runs)]).output
    port = given[0].getsockname()[1]
    given[0].close()
    address, way = told.splitlines()
    assert address.startswith(f"http://127.0.0.1:{port}/")
    assert address.endswith("/#/run/one")
    assert len(address.split("/")[3]) >= 32
    assert f"ssh -L {port}:127.0.0.1:{port} " in way


def test_before_the_first_run_the_page_is_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pytest.importorskip("muster.page.server")
    served: list[Path] = []
    monkeypatch.setattr(server, "serve", lambda root, *rest: served.append(root))
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["page"]).exit_code == 0
    runs = LiveRuns(served[0])
    assert runs.paths() == {}
    synthetic.write(tmp_path / "runs" / "first", ranks=1, steps=3)
    assert list(runs.paths()) == ["first"]


def test_a_named_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["page", "--dir", str(tmp_path / "nothing")]).exception
    assert isinstance(error, MusterError)
    assert str(error) == f"--dir: there is no folder {tmp_path / 'nothing'}"


def test_a_run_that_is_not_there_is_an_error_before_anything_is_served(runs: Path) -> None:
    error = CliRunner().invoke(app, ["page", "nothing", "--dir", str(runs)]).exception
    assert isinstance(error, MusterError)
    assert "no run 'nothing'" in str(error)
