"""Bounded YAML: size, depth, number of values, what aliases expand to, tags, and keys given twice.

The stream of events is checked first: the parser needs no recursion, while building values does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from muster.errors import UnreadableError
from muster.reading.files import decode, read_bytes
from muster.reading.text import in_one_line, printable
from muster.reading.values import DEEPEST, MOST, first_problem

MOST_BYTES = 2**20
FEW_CHARACTERS = 2**14
LONGEST_NUMBER = 400  # characters of an integer
PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")
}
TIMESTAMP = "tag:yaml.org,2002:timestamp"
FLOAT = re.compile(  # OmegaConf's: YAML's own form asks for a point before the exponent
    r"^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)"
    r"|\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_Fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is


class _Loader(_Fast):  # type: ignore[valid-type, misc]
    """`1e-4` is a number and a date is text, as in OmegaConf; a key may be given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"found duplicate key {key.value}", key.start_mark
                    )
                seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _integer(loader: Any, node: yaml.ScalarNode) -> Any:
    """YAML has numbers to the base of 60, such as 1:30:00, whose cost grows with the square of their length."""
    if len(node.value) > LONGEST_NUMBER:
        raise yaml.constructor.ConstructorError(
            None, None, f"found a number of more than {LONGEST_NUMBER} characters", node.start_mark
        )
    return loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != TIMESTAMP]
    for first, forms in _Fast.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def read(path: Path, most: int = MOST_BYTES) -> Any:
    """A file's values; None for an empty one. OSError where there is no such file."""
    return parse(read_bytes(path, most), path)


def parse(text: str | bytes, where: object) -> Any:
    """`where` is the file, or what else the sentence is to name."""
    if isinstance(text, bytes):
        text = decode(text, where)
    try:
        _check(text, where)
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise _refusal(_in_words(text) or error, where) from None
    except UnreadableError:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # such as `!!int x`
        raise UnreadableError(f"{_name(where)}: not valid YAML: {in_one_line(error)}") from None
    if problem := first_problem(value):
        key = f"{in_one_line(problem.key)}: " if problem.key else ""
        raise UnreadableError(f"{_name(where)}: {key}{problem.words}")
    return value


def _check(text: str, where: object) -> None:
    """Bounds that must hold before values are built."""
    open_sizes = [0]  # of the lists and mappings that have begun: values in them so far
    names: list[str | None] = [None]
    sizes: dict[str, int] = {}  # by anchor
    documents = 0
    for event in yaml.parse(text, _Fast):
        line = event.start_mark.line + 1
        size = 0
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _refused(where, line, "holds a second document, expected one")
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in names:
                raise _refused(where, line, f"*{in_one_line(event.anchor)} refers to itself")
            size = sizes.get(str(event.anchor), 1)
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            if event.tag is not None and event.tag not in PLAIN_TAGS:
                raise _refused(where, line, f"the tag {in_one_line(event.tag)} is not read here")
            if isinstance(event, yaml.ScalarEvent):
                size = 1
                if event.anchor:
                    sizes[event.anchor] = 1
            else:
                open_sizes.append(1)
                names.append(event.anchor)
                if len(names) > DEEPEST + 1:
                    raise _refused(
                        where,
                        line,
                        f"lists and sections lie more than {DEEPEST} deep in each other",
                    )
        elif isinstance(event, yaml.CollectionEndEvent):
            size = open_sizes.pop()
            if anchor := names.pop():
                sizes[anchor] = size
        open_sizes[-1] += size
        if open_sizes[-1] > 2 * MOST:  # a key and its value each
            raise _refused(where, line, f"holds more than {MOST:,} values")


def _refused(where: object, line: int, words: str) -> UnreadableError:
    return UnreadableError(f"{_name(where)}, line {line}: {words}")


def _in_words(text: str) -> yaml.YAMLError | None:
    """The same error in yaml's own words, which name the line better than libyaml's. Slow, so for short texts."""
    if len(text) <= FEW_CHARACTERS:
        try:
            for _ in yaml.parse(text, yaml.SafeLoader):
                pass
        except yaml.YAMLError as error:
            return error
    return None


def _refusal(error: yaml.YAMLError, where: object) -> UnreadableError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    place = f"{_name(where)}, line {mark.line + 1}" if mark is not None else _name(where)
    return UnreadableError(f"{place}: not valid YAML: {in_one_line(problem)}")


def _name(where: object) -> str:
    return printable(str(where))
