"""What the schema says, in words: for errors, for `muster recipe show`, for editors and the manual.

Everything here is read off the JSON schema that pydantic derives from `schema.py`, so a key added
there is described, suggested and documented without a second list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from muster.recipe import aliases, foreign
from muster.recipe.schema import Recipe


@dataclass(frozen=True)
class Key:
    """One dotted key of the recipe."""

    name: str
    expects: str  # "a whole number greater than 0 or auto"; never mentions null
    kinds: frozenset[
        str
    ]  # JSON types accepted: integer, number, string, boolean, array, null, object
    default: Any
    description: str
    choices: tuple[str, ...] = ()  # names that it takes
    off: bool = False  # a section that is null unless it is given
    resume: Literal["fixed", "free"] | None = None  # None: its section says it, or its own keys do
    open: bool = False  # its keys are not muster's

    @property
    def is_section(self) -> bool:
        return "object" in self.kinds and not self.open


@cache
def keys() -> dict[str, Key]:
    """Every dotted key, sections included, in the order of the schema."""
    schema = Recipe.model_json_schema()
    return {key.name: key for key in _walk(schema, schema["$defs"], "")}


def _walk(node: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[Key]:
    for name, entry in node["properties"].items():
        options = [_follow(option, definitions) for option in entry.get("anyOf", [entry])]
        dotted = prefix + name
        section = next((option for option in options if "properties" in option), None)
        words = [
            word
            for option in options
            if option.get("type") != "null"
            for word in _choices(option) or [_words(option)]
        ]
        if section is not None:
            first = next(iter(section["properties"]))
            words = [f"keys of its own, such as {dotted}.{first}"]
        yield Key(
            name=dotted,
            expects=either(words),
            kinds=frozenset(option["type"] for option in options),
            default=entry.get("default"),
            description=entry.get("description") or (section or {}).get("description", ""),
            choices=tuple(name for option in options for name in _choices(option)),
            off=section is not None and "default" in entry and entry["default"] is None,
            resume=entry.get("resume"),
            open=section is None and entry.get("type") == "object",
        )
        if section is not None:
            yield from _walk(section, definitions, dotted + ".")


def _follow(option: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in option:
        return option
    found: dict[str, Any] = definitions[option["$ref"].rsplit("/", 1)[-1]]
    return found


def _choices(option: dict[str, Any]) -> list[str]:
    return [
        str(name) for name in option.get("enum", [option["const"]] if "const" in option else [])
    ]


def _words(option: dict[str, Any]) -> str:
    """One alternative of a key's type as a person would say it."""
    if choices := _choices(option):
        return either(choices)
    if "words" in option:
        return str(option["words"])
    if "anyOf" in option:
        return either([word for one in option["anyOf"] for word in _choices(one) or [_words(one)]])
    kind = option["type"]
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(option)
    if kind == "string":
        return f"text matching `{option['pattern']}`" if "pattern" in option else "text"
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        items = option.get("prefixItems") or [option.get("items") or {}]
        inner = _words(items[0]).removeprefix("a ").replace("number", "numbers", 1)
        return (
            f"a list of {option['maxItems']} {inner}"
            if "maxItems" in option
            else f"a list of {inner}"
        )
    return "keys of its own"


def _bounds(option: dict[str, Any]) -> str:
    low, above = option.get("minimum"), option.get("exclusiveMinimum")
    high, below = option.get("maximum"), option.get("exclusiveMaximum")
    if option["type"] == "integer" and below is not None:
        high = below - 1
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}" if high < 1e6 else f" from {low} to {high}"
    parts = [f"greater than {above:g}"] if above is not None else []
    parts += [f"of at least {low:g}"] if low is not None else []
    parts += [f"less than {below:g}"] if below is not None else []
    parts += [f"of at most {high:g}"] if high is not None else []
    return " " + " and ".join(parts) if parts else ""


def either(words: list[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


def closest(name: str, names: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(names), n=1)
    return found[0] if found else None


NEAR = 0.7  # between what typing errors score and what unrelated words do; both are in the tests


def nearest(name: str) -> str | None:
    """The key that `name` most likely meant, if any is near: by its last word, and by its section."""
    known = {key: key for key in keys()} | {row.old: row.new for row in aliases.TABLE}
    section, _, leaf = name.rpartition(".")

    def alike(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    def score(candidate: str) -> float:
        its_section, _, its_leaf = candidate.rpartition(".")
        short, long = sorted((leaf, its_leaf), key=len)
        part = len(short) > 2 and (long.startswith(short) or long.endswith(f"_{short}"))
        same = section == its_section != "" and part  # such as num_workers for workers
        words = max(alike(leaf, its_leaf), 0.8 if same else 0.0)
        usual = 0.01 if not section and its_section == "training" else 0.0
        return words * (0.85 + 0.15 * alike(section, its_section)) + usual

    best = max(known, key=score)
    return known[best] if score(best) >= NEAR else None


LISTED = "`muster recipe schema` lists them all"
LONG = 200  # characters, more than any key has


def instead(name: str, value: Any = None) -> str:
    """What to write in place of the unknown key `name`, which was given `value`."""
    if len(name) > LONG:
        return LISTED
    known = foreign.answer(name, {key.rpartition(".")[2]: key for key in keys()}, value)
    near = None if known else nearest(name)
    return known or (f"nearest is {near}" if near else LISTED)


def mismatch(key: Key, value: Any) -> str:
    """What `key` got, and what would be right."""
    got = repr(value) if isinstance(value, str) else scalar(value)
    if len(got) > 60:
        got = got[:59] + "…"
    hint = ""
    if key.expects.startswith("text") and isinstance(value, int | float):
        hint = ": put it in quotes"
    if near := closest(str(value), key.choices):
        hint = f"; nearest is {near}"
    if key.is_section and value is None:
        hint = "; leave the section out for its defaults"
    return f"got {got}, expected {key.expects}{hint}"


class _Dumper(yaml.SafeDumper):
    """YAML as Hydra reads it back: `1e-3` is a number there, so the text keeps its quotes."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
_Dumper.add_representer(
    list,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=True
    ),
)


def to_yaml(recipe: Recipe) -> str:
    """Every key in the order of the schema; reading it back gives an equal recipe."""
    return yaml.dump(
        recipe.as_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000
    )


def scalar(value: Any) -> str:
    """One value as it would stand in a recipe, on one line."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1_000_000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def describe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, each key with its meaning, and its default where it differs."""
    rows: list[tuple[str, str]] = []
    _rows(recipe.as_dict(), "", rows)
    width = min(max(len(left) for left, _ in rows), 44)
    lines = [f"{left:<{width}}  # {note}" if note else left for left, note in rows]
    return "\n".join(lines) + "\n"


def _rows(values: dict[str, Any], prefix: str, rows: list[tuple[str, str]]) -> None:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = keys()[prefix + name]
        if isinstance(value, dict) and not key.open:
            rows.append((f"{indent}{name}:", key.description))
            _rows(value, prefix + name + ".", rows)
            continue
        note = key.description
        if key.is_section:
            note = note if key.off else f"[default: on] {note}"
        elif value != key.default:
            note = f"[default: {scalar(key.default)}] {note}"
        rows.append((f"{indent}{name}: {scalar(value)}", note))


def json_schema() -> dict[str, Any]:
    """The recipe for editors: completion, descriptions and bounds while typing.

    A file may leave to its `defaults` what the whole recipe needs, so no section is required here.
    """
    schema = Recipe.model_json_schema()
    schema.pop("required", None)
    defaults = {
        "type": "array",
        "description": "Files beside this one, or shipped recipes, that this one builds on.",
        "items": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "muster recipe",
        "properties": {"defaults": defaults, **schema["properties"]},
    }


def schema_table() -> str:
    """The key reference of the manual, as markdown."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys().values():
        if key.is_section:
            if key.description and "null" in key.kinds:
                default = "`null`" if key.off else "on"
                lines.append(
                    f"| `{key.name}` | a section or null | {default} | {key.description} |"
                )
            continue
        takes = key.expects + (" or null" if "null" in key.kinds else "")
        cells = (f"`{key.name}`", takes, f"`{scalar(key.default)}`", key.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def update_manual(page: str, tables: Mapping[str, str] | None = None) -> str:
    """`page` with the tables between its markers written anew from the code; by default those of
    docs/recipe.md."""
    tables = tables or {"keys": schema_table(), "aliases": aliases.alias_table()}
    for name, table in tables.items():
        start, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        head, found, rest = page.partition(start)
        if not found or end not in rest:
            raise ValueError(f"the page has no {start} … {end}")
        page = f"{head}{start}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def foreign_tables() -> dict[str, str]:
    """Those of docs/coming-from.md."""
    return {name: foreign.foreign_table(name) for name in foreign.TABLE}


if __name__ == "__main__":
    import sys
    from pathlib import Path

    for manual in map(Path, sys.argv[1:]):
        tables = foreign_tables() if manual.stem == "coming-from" else None
        page = manual.read_text(encoding="utf-8")
        manual.write_text(update_manual(page, tables), encoding="utf-8")
