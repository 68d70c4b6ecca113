"""What the package imports is what installing it brings along."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {  # imported there only, where the recipe asks for it, and named in the error if absent
    "accelerate": {"hf_trainer.py"},
    "deepspeed": {"parallel/deepspeed.py"},
    "pandas": {"api/run.py"},
    "peft": {"models/lora.py"},
    "torchao": {"parallel/float8.py", "parallel/optimizers/adam8bit.py"},
    "triton": {"tasks/cross_entropy_kernels.py"},  # comes with torch for GPUs
    "scikit-learn": {"data/images/source.py", "data/images/files.py", "data/corpus.py"},
    "pillow": {"data/images/source.py", "data/images/files.py"},
}
THROUGH = {"hydra-core": {"omegaconf", "pyyaml"}, "typer": {"click"}}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"muster"}


def test_every_import_is_a_dependency_or_optional_where_it_stands():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[ ]", line)[0].lower() for line in project["dependencies"]}
    names |= {inner for outer in names for inner in THROUGH.get(outer, ())}
    names = {name.replace("_", "-") for name in names}
    owners = packages_distributions()
    strangers = []
    for path in sorted((ROOT / "src" / "muster").rglob("*.py")):
        where = path.relative_to(ROOT / "src" / "muster").as_posix()
        for module in imported(path):
            owner = owners.get(module, [module])[0].lower().replace("_", "-")
            if owner not in names and where not in OPTIONAL.get(owner, ()):
                strangers.append(f"{where}: {module} ({owner})")
    assert not strangers
