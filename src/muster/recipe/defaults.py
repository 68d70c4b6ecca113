"""The files that a recipe builds on, before Hydra composes them: it reads YAML without bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from muster.reading.files import is_file

Parse = Callable[[Path], Mapping[Any, Any]]


def files_of(path: Path, parse: Parse, shipped: Path) -> Iterator[Path]:
    """`path`, and every file that its `defaults` lead to, each once. A name that has no file is left to Hydra."""
    waiting, seen = [path], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        yield file
        entries = parse(file).get("defaults")
        for group, option in _choices(entries if isinstance(entries, list) else []):
            name = f"{option.removesuffix('.yaml')}.yaml".lstrip("/")
            for root in (file.parent, path.parent, shipped):
                for found in {root / name, root / group / name}:
                    if is_file(found):
                        waiting.append(found.resolve() if ".." in found.parts else found)


def _choices(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """Group and option of each entry: `name`, `{group: option}`, `{group: [options]}`, `name@where`."""
    for entry in entries:
        for group, options in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            folder = str(group).split("@")[0].split(" ")[-1].strip("/")
            for option in options if isinstance(options, list) else [options]:
                if isinstance(option, str) and "\0" not in option:
                    yield folder, option.split("@")[0]
