"""How a folder's model is meant to generate: its generation_config.json, and where its text ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muster.errors import RecipeError
from muster.reading import json_file
from muster.reading.files import is_file
from muster.reading.text import in_one_line

FILE = "generation_config.json"
END = "eos_token_id"
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class Generation:
    keys: dict[str, Any] = field(default_factory=dict)  # all of generation_config.json
    ends: tuple[int, ...] = ()  # tokens that end a text, by it or else by config.json

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Generation:
        return cls(saved["keys"], tuple(saved["ends"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def document(self, ends: Iterable[int]) -> dict[str, Any] | None:
        """generation_config.json of a model whose texts end with `ends` too; None where config.json,
        which gives `ends` of this, says it all."""
        new = sorted(set(ends) - set(self.ends))
        if not new:
            return self.keys or None
        return self.keys | {END: [*self.ends, *new]}


def read_generation(folder: Path) -> Generation:
    keys = read_keys(folder)
    ends = keys.get(END, _table(folder / "config.json").get(END))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and 0 <= end <= LARGEST_ID for end in ends):
        raise RecipeError(
            f"model.pretrained: {folder} has {END} = {in_one_line(json.dumps(ends))}, expected token ids; correct it in "
            f"{FILE if END in keys else 'config.json'}"
        )
    return Generation(keys, tuple(ends))


def read_keys(folder: Path) -> dict[str, Any]:
    """generation_config.json; empty without one."""
    return _table(folder / FILE)


def _table(path: Path) -> dict[str, Any]:
    if not is_file(path):
        return {}
    try:
        return json_file.read(path)
    except (ValueError, OSError) as error:
        raise RecipeError(
            f"model.pretrained: {path} cannot be read ({in_one_line(error, 300)}); copy the folder again"
        ) from None
