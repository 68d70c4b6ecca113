"""The manual as a site: it builds without a warning, so every link and anchor leads somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import muster
import processes

pytestmark = pytest.mark.full  # CI builds it as well
ROOT = Path(__file__).resolve().parents[1]
for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason="the manual is built with the extra `docs`")


def build(source: Path, into: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    settings = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(source / "docs")]
    command = [sys.executable, "-m", "sphinx", *settings, str(source), str(into)]
    return processes.run(command, source, code=code)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(ROOT, folder)
    return folder


def test_the_pages_are_found_by_index_and_search(site):
    assert (site / "index.html").read_text() == (site / "README.html").read_text()
    index = (site / "searchindex.js").read_text()
    assert re.search(r'"nccl":\[\d+', index)  # the word and its pages
    assert (site / "search.html").is_file()


def test_the_reference_has_every_public_name_and_what_its_docstring_says(site):
    page = (site / "docs" / "api.html").read_text()
    assert [name for name in muster.__all__ if f'id="muster.{name}"' not in page] == []
    assert "return it at once" in page  # of train
    assert 'id="muster.Run.stop"' in page


def test_the_pages_load_nothing_from_elsewhere(site):
    loading = re.compile(r"<(?:script|img|iframe|link|source)\b[^>]*(?:src|href)=\"(?:https?:)?//")
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 30
    text = {page: page.read_text() for page in pages}
    assert [page.name for page, words in text.items() if loading.search(words)] == []
    assert [
        page.name for page, words in text.items() if re.search(r"url\(.?(https?:)?//", words)
    ] == []


def test_links_that_lead_nowhere_fail_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    settings = (ROOT / "docs" / "conf.py").read_text()
    pages = '\nNAVIGATION = {"Start": ["/docs/training", "/docs/launch"]}\n'
    (tmp_path / "docs" / "conf.py").write_text(settings + pages)
    (tmp_path / "README.md").write_text("# muster\n")
    (tmp_path / "docs" / "training.md").write_text("# Training\n\n## A step\n")
    launch = tmp_path / "docs" / "launch.md"
    launch.write_text("# Launch\n\n[a step](training.md#a-step), [settings](conf.py)\n")
    build(tmp_path, tmp_path / "site")
    launch.write_text("# Launch\n\n[a](gone.md), [b](training.md#gone), ![c](gone.png)\n")
    warnings = build(tmp_path, tmp_path / "site", code=1).stderr
    assert "cross-reference target not found: 'gone.md'" in warnings
    assert "local id not found in doc 'docs/training': 'gone'" in warnings
    assert "image file not readable: docs/gone.png" in warnings
