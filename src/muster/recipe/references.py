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
_KEY = r"\.*[\w-]+(?:\.[\w-]+|\[[\w-]+\])*"
# All that is read. Whatever else OmegaConf's grammar has (quotes, escapes, blanks in odd places, keys that are only
# known while they are resolved, text that becomes values) would lead past the bounds and past the secrets.
_ALLOWED = re.compile(
    rf"\$\{{[ \t]*(?:(?P<key>{_KEY})[ \t]*\}}"
    rf"|oc\.(?:select|dict\.(?:keys|values)):[ \t]*(?P<argument>{_KEY})[ \t]*(?:,[^${{}}'\"\\]*)?\}}"
    r"|oc\.env:[ \t]*(?P<quote>['\"]?)[A-Za-z_]\w*(?P=quote)[ \t]*[,}]"
    r"|oc\.decode:[ \t]*(?=\$\{[ \t]*oc\.env:[^${}]*\}[ \t]*\})"  # a number from the environment
    r"|now:(?:[\w :,.+/-]|%[A-Za-z%])*\})"
)
_BEGIN = re.compile(r"\$\{(?:(?!\$\{)[^:}])*(?:[:}]|\$\{)?")  # of one that is not, for a sentence
_PLAIN_KEY = re.compile(r"[\w-]+")


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
        if name not in os.environ and re.search(rf"oc\.env:\s*['\"]?{name}['\"]?\s*\}}", value):
            raise RecipeError(
                f"{in_one_line(key)}: the environment variable {name} is not set; set it or give the value itself"
            )
        if name in os.environ and not _may_be_told(name, os.environ[name]):
            raise RecipeError(
                f"{in_one_line(key)}: ${{oc.env:{name}}} is not put into a recipe, which is written to disk and "
                "sent to all ranks; only variables that hold a path, an address, a number or the name of a "
                "user or host are: give the value itself"
            )


def any_in(document: Mapping[Any, Any]) -> bool:
    return any(isinstance(part, str) and "${" in part for _, part in _leaves("", document)) or any(
        "${" in key for _, key in _keys(document)
    )


def check(document: Mapping[Any, Any]) -> None:
    """Raise unless `document`, not resolved yet, stays within bounds once it is, and holds no secret."""
    if problem := first_problem(document):
        raise RecipeError(f"{in_one_line(problem.key) or 'recipe'}: {problem.words}")
    keys = list(_keys(document))
    for section, key in keys:
        if "${" in key:
            raise RecipeError(
                f"{in_one_line(section) or 'recipe'}: its key {in_one_line(key)} holds a reference; write the "
                "key itself"
            )
    plain = all(_PLAIN_KEY.fullmatch(key) for _, key in keys)
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
        found = sum(weigh(name, value) for name, value in _leaves(*_select(document, key)))
        waiting.pop()
        sizes[key] = found
        return found

    def weigh(key: str, value: Any) -> int:
        if not isinstance(value, str):
            return 1
        if "${" not in value:
            return 1 + len(value)
        _refuse_secrets(key, value)
        targets = [_absolute(key, name) for name in _targets(key, value, plain)]
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


def _targets(key: str, value: str, plain: bool) -> Iterator[str]:
    """The keys that `value` refers to. `plain`: no key of the document holds a dot, by which the section that a
    reference is relative to would be mistaken."""
    for begin in re.finditer(r"\$\{", value):
        found = _ALLOWED.match(value, begin.start())
        target = str(found["key"] or found["argument"] or "") if found else ""
        relative = found and target and (target.startswith(".") or ".dict." in found[0])
        if not found or (relative and not plain):
            shown = _BEGIN.match(value, begin.start())
            raise RecipeError(
                f"{in_one_line(key)}: {in_one_line(shown[0] if shown else value)}… is not read in a recipe; "
                "name the key itself"
            )
        if target:
            yield target


def _keys(document: Any) -> Iterator[tuple[str, str]]:
    """Each with the section that it is in."""
    waiting = [("", document)]
    while waiting:
        name, part = waiting.pop()
        if isinstance(part, Mapping):
            yield from ((name, str(key)) for key in part)
            waiting += [(f"{name}.{key}" if name else str(key), v) for key, v in part.items()]
        elif isinstance(part, (list, tuple)):
            waiting += [(f"{name}.{number}", v) for number, v in enumerate(part)]


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


def _select(document: Any, key: str) -> tuple[str, Any]:
    """What is at `key`, and its key: None where there is none, which OmegaConf refuses by its name. Below a
    reference, that reference: what it leads to holds the part that is asked for."""
    parts = key.split(".") if key else []
    for number, part in enumerate(parts):
        if isinstance(document, Mapping):
            document = document.get(part)
        elif isinstance(document, (list, tuple)):
            try:
                document = document[int(part)]  # as OmegaConf reads it, -1 and 0_1 too
            except (ValueError, IndexError):
                return key, None
        elif isinstance(document, str):
            return ".".join(parts[:number]), document
        else:
            return key, None
    return key, document
