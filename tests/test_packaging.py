"""What installing brings along: every dependency that is imported, and every file of the package and no other."""

from __future__ import annotations

import ast
import email
import re
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import muster
import processes

pytestmark = pytest.mark.guides

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {  # imported there only, where the recipe asks for it, and named in the error if absent
    "accelerate": {"hf_trainer.py"},
    "deepspeed": {"parallel/deepspeed.py"},
    "mlflow-skinny": {"observe/trackers/mlflow.py"},
    "pandas": {"api/run.py"},
    "peft": {"models/lora.py"},
    "prometheus-client": {"observe/prometheus.py"},
    "torchao": {"parallel/float8.py", "parallel/optimizers/adam8bit.py"},
    "trackio": {"observe/trackers/trackio.py"},
    "triton": {"tasks/cross_entropy_kernels.py"},  # comes with torch for GPUs
    "scikit-learn": {"data/images/source.py", "data/images/files.py", "data/corpus.py"},
    "pillow": {"data/images/source.py", "data/images/files.py"},
    "starlette": {"page/server.py"},
    "uvicorn": {"page/server.py"},
    "anyio": {"page/server.py"},  # comes with starlette
    "wandb": {"observe/trackers/wandb.py"},
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


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of a clone in which somebody has worked."""
    pytest.importorskip("build", reason="the wheel is built with the extra `dev`")
    clone = tmp_path_factory.mktemp("clone")
    generated = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tests", "docs", "tools", ".ci"):
        shutil.copytree(ROOT / name, clone / name, ignore=generated)
    for path in ROOT.glob("*.*"):
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, clone)
    shutil.copy(ROOT / "LICENSE", clone)
    (clone / "runs" / "latest").mkdir(parents=True)
    (clone / "runs" / "latest" / "recipe.yaml").touch()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    processes.run(command, clone, real=True)
    return clone / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


def package_files() -> set[str]:
    source = ROOT / "src"
    files = {path.relative_to(source) for path in (source / "muster").rglob("*") if path.is_file()}
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == package_files()


def test_the_readme_names_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "README.md").read_text()
    assert [name for name in project["optional-dependencies"] if f"`{name}`" not in page] == []


def test_the_sdist_has_what_building_needs_and_nothing_else(built):
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {path.name.partition("/")[2] for path in archive if path.isfile()}
    generated = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    needed = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
    assert names - generated == {f"src/{name}" for name in package_files()} | needed


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        found = email.message_from_bytes(archive.read(path))
    assert (found["Name"], found["Version"]) == ("muster-train", muster.__version__)
    assert found["License-Expression"] == "Apache-2.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(found.get_all("Provides-Extra")) == set(project["optional-dependencies"])


def test_an_installed_wheel_works_away_from_the_clone(wheel, tmp_path):
    """In an environment of its own, which takes the dependencies from this one, but not its muster."""
    home = tmp_path / "environment"
    processes.run([sys.executable, "-m", "venv", "--without-pip", home], tmp_path, real=True)
    install = ["--python", home, "install", "--quiet", "--no-index", "--no-deps", wheel]
    processes.run([sys.executable, "-m", "pip", *install], tmp_path, real=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        program, *arguments = command
        command = (str(home / "bin" / program), *arguments)
        return processes.run(command, tmp_path, env={"PYTHONPATH": ""}, real=True).stdout

    where = run("python", "-c", "import muster, muster.api.run; print(muster.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    assert "train" in run("muster", "--help")
    shipped = run("muster", "recipe", "list")
    recipes = [path.stem for path in (ROOT / "src" / "muster" / "recipes").glob("*.yaml")]
    assert [name for name in recipes if name not in shipped] == []
