"""`${…}` in a recipe: what it may refer to, and how much it may expand to.

A recipe is written to disk and sent to all ranks. What comes from the environment must not be a secret, and
references to references must not grow without bound.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from muster.errors import RecipeError
from muster.reading.text import in_one_line
from muster.reading.values import DEEPEST, first_problem

MOST = 2**20  # characters and values after expansion
CHAIN = 2 * DEEPEST  # references to references

SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|PRIVATE|SESSION|JWT|SIGN|HOOK|DSN|(^|_)PIN(_|$)",
    re.I,
)
PEOPLE = ("USER", "LOGNAME", "HOSTNAME", "HOST")
PLACES = ("PWD", "OLDPWD")
PLAIN = re.compile(
    r"[~/][^\n]*"  # a path
    r"|[a-z][a-z0-9+.-]*://[^\s@?#]*"  # an address without a user, a password or a signed query
    r"|[-+]?[0-9.]+(e[-+]?[0-9]+)?|true|false",
    re.I,
)
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:\s*['\"]?([A-Za-z_]\w*)['\"]?\s*[,}]")
_REFERENCE = re.compile(r"\$\{(?:oc\.(?:select|dict\.keys|dict\.values):)?\s*([^${}:,]*)")
# A number from the environment.
_DECODED = re.compile(r"\$\{oc\.decode:\s*\$\{oc\.env:[^${}]*\}\s*\}")
# Keys that are only known while they are resolved, and text that becomes values.
_UNBOUNDED = re.compile(
    r"\$\{[^{}:]*\$\{|\$\{\s*oc\.(?:select|dict\.\w+):[^{}]*\$\{|\$\{\s*oc\.(?:create|decode):"
)


def may_be_secret(name: str, value: str) -> bool:
    """Of a variable that is not a secret by what it is for: by its name, or an address with credentials."""
    return SECRET.search(name) is not None or ("://" in value and "@" in value)


def _may_be_told(name: str, value: str) -> bool:
    if name in PEOPLE or name in PLACES:
        return True
    return not SECRET.search(name) and PLAIN.fullmatch(value) is not None


def _refuse_secrets(key: str, value: str) -> None:
    names = _ENVIRONMENT.findall(value)
    if value.count("oc.env") != len(names):
        raise RecipeError(f"{in_one_line(key)}: name the variable itself, as in ${{oc.env:HOME}}")
    for name in names:
        if name in os.environ and not _may_be_told(name, os.environ[name]):
            raise RecipeError(
                f"{in_one_line(key)}: ${{oc.env:{name}}} is not put into a recipe, which is written to disk and "
                "sent to all ranks; only variables that hold a path, an address, a number or the name of a "
                "user or host are: give the value itself"
            )


def any_in(document: Mapping[Any, Any]) -> bool:
    return any(isinstance(part, str) and "${" in part for _, part in _leaves("", document))


def check(document: Mapping[Any, Any]) -> None:
    """Raise unless `document`, not resolved yet, stays within bounds once it is, and holds no secret."""
    if problem := first_problem(document):
        raise RecipeError(f"{in_one_line(problem.key) or 'recipe'}: {problem.words}")
    sizes: dict[str, int] = {}
    lengths: dict[str, int] = {}  # of chains of references
    waiting: list[str] = []  # keys whose size is being found

    def size_of(key: str) -> int:
        if key in waiting:
            raise RecipeError(f"{in_one_line(key) or 'recipe'}: its references lead back to itself")
        if len(waiting) + lengths.get(key, 1) > CHAIN:
            raise RecipeError(
                f"{in_one_line(key)}: more than {CHAIN} references refer to each other"
            )
        if key in sizes:
            return sizes[key]
        waiting.append(key)
        lengths[key] = 1
        found = sum(weigh(name, value) for name, value in _leaves(key, _select(document, key)))
        waiting.pop()
        sizes[key] = found
        return found

    def weigh(key: str, value: Any) -> int:
        if not isinstance(value, str):
            return 1
        if "${" not in value:
            return 1 + len(value)
        _refuse_secrets(key, value)
        if found := _UNBOUNDED.search(_DECODED.sub("", value)):
            raise RecipeError(
                f"{in_one_line(key)}: {in_one_line(found[0])}… is not read in a recipe; name the key itself"
            )
        targets = [_absolute(key, name) for name in _REFERENCE.findall(value)]
        total = 1 + len(value) + sum(size_of(target) for target in targets)
        lengths[waiting[-1]] = max(lengths[waiting[-1]], *(1 + lengths[t] for t in targets), 1)
        if total > MOST:
            raise RecipeError(
                f"{in_one_line(key)}: its references expand to more than {MOST:,} values"
            )
        return total

    for name, value in _leaves("", document):
        if isinstance(value, str) and "${" in value:
            waiting.append(name)  # not by its key, which may hold a dot, or be a number
            lengths[name] = 1
            weigh(name, value)
            waiting.pop()


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    waiting = [(key, value)]
    while waiting:
        name, part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [(f"{name}.{inner}" if name else str(inner), v) for inner, v in part.items()]
        elif isinstance(part, (list, tuple)):
            waiting += [(f"{name}.{number}", v) for number, v in enumerate(part)]
        else:
            yield name, part


def _absolute(key: str, reference: str) -> str:
    """`${.x}` is beside the key, `${..x}` one section further up."""
    parts = reference.strip().replace("[", ".").replace("]", "")
    up = len(parts) - len(parts.lstrip("."))
    if not up:
        return parts
    sections = key.split(".")[: -up or None]
    return ".".join([*sections, parts[up:]]) if parts[up:] else ".".join(sections)


def _select(document: Any, key: str) -> Any:
    """None where there is none, which OmegaConf refuses by its name."""
    for part in key.split(".") if key else ():
        if isinstance(document, Mapping):
            document = document.get(part)
        elif isinstance(document, (list, tuple)) and part.isdigit() and int(part) < len(document):
            document = document[int(part)]
        else:
            return None
    return document
