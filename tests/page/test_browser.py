"""The page and the report as a person sees them, in a real browser."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from muster import run_directory
from muster.observe.results import AUDIO_FOLDER
from muster.page import report
from page import synthetic
from page.browser import Browser, chromium, missing
from processes import muster, python_path, until

for needed in ("selenium", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason="pip install 'muster-train[page,dev]'")
pytestmark = [pytest.mark.guides, pytest.mark.skipif(bool(missing()), reason=missing())]

TOKEN = "a-token-of-the-test"
NASTY = '<img src="x" onerror="window.harmed = true">'
PAINT_MS = 2000
NAMED_WITHIN_S = 10
SLOW_RANK = 2
SLEEPING = """
import os
if os.environ.get("RANK") == "{rank}":
    import time
    import torch
    real = torch.nn.Module.__call__
    def forward(self, *args, **kwargs):
        if type(self).__name__ == "{model}" and os.path.exists({file!r}):
            time.sleep(0.3)
        return real(self, *args, **kwargs)
    torch.nn.Module.__call__ = forward
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_in_the_console(browser) -> Iterator[None]:
    browser.errors()
    browser.requests()
    yield
    assert browser.errors() == []


class Site:
    def __init__(self, root: Path) -> None:
        from muster.page.live import LiveRuns
        from muster.page.server import listen, make_app, make_server

        self.root = root
        listening = listen(None)
        listening.listen()
        self.host = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.server = make_server(make_app(LiveRuns(root), TOKEN))
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()

    def at(self, view: str = "#/", token: str = TOKEN) -> str:
        return f"{self.host}/{token}/{view}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    """Two finished runs with other learning rates, one of 64 ranks that was stopped, one that failed with nasty words."""
    root = tmp_path_factory.mktemp("runs")
    synthetic.write(root / "first", ranks=4, steps=120, state="finished", lr=1e-3)
    synthetic.write(root / "second", ranks=4, steps=120, state="finished", lr=5e-4, seed=1)
    synthetic.write(root / "wide", ranks=64, steps=400, slow=3, state="stopped")
    add_audio(root / "first")
    failed = synthetic.write(root / "broken", ranks=2, steps=10, state="failed")
    info = json.loads((failed / "run.json").read_text())
    info["failure"] = {"what": f"rank 1 said {NASTY}", "rank": 1, "time": info["ended"]}
    (failed / "run.json").write_text(json.dumps(info))
    opened = Site(root)
    yield opened
    opened.close()


def add_audio(run: Path) -> None:
    """A second of a tone for the worst mistake."""
    import soundfile

    (run / AUDIO_FOLDER).mkdir()
    tone = np.sin(np.arange(16000) * 0.17).astype("float32")
    soundfile.write(run / AUDIO_FOLDER / "17.flac", tone, 16000)


def wait(browser: Browser, selector: str, words: str = "", limit: float = 15.0) -> None:
    until(lambda: browser.count(selector) and words in browser.text(selector), limit)


def test_the_list_is_filtered_sorted_and_two_runs_are_overlaid(browser, site):
    browser.open(site.at())
    wait(browser, ".runs tbody tr")
    assert browser.count(".runs td[data-title=Run]") == 4
    browser.run(
        "const f = document.querySelector('input[type=search]');"
        "f.value = 'finished'; f.dispatchEvent(new Event('input'))"
    )
    assert browser.count(".runs td[data-title=Run]") == 2
    browser.click('[data-key="sort-Run"]')
    assert browser.text(".runs td[data-title=Run]") == "first"
    browser.click('[data-key="sort-Run"]')
    assert browser.text(".runs td[data-title=Run]") == "second"
    for name in ("first", "second"):
        browser.click(f'[data-key="pick-{name}"]')
    browser.click(".controls a.button")
    wait(browser, "[data-chart=loss] svg .line-1 .curve")
    paths = browser.run(
        "return [...document.querySelectorAll('[data-chart=loss] .curve')].map(p => p.getAttribute('d'))"
    )
    assert len(set(paths)) == 2
    assert all(path.count("L") > 50 for path in paths)
    assert "training.lr" in browser.text("#recipe")
    assert "0.0005" in browser.text("#recipe")


def test_words_of_a_run_never_become_markup(browser, site):
    browser.open(site.at("#/run/broken"))
    wait(browser, ".head .words", NASTY)
    assert browser.run("return window.harmed") is None


def test_the_keyboard_reads_and_zooms_curves_and_heat_maps(browser, site):
    browser.open(site.at("#/run/wide"))
    wait(browser, "[data-chart=loss] svg .curve")
    browser.run("document.querySelector('[data-chart=loss] svg').focus()")
    browser.press("\ue011")  # Home
    assert browser.text("[data-chart=loss] .at") == "step 1"
    browser.press("\ue014")  # to the right
    assert browser.text("[data-chart=grad_norm] .at") == "step 2"
    before = browser.run(
        "return document.querySelector('[data-chart=loss] .curve').getAttribute('d')"
    )
    browser.press("+")
    zoomed = "return document.querySelector('[data-chart=loss] .curve').getAttribute('d')"
    assert browser.run(zoomed) != before
    browser.press("\ue00c")  # Escape
    assert browser.run(zoomed) == before
    browser.run("document.querySelector('.heat canvas').focus()")
    browser.press("\ue015", "\ue015", "\ue015")  # down
    assert "Rank 3, step" in browser.text(".heat > .readout")


def test_dragging_zooms_all_charts(browser, site):
    from selenium.webdriver import ActionChains

    browser.open(site.at("#/run/first"))
    wait(browser, "[data-chart=loss] svg .curve")
    browser.run("document.querySelector('[data-chart=loss]').scrollIntoView({block: 'center'})")
    chart = browser.driver.find_element("css selector", "[data-chart=loss] svg")
    steps = ActionChains(browser.driver).move_to_element_with_offset(chart, 0, 0)
    steps.click_and_hold().move_by_offset(60, 0).release().perform()
    assert "Show the whole run" in browser.text("#curves .controls")
    low, high = browser.run("return view.curves.group.domain")
    assert 50 < low < 70 < high < 110


def test_the_audio_of_a_mistake_plays(browser, site):
    browser.open(site.at("#/run/first"))
    wait(browser, ".mistakes audio")
    browser.run("document.querySelector('.player button').focus()")
    browser.press(" ")
    played = (
        "const a = document.querySelector('.mistakes audio'); return [a.currentTime, a.duration]"
    )
    until(lambda: browser.run(played)[0] > 0.1, 10)
    assert browser.run(played)[1] == pytest.approx(1.0, abs=0.01)
    assert browser.text(".mistake .diff .sub s") == "five"


def test_a_wrong_token_gets_403(browser, site):
    browser.open(site.at("", token="guess"))
    status = "return performance.getEntriesByType('navigation')[0].responseStatus"
    assert browser.run(status) == 403
    assert any("403" in message for message in browser.errors())


@pytest.mark.parametrize("view", ["#/", "#/run/first", "#/run/wide", "#/compare/first/second"])
def test_nothing_is_wider_than_a_phone(browser, site, view):
    browser.size(390, 844)
    try:
        browser.open(site.at(view))
        wait(browser, "main h1")
        assert browser.run("return document.documentElement.scrollWidth") == 390
    finally:
        browser.size(1280, 900)


def test_a_phone_scrolls_wide_tables_shows_that_and_breaks_no_key_in_a_word(browser, site):
    browser.size(390, 844)
    try:
        browser.open(site.at("#/run/first"))
        wait(browser, "#ranks table")
        wait(browser, ".recipe .key-name")
        inside, outside, overflow, shadows = browser.run(
            "const box = document.querySelector('#ranks .scroll'), style = getComputedStyle(box);"
            "return [box.scrollWidth, box.clientWidth, style.overflowX, style.backgroundAttachment]"
        )
        assert inside > outside
        assert overflow == "auto"
        assert shadows == "local, local, scroll, scroll"
        browser.size(240, 844)
        words = browser.run(
            "return [...document.querySelectorAll('.key-name')].flatMap((key) => "
            "[...key.childNodes].filter((node) => node.nodeType === 3).map((node) => {"
            "const range = document.createRange(); range.selectNode(node);"
            "return [node.data, new Set([...range.getClientRects()].map((r) => r.top)).size]}))"
        )
        assert len(words) > 50
        assert [word for word, lines in words if lines > 1] == []
    finally:
        browser.size(1280, 900)


def test_light_and_dark_follow_the_system_and_the_switch(browser, site):
    colour = "return getComputedStyle(document.documentElement).backgroundColor"
    browser.open(site.at())
    seen = {}
    for name in ("dark", "light"):
        browser.scheme(name)
        seen[name] = browser.run(colour)
    assert seen["dark"] != seen["light"]
    browser.click("#theme")  # as the system, light, dark
    browser.click("#theme")
    assert browser.run(colour) == seen["dark"]
    browser.click("#theme")


def measure_paint(browser: Browser, address: str, ranks: int) -> dict[str, float]:
    browser.open(address)
    wait(browser, ".heat canvas", limit=60)
    assert browser.run("return document.querySelector('.heat canvas').height") == ranks
    return browser.run(
        "const paint = performance.getEntriesByName('first-contentful-paint')[0];"
        "return {first: paint.startTime, drawn: performance.getEntriesByName('drawn')[0].startTime}"
    )


def quickest(browser: Browser, address: str, ranks: int) -> dict[str, float]:
    """Of up to five loads: another program on this machine delays one or two."""
    loads = []
    for _ in range(5):
        loads.append(measure_paint(browser, address, ranks))
        if max(loads[-1].values()) < PAINT_MS:
            break
    return min(loads, key=lambda taken: max(taken.values()))


def test_64_ranks_are_drawn_within_two_seconds(browser, site):
    taken = quickest(browser, site.at("#/run/wide"), 64)
    assert max(taken.values()) < PAINT_MS
    assert browser.text(".labels .mark.slow") == "▲ 3"
    assert "Rank 3" in browser.text(".findings")


@pytest.mark.full
def test_64_ranks_and_100000_steps_are_drawn_within_two_seconds(browser, tmp_path):
    synthetic.write(tmp_path / "long", ranks=64, steps=100_000, slow=3)
    opened = Site(tmp_path)
    try:
        measure_paint(browser, opened.at("#/run/long"), 64)  # the server reads a gigabyte once
        taken = quickest(browser, opened.at("#/run/long"), 64)
        assert max(taken.values()) < PAINT_MS
    finally:
        browser.open("about:blank")  # which ends its stream
        opened.close()


def test_a_report_from_a_file_shows_everything_without_a_network(browser, site, tmp_path):
    report.write([site.root / "first"], tmp_path / "report.html")
    browser.offline(True)
    try:
        browser.open((tmp_path / "report.html").as_uri())
        wait(browser, "[data-chart=loss] svg .curve")
        assert browser.text("h1").startswith("first")
        for part in ("curves", "ranks", "planned", "examples", "told"):
            assert len(browser.text(f"#{part} .body")) > 20, part
        assert browser.run("return document.querySelector('.heat canvas').width") > 50
        browser.run("document.querySelector('.mistakes audio').play()")
        until(lambda: browser.run("return document.querySelector('audio').currentTime > 0.1"), 10)
    finally:
        browser.offline(False)
    assert [a for a in browser.requests() if not a.startswith(("file:", "data:", "about:"))] == []


def test_a_report_of_several_runs_compares_them(browser, site, tmp_path):
    runs = [site.root / name for name in ("first", "second")]
    report.write(runs, tmp_path / "both.html")
    browser.open((tmp_path / "both.html").as_uri())
    wait(browser, "[data-chart=loss] svg .line-1 .curve")
    assert "training.lr" in browser.text("#recipe")
    browser.click(".compared a")
    wait(browser, "h1", "first")


def test_a_page_says_when_its_run_and_when_its_server_is_gone(browser, tmp_path):
    synthetic.write(tmp_path / "going", ranks=1, steps=10)
    opened = Site(tmp_path)
    try:
        browser.open(opened.at("#/run/going"))
        wait(browser, "#live.live")
        shutil.rmtree(tmp_path / "going")
        wait(browser, "#live.gone", "folder is gone")
        assert browser.text("h1").startswith("going")
        browser.open(opened.at())
        wait(browser, "#live.live")
    finally:
        opened.close()
    wait(browser, "#live.lost", "server")
    browser.open("about:blank")
    browser.errors()  # connections that were refused


@pytest.fixture(scope="module")
def live(recipe, tmp_path_factory) -> Iterator[tuple[Site, Path]]:
    """Four ranks that train until they are stopped; once there is a file `sleep`, one of them sleeps in
    every forward pass."""
    folder = tmp_path_factory.mktemp("live")
    sleep = folder / "sleep"
    words = SLEEPING.format(rank=SLOW_RANK, model="Decoder", file=str(sleep))
    (folder / "sitecustomize.py").write_text(words)
    endless = ["training.steps=100000", "checkpoint.every_steps=100000", "--run", "live"]
    muster(
        "train", recipe, *endless, "--gpus", "4", "--detach", folder=folder, env=python_path(folder)
    )
    opened = Site(folder / "runs")
    try:
        yield opened, sleep
    finally:
        run_directory.stop(run_directory.find("live", folder / "runs"), 0.0, now=True)
        opened.close()


def test_a_running_page_updates_and_names_the_slow_rank_within_ten_seconds(browser, live):
    opened, sleep = live
    run = run_directory.find("live", opened.root)
    until(lambda: run.last_metrics().get("step", 0) > 20)
    browser.open(opened.at("#/run/live"))
    browser.run("window.sameDocument = true")
    wait(browser, ".figures")
    step = "return Number(document.querySelector('.figures dd').innerText.replace(/\\D/g, ''))"
    first = browser.run(step)
    until(lambda: browser.run(step) > first, 10)
    points = "return document.querySelector('[data-chart=loss] .curve').getAttribute('d').length"
    drawn = browser.run(points)
    until(lambda: browser.run(points) != drawn, 10)
    assert f"Rank {SLOW_RANK}" not in browser.text(".findings")
    sleep.touch()
    began = time.monotonic()
    until(lambda: f"Rank {SLOW_RANK} " in browser.text(".findings"), 60)
    taken = time.monotonic() - began
    assert taken < NAMED_WITHIN_S
    assert browser.count(f"tr.slow[data-key=rank-{SLOW_RANK}]") == 1
    assert browser.run("return window.sameDocument") is True
