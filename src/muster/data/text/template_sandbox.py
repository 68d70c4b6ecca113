"""Jinja as transformers renders chat templates, within bounds: a template comes with a model, from anywhere."""

from __future__ import annotations

import json
from typing import Any

from muster.data.text import template_bounds as bounds

BEGIN, END = "\U000f0a01", "\U000f0a02"  # around {% generation %} while rendering; private use


def environment() -> Any:
    """As transformers' own: blanks around tags, `break` and `continue`, JSON without HTML escapes."""
    import jinja2.compiler
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

    class Generator(jinja2.compiler.CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:  # a ~ b
            self.write("environment.joined((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    class Bounded(ImmutableSandboxedEnvironment):
        """A template could else ask for any memory, or for hours, in a few characters."""

        intercepted_binops = frozenset(["*", "**", "%", "+"])
        code_generator_class = Generator
        concat = staticmethod(bounds.concat)
        joined = staticmethod(bounds.joined)
        counted = staticmethod(bounds.counted)

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            found = super()._parse(source, name, filename)
            for loop in found.find_all(jinja2.nodes.For):
                if loop.recursive:
                    raise jinja2.exceptions.TemplateSyntaxError("a loop is recursive", loop.lineno)
                counted = jinja2.nodes.EnvironmentAttribute("counted", lineno=loop.lineno)
                loop.iter = jinja2.nodes.Call(
                    counted, [loop.iter], [], None, None, lineno=loop.lineno
                ).set_environment(self)
            return found

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bounds.check_operator(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:
            bounds.check_call(__obj, given, named)
            return super().call(__context, __obj, *given, **named)

        def wrap_str_format(self, value: Any) -> Any:
            found = super().wrap_str_format(value)
            if found is not None:
                bounds.check_format_spec(value.__self__)
            return found

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
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        finalize=bounds.shown,
    )
    found.filters["tojson"] = tojson
    for name, own in found.filters.items():
        found.filters[name] = bounds.filtered(name, own)
    del found.globals["lipsum"]  # makes any amount of text
    found.globals["range"] = bounds.bounded_range
    found.globals["namespace"] = Names
    found.globals["dict"] = lambda *pairs, **names: dict(*pairs, **names)
    return found
