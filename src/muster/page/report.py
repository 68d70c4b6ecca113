"""report.html: the page of one or several runs as one file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from muster.errors import MusterError
from muster.page.build import REMEDY, read_document
from muster.page.compare import compare_runs
from muster.page.document import Document
from muster.page.examples import open_audio
from muster.page.read import RunFacts
from muster.reading.libraries import refused
from muster.run_directory import ENDED, Run
from muster.writing import make_folder
from muster.writing import write as write_file

log = logging.getLogger(__name__)

REPORT = "report.html"
MAX_RUNS = 4  # lines in a chart that can still be told apart
AUDIO_BYTES = 3 * 2**20  # of all recordings in a report: it must fit into a mail
STYLE = re.compile(r'<link rel="stylesheet" href="assets/([\w.]+)">\n')
SCRIPT = re.compile(r'<script defer src="assets/([\w.]+)"></script>\n')
ICON = 'href="assets/icon.svg"'


def write(runs: Sequence[Path], file: Path) -> None:
    """Atomically. Several runs are compared with the first."""
    if len(runs) > MAX_RUNS:
        raise MusterError(
            f"a report shows {MAX_RUNS} runs at most, not {len(runs)}: leave some out"
        )
    documents = [read_document(path) for path in runs]
    content = {
        "runs": documents,
        "comparisons": [compare_runs(runs[0], other) for other in runs[1:]],
        "audio": recordings(runs, documents),
    }
    try:
        with refused(", ".join(map(str, runs)), REMEDY):
            page = render(content)
        write_file(make_folder(file.parent) / file.name, page)
    except OSError as error:
        raise MusterError(f"{file}: the report cannot be written: {error.strerror}") from None


def write_at_end(run: Run) -> None:
    """When a run has ended, in whichever way, unless `logging.report` is off. It never fails a run."""
    try:
        facts = RunFacts(run.path)
        facts.refresh()
        if facts.state in ENDED and facts.recipe.get("logging", {}).get("report", True):
            write([run.path], run.path / REPORT)
    except Exception as error:
        log.warning("%s was not written: %s", REPORT, error)


def recordings(runs: Sequence[Path], documents: Sequence[Document]) -> dict[str, dict[str, str]]:
    """Audio of the worst mistakes as data: addresses, by run and id, the worst first, while they fit."""
    left, found = AUDIO_BYTES, dict[str, dict[str, str]]()
    for path, shown in zip(runs, documents, strict=True):
        kept = found.setdefault(shown["run"]["name"], {})
        for mistake in shown["examples"]["mistakes"]:
            audio = open_audio(path, mistake["id"]) if mistake["audio"] else None
            if audio is None:
                continue
            with audio:
                content = audio.read(left + 1)
            if len(content) <= left:
                left -= len(content)
                encoded = base64.b64encode(content).decode()
                kept[mistake["id"]] = f"data:audio/flac;base64,{encoded}"
    return found


def render(content: Mapping[str, Any]) -> str:
    """page.html with its assets and `content` inside. Its security policy allows this script and these
    styles, by their hashes, and no request."""
    page = asset("page.html")
    style = "\n".join(asset(name) for name in STYLE.findall(page))
    script = "\n".join(asset(name) for name in SCRIPT.findall(page))
    page = page.replace(ICON, f'href="data:image/svg+xml;base64,{_base64(asset("icon.svg"))}"')
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    )
    documents = f'<script id="documents" type="application/json">{as_script(content)}</script>\n'
    page = SCRIPT.sub("", STYLE.sub("", page))
    page = page.replace("<title>", head + "<title>", 1)
    return page.replace("</body>", f"{documents}<script>{script}</script>\n</body>", 1)


def asset(name: str) -> str:
    return files("muster.page").joinpath("assets", name).read_text("utf-8")


def as_script(content: object) -> str:
    """JSON that ends no script element and begins no comment in one, whatever words it holds."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
