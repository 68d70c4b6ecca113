"""The files that a recipe builds on, before Hydra composes them: it reads YAML without bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from muster.errors import RecipeError
from muster.reading.files import is_file
from muster.reading.text import in_one_line

Parse = Callable[[Path], Mapping[Any, Any]]
MOST = 100  # files that one recipe is composed of, each as often as Hydra reads it


def files_of(path: Path, parse: Parse, shipped: Path) -> Iterator[Path]:
    """`path`, and every file that its `defaults` lead to, each once. A name that has no file is left to Hydra."""
    found: dict[Path, list[list[Path]]] = {}  # by file, where each of its entries may be
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        yield file
        found[file] = [
            _places(group, option, (file.parent, path.parent, shipped))
            for group, option in _choices(parse(file).get("defaults"), file)
        ]
        waiting += [place for places in found[file] for place in places]
    _refuse_many(path, found)


def _places(group: str, option: str, roots: tuple[Path, ...]) -> list[Path]:
    name = f"{option.removesuffix('.yaml')}.yaml".lstrip("/")
    return [
        place.resolve() if ".." in place.parts else place
        for root in roots
        for place in sorted({root / name, root / group / name})
        if is_file(place)
    ]


def _refuse_many(path: Path, found: Mapping[Path, list[list[Path]]]) -> None:
    """Two entries of each of n files that lead to the next, under other keys, are 2^n to compose."""
    sizes: dict[Path, int] = {}

    def size(file: Path, above: tuple[Path, ...]) -> int:
        if file in above or len(above) > MOST:
            return 1  # Hydra refuses a circle by its name
        if file not in sizes:
            inner = (*above, file)
            entries = [max((size(place, inner) for place in p), default=0) for p in found[file]]
            sizes[file] = 1 + sum(entries)
        return sizes[file]

    if size(path, ()) > MOST:
        raise RecipeError(
            f"{path}: its `defaults:` lead to more than {MOST} files, counted as often as they are named; "
            "name each once"
        )


def _choices(entries: Any, file: Path) -> Iterator[tuple[str, str]]:
    """Group and option of each entry: `name`, `{group: option}`, `{group: [options]}`, `name@where`. What is no
    list is Hydra's to refuse."""
    for entry in entries if isinstance(entries, list) else [entries]:
        for group, options in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            folder = str(group).split("@")[0].split(" ")[-1].strip("/")
            for option in options if isinstance(options, list) else [options]:
                if "${" in f"{group}{option}":
                    raise RecipeError(
                        f"{file}: defaults: {in_one_line(option)} is only known while it is composed; name the "
                        "file itself"
                    )
                if isinstance(option, str) and "\0" not in option:
                    yield folder, option.split("@")[0]
