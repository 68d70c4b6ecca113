"""Builds the manual, the README and the pages of systems/ into one searchable site, from the files as they are:

    sphinx-build -W --keep-going -b html -c docs . build/site

The source folder is the repository, so that a link which works on GitHub works on the site: to another page, or
to a file such as a script, which the site then offers as a download.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

NAVIGATION = {
    "Start": [
        "Commands </docs/commands>",
        "Training </docs/training>",
        "Recipes </docs/recipe>",
        "Coming from elsewhere </docs/coming-from>",
    ],
    "Data": ["/docs/data", "/docs/chat"],
    "Models": [
        "Speech </docs/speech>",
        "Whisper </docs/whisper>",
        "/docs/language",
        "/docs/images",
        "/docs/tasks",
        "Optimizers </docs/optimizers>",
    ],
    "Scale": [
        "/docs/strategies",
        "/docs/launch",
        "SLURM </docs/slurm>",
        "Kubernetes </docs/kubernetes>",
        "Planner </docs/planner>",
        "Rehearsal </docs/rehearsal>",
        "/docs/security",
    ],
    "See and measure": [
        "See a run </docs/page>",
        "Trackers </docs/trackers>",
        "Profile </docs/profile>",
        "Speed </docs/speed>",
        "Check </docs/check>",
        "Benchmarks </docs/bench>",
        "Training speed on an H200 </docs/benchmarks/h200>",
        "Time to the first step </docs/benchmarks/startup>",
        "Troubleshooting </docs/troubleshooting>",
    ],
    "From Python": ["Guide </docs/python>", "Reference </docs/api>"],
    "The guides": [
        "LMU speech recognition </systems/lmu-asr/README>",
        "Whisper from parquet </systems/mwc-asr/README>",
        "Language models on all GPUs </systems/multi-gpu/README>",
        "A course on distributed training </systems/distributed-training/README>",
    ],
    "The course": [
        "1 DDP </systems/distributed-training/01-ddp-basics/README>",
        "2 FSDP </systems/distributed-training/02-fsdp/README>",
        "2 FSDP: what is sharded </systems/distributed-training/02-fsdp/sharding_strategies>",
        "3 DeepSpeed </systems/distributed-training/03-deepspeed/README>",
        "4 NCCL </systems/distributed-training/04-nccl-operations/README>",
        "4 NCCL: debugging </systems/distributed-training/04-nccl-operations/nccl_debugging>",
        "5 Advanced </systems/distributed-training/05-advanced/README>",
        "Benchmarks </systems/distributed-training/benchmarks/README>",
    ],
    "Project": ["/CONTRIBUTING", "/CHANGELOG"],
}

project = "muster"
version = release = PROJECT["version"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "systems/**"]
exclude_patterns = [".*", "**/.*", "build", "dist", "runs", "src", "tests", "tools", "benchmarks"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

myst_heading_anchors = 4  # the anchors that GitHub makes
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
default_role = "code"  # docstrings have single backticks

html_theme = "furo"
html_title = f"muster {version}"
html_copy_source = False
html_show_sourcelink = False


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """The first page is the README, which on GitHub has no place for Sphinx's own directives."""
    if docname == root_doc:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Servers and people look for index.html."""
    if exception is None and app.builder.format == "html":
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_index)
