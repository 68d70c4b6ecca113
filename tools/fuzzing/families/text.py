"""Text: documents, chat rows and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import jinja2.sandbox  # noqa: F401 - loaded before the limits
import pyarrow as pa

from fuzzing import mutate
from fuzzing.families.speech import to_parquet
from fuzzing.reader import Case, reader
from muster.data import corpus
from muster.data.inspect import inspect
from muster.data.problems import Problems
from muster.data.text import chat_template, packing
from muster.data.text.conversations import are_chat, read_conversations
from muster.data.text.tokenizers import Bytes

ROWS: list[Any] = [{"text": f"a document of number {i}"} for i in range(5)]
CHATS: list[Any] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"prompt": "hi", "completion": "hello", "system": "be kind", "history": [["a", "b"]]},
    {"instruction": "say hi", "input": "now", "output": "hi", "tools": '[{"name": "x"}]'},
    {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "tools": []},
]


def _binary(rng: Random, texts: list[str]) -> pa.Array:
    odd = [
        mutate.text(rng)[:3000].encode("utf-8", "surrogatepass"),
        b"\xff\xfe",
        b"\xed\xa0\x80",
        None,
    ]
    cells = [rng.choice(odd) if rng.random() < 0.2 else text.encode() for text in texts]
    plain = pa.array(cells, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(cells), plain.buffers())


@reader("text", 1500)
def documents(rng: Random, folder: Path) -> Case:
    """Parquet, JSON lines and plain files, to a stream of tokens."""
    kind = rng.choice(["parquet", "jsonl", "jsonl", "txt"])
    if kind == "parquet":
        content = to_parquet(pa.table({"text": _binary(rng, [row["text"] for row in ROWS])}))
        content = mutate.raw_bytes(rng, content) if rng.random() < 0.4 else content
    elif kind == "jsonl":
        content = mutate.json_lines(rng, ROWS)
    else:
        content = mutate.raw_bytes(rng, b"some words of a text\n" * 20)
    path = folder / mutate.name(rng, f"train.{kind}")
    mutate.place(rng, path, content)

    def read() -> Any:
        found = corpus.files(str(path), "data.train", "train", None, "text")
        stream = packing.open_stream(found, Bytes(), None)
        stream.bad.check(stream.rows, 0.5, "rows", "data.text_column")
        return stream

    return Case(read, (path.name,) if path.name.isprintable() else ())


@reader("chat", 1200)
def conversations(rng: Random, folder: Path) -> Case:
    kind = rng.choice(["jsonl", "jsonl", "parquet"])
    if kind == "jsonl":
        content = mutate.json_lines(rng, rng.choice([CHATS, [rng.choice(CHATS)] * 3]))
    else:
        names = rng.choice([("prompt", "completion"), ("instruction", "output"), ("messages",)])
        columns = {
            name: _binary(rng, ["hi", "you", json.dumps(CHATS[0]["messages"])]) for name in names
        }
        content = to_parquet(pa.table(columns))
        content = mutate.raw_bytes(rng, content) if rng.random() < 0.4 else content
    path = folder / mutate.name(rng, f"train.{kind}")
    mutate.place(rng, path, content)
    template = chat_template.ChatTemplate(chat_template.BASIC, {"eos_token": "</s>"})

    def read() -> Any:
        bad, found = Problems(), 0
        files = corpus.files(str(path), "data.train", "train", None, "text")
        are_chat("auto", None, files)
        for one in read_conversations(files, bad):
            found += 1
            template.render(one.messages, one.tools)
        bad.check(found + bad.count, 0.5, "rows", "data.format")

    return Case(read, (path.name,) if path.name.isprintable() else ())


@reader("template", 500)
def template(rng: Random, folder: Path) -> Case:
    """Chat templates, which are programs: no time without end, and nothing outside of their sandbox."""
    plain = chat_template.BASIC
    odd = [
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ messages[0].__class__ }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no\nto \x1b[2J this') }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ 10 ** 10 ** 8 }}",
        "{% set x = namespace(a=1) %}{% for i in range(99999) %}{% set x.a = x.a * 10**50 %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ lipsum.__globals__ }}",
        "{% for a in range(9) %}" * 25 + "{% endfor %}" * 25,
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(99) }}",
        "{% set x = namespace(a=[1]) %}{% for i in range(99) %}{% set x.a = [x.a, x.a] %}{% endfor %}{{ x.a }}",
        *(
            f"{{% set x = namespace(a='aa') %}}{{% for i in range(99) %}}{{% set x.a = {doubled} %}}{{% endfor %}}"
            for doubled in (
                "x.a ~ x.a",
                "x.a + x.a",
                "x.a|replace('a', 'aa')",
                "x.a.replace('a', 'aa')",
            )
        ),
        *(
            f"{{{{ {made} }}}}"
            for made in (
                "'x'|center(10**9)",
                "'x'.ljust(10**9)",
                "'%999999999d'|format(1)",
                "'{:999999999d}'.format(1)",
                "[1]|tojson(indent=10**9)",
                "[1]|batch(10**9, 0)|list",
                "lipsum(n=10**9)",
            )
        ),
        "{" * 500,
        "{{ " + "(" * 500 + ")" * 500 + " }}",
    ]
    source = (
        rng.choice(odd)
        if rng.random() < 0.4
        else mutate.raw_bytes(rng, plain.encode()).decode("utf-8", "replace")
    )
    if rng.random() < 0.5:
        path, content = (
            folder / "tokenizer_config.json",
            mutate.json_file(rng, {"chat_template": source, "eos_token": "x"}),
        )
    else:
        path, content = folder / "chat_template.jinja", source.encode("utf-8", "surrogatepass")
    mutate.place(rng, path, content)

    def read() -> Any:
        found = chat_template.find_template(None, folder, "</s>")
        return found.render(
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], None
        )

    def wrong(taken: Any) -> str | None:
        return (
            "it printed what lies outside"
            if "root:" in str(taken) or mutate.SECRET in str(taken)
            else None
        )

    return Case(read, (str(folder), path.name, "the chat template"), wrong)


@reader("inspect", 300)
def inspection(rng: Random, folder: Path) -> Case:
    """`muster data inspect` of text and clips."""
    if rng.random() < 0.5:
        path = mutate.place(rng, folder / "train.jsonl", mutate.json_lines(rng, ROWS))
    else:
        texts = _binary(rng, [row["text"] for row in ROWS])
        path = mutate.place(rng, folder / "train.parquet", to_parquet(pa.table({"text": texts})))
    return Case(lambda: inspect([str(path)]), (path.name,))
