"""Runs a notebook's code cells in order, in the working directory, and writes it with their outputs.

    python tools/run_notebook.py docs/notebook.ipynb [--to FILE]

Without Jupyter: a cell's output is what it prints, and its last expression as a notebook shows it
(none after a semicolon). An
exception ends it, with the cell's number.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The outputs, as nbformat has them."""
    tree = ast.parse(source, f"cell {number}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--to", type=Path, help="default: the notebook itself")
    asked = parser.parse_args()
    notebook = json.loads(asked.notebook.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["outputs"] = run_cell("".join(cell["source"]), names, number)
        cell["execution_count"] = number
    (asked.to or asked.notebook).write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
