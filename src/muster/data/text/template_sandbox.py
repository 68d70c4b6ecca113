"""Jinja as transformers renders chat templates, within bounds: a template comes with a model, from anywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

BEGIN, END = "\U000f0a01", "\U000f0a02"  # around {% generation %} while rendering; private use
MOST = 2**20  # characters, or parts of a list, that an operator makes
MOST_BITS = 4096  # of a number
MOST_TURNS = 10**6  # of all loops over ranges


def environment() -> Any:
    """As transformers' own: blanks around tags, `break` and `continue`, JSON without HTML escapes."""
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %}"""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)  # fmt: skip

    class Bounded(ImmutableSandboxedEnvironment):
        """A template could else ask for any memory, or for hours, in a few characters."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if words := _beyond(operator, left, right):
                raise jinja2.exceptions.SecurityError(words)
            return super().call_binop(context, operator, left, right)

    class Names(jinja2.utils.Namespace):
        """Without names that begin with an underscore, by which Python's own could be reached."""

        def __init__(*given: Any, **names: Any) -> None:
            self, *pairs = given
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*pairs, **names).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace takes no name such as {name}")
            super().__setitem__(name, value)

    found = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    found.filters["tojson"] = tojson
    found.globals["namespace"] = Names
    found.globals["dict"] = lambda *pairs, **names: dict(*pairs, **names)
    return found


def _beyond(operator: str, left: Any, right: Any) -> str | None:
    """Why the result of an operator would be too large."""
    if operator == "%":
        wide = isinstance(left, str) and any(len(n) > 4 for n in re.findall(r"[0-9]+", left))
        stars = isinstance(left, str) and re.search(r"%[^a-zA-Z%]*\*", left)
        return "a format asks for too wide a field" if wide or stars else None
    numbers = [side for side in (left, right) if isinstance(side, int)]
    if operator == "**":
        large = len(numbers) == 2 and abs(left) > 1 and right * math.log2(abs(left)) > MOST_BITS
        return "a power is too large" if large else None
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    if sizes and numbers and sizes[0] * numbers[0] > MOST:
        return f"a text or list is repeated to more than {MOST:,}"
    if len(numbers) == 2 and sum(number.bit_length() for number in numbers) > MOST_BITS:
        return "a product is too large"
    return None


def bounded_range() -> Callable[..., range]:
    """For one rendering: all its loops together take so many turns, so that loops in each other end too."""
    from jinja2.exceptions import SecurityError

    left = MOST_TURNS

    def bounded(*bounds: int) -> range:
        nonlocal left
        found = range(*bounds)
        left -= max(0, -(-(found.stop - found.start) // found.step))
        if left < 0:
            raise SecurityError(f"its loops over ranges take more than {MOST_TURNS:,} turns")
        return found

    return bounded
