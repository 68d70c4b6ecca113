"""Writes CONTRIBUTING.md's table of layers: the import contract of pyproject.toml, and the first
sentence of each package. A test holds the page against it.

    python tools/layers.py
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- layers, written by tools/layers.py -->\n", "<!-- end of layers -->\n"


def layers() -> list[list[str]]:
    """Packages by layer, from the top down."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = document["tool"]["importlinter"]["contracts"][0]
    return [layer.replace(" ", "").split("|") for layer in contract["layers"]]


def summary(package: str) -> str:
    """The first sentence of its docstring."""
    folder = ROOT / "src" / "muster" / package
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    words = ast.get_docstring(ast.parse(file.read_text())) or ""
    return words.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")


def table() -> str:
    found = layers()
    lines = ["| layer | package | what it holds |", "|---|---|---|"]
    for number, packages in zip(range(len(found), 0, -1), found, strict=True):
        lines += [f"| {number} | `{package}` | {summary(package)} |" for package in packages]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """`text` with the table between its marks made again."""
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:before]}\n{table()}\n{text[after:]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
