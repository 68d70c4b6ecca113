"""Hostile values, and mutations of documents, of bytes and of files. All of them follow a `Random`."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, MutableMapping, MutableSequence
from pathlib import Path
from random import Random
from typing import Any

SECRET = "planted-8d1f0c"  # lies outside of what a reader is given, and may turn up nowhere
os.environ["FUZZ_SECRET"] = SECRET


class Raw:
    """JSON text as it stands: numbers that Python would not write, and depths that it cannot."""

    def __init__(self, text: str) -> None:
        self.text = text


NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 7, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 2**40, 10**9, 10**12),
    *(0.0, -0.0, 0.5, -1.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
    *(Raw("1" + "0" * 400), Raw("9" * 5000), Raw("1e999"), Raw("-1e-999")),
]
TEXTS = [
    *(
        "",
        " ",
        "x",
        "null",
        "NaN",
        "-1",
        "1e999",
        "latest",
        "auto",
        ".",
        "..",
        "/",
        "~",
        "-",
        "--help",
    ),
    *(
        "a\0b",
        "\ud800",
        "x\udfff",
        "\ufeff",
        "\u202eevil",
        "\u2028",
        "x\ny",
        "x\r\ny",
        "\t",
        "\x7f",
    ),
    *("\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "[/red]", "[bold]", "[link=x]", ":boom:"),
    *("../outside/secret", "../../outside/secret.safetensors", "/etc/passwd", "/dev/zero", "C:\\x"),
    *("$(touch ran)", "`touch ran`", "'; touch ran; '", '"', "\\", "%s%n", "%j", "---\nkind: Pod"),
    *(
        "${oc.env:FUZZ_SECRET}",
        "${name}",
        "${",
        "{{ 7*7 }}",
        "{% for x in range(10**9) %}",
        "!!python/x",
    ),
    *("é" * 300, "x" * 70_000, "字" * 5000, "a." * 2000, "Error " * 10_000),
]
NESTED: list[Any] = [
    *([], {}, [[]], {"": ""}, [None], {"x": None}, [1, "x", None], list(range(3000))),
    *(
        Raw("[" * 900 + "]" * 900),
        Raw("[" * 100_000 + "]" * 100_000),
        Raw('{"a":' * 5000 + "1" + "}" * 5000),
    ),
]


def value(rng: Random) -> Any:
    """A hostile one, of any type."""
    kind = rng.choice([NUMBERS, TEXTS, TEXTS, NESTED, [None, True, False]])
    return copy.deepcopy(rng.choice(kind))


def text(rng: Random) -> str:
    return rng.choice(TEXTS)


def document(rng: Random, source: Any, times: int | None = None) -> Any:
    """A copy of nested dicts and lists with some of its nodes mutated; now and then none of it is left."""
    if rng.random() < 0.03:
        return value(rng)
    found = copy.deepcopy(source)
    for _ in range(times or rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(found))
        if not places:
            return value(rng)
        _mutate(rng, *rng.choice(places))
    return found


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    keys: Any = ()
    if isinstance(node, MutableMapping):
        keys = list(node)
    elif isinstance(node, MutableSequence):
        keys = range(len(node))
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _mutate(rng: Random, container: Any, key: Any) -> None:
    kind = rng.choice(["replace", "replace", "replace", "delete", "wrap", "add", "type", "number"])
    old = container[key]
    if kind == "delete":
        del container[key]
    elif kind == "wrap":
        container[key] = rng.choice([[old], {"x": old}, [old] * 50])
    elif kind == "add" and isinstance(container, MutableMapping):
        container[text(rng)] = value(rng)
    elif kind == "add":
        container.extend([value(rng)] * rng.choice([1, 100]))
    elif kind == "type":
        container[key] = str(old) if not isinstance(old, str) else rng.choice([0, [old], {old: 1}])
    elif kind == "number" and isinstance(old, int | float):
        container[key] = rng.choice([-old, old + 1, old * 10**6, old / 3, old * 2**40])
    else:
        container[key] = value(rng)


def to_json(found: Any, **options: Any) -> bytes:
    """As JSON; lone surrogates are escaped, `Raw` texts stand as they are."""
    raw: list[str] = []

    def keep(node: Any) -> str:
        raw.append(node.text if isinstance(node, Raw) else json.dumps(str(node)))
        return f"@raw{len(raw) - 1}@"

    words = json.dumps(found, default=keep, **options)
    for number, one in enumerate(raw):
        words = words.replace(f'"@raw{number}@"', one, 1)
    return words.encode()


def json_file(rng: Random, source: Any) -> bytes:
    """A document of which nodes, or bytes, or nothing is mutated."""
    found = document(rng, source) if rng.random() < 0.85 else source
    made = to_json(found)
    return raw_bytes(rng, made) if rng.random() < 0.3 else made


def json_lines(rng: Random, rows: list[Any]) -> bytes:
    lines = [to_json(document(rng, row) if rng.random() < 0.4 else row) for row in rows]
    made = rng.choice([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\r"]).join(lines) + b"\n"
    return raw_bytes(rng, made) if rng.random() < 0.4 else made


TOKENS = [
    *(
        b"\0",
        b"\xff\xfe",
        b"\xc3(",
        b"\xed\xa0\x80",
        b"\xf8\x88\x80",
        b"\xef\xbb\xbf",
        b"\x1b[2J",
        b"\r",
    ),
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b'"',
        b"}",
        b"\n---\n",
        b"&a [*a]",
        b"NaN",
        b"9" * 5000,
        b"\\ud800",
    ),
]


def raw_bytes(rng: Random, source: bytes, times: int | None = None) -> bytes:
    """Bits flipped, parts cut, repeated, inserted, overwritten, or another encoding."""
    found = bytearray(source)
    for _ in range(times or rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(found) + 1)
        size = min(rng.choice([1, 2, 4, 8, 64, 1024]), len(found) - at)
        kind = rng.randrange(11)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            found[at : at + size] = rng.randbytes(size)
        elif kind == 4:
            found[at : at + size] = rng.choice([b"\0", b"\xff", b"\x7f", b"\x80"]) * size
        elif kind == 5:
            found[at:at] = found[at : at + size] * rng.choice([1, 3, 200])
        elif kind == 6:
            number = rng.choice(
                [0, 1, 2**31 - 1, 2**32 - 1, 2**31, 2**24, 65535, rng.getrandbits(32)]
            )
            found[at : at + 4] = number.to_bytes(4, rng.choice(["little", "big"]))
        elif kind == 7 and rng.random() < 0.5:
            del found[at:]
        elif kind == 8 and rng.random() < 0.2:
            found = bytearray(
                bytes(found).decode("latin-1").encode(rng.choice(["utf-16", "utf-8"]))
            )
        elif kind == 9 and rng.random() < 0.1:
            found = bytearray(rng.choice([b"", b"\0" * 4096, b"\xef\xbb\xbf", rng.randbytes(2000)]))
        elif kind == 10:
            found[at:at] = text(rng).encode("utf-8", "surrogatepass")
    return bytes(found)


ODD_NAMES = [
    *(
        "[bold]x[/red]",
        "a\x1b[31mb",
        "two\nlines",
        "tab\tbed",
        "sp ace",
        "-rf",
        "x" * 200,
        "é字",
        "a'b\"c",
    ),
    *("$(touch ran)", "%n", "\udcff\udcfe", "\u202eevil", "null", "CON", "{x}", "train", "a;b"),
]


def name(rng: Random, plain: str, share: float = 0.1) -> str:
    """`plain`, or now and then the odd name of a file that keeps its ending."""
    if rng.random() >= share:
        return plain
    return rng.choice(ODD_NAMES) + Path(plain).suffix


def place(rng: Random, path: Path, content: bytes, share: float = 0.03) -> Path:
    """Write `content` to `path`, or put something else there: nothing, a folder, a link, a pipe, a device."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if rng.random() >= share:
        path.write_bytes(content)
        return path
    kind = rng.choice(
        ["missing", "folder", "dangling", "loop", "outside", "pipe", "endless", "empty"]
    )
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind != "missing":
        targets = {"dangling": "nowhere", "loop": path.name, "endless": "/dev/zero"}
        os.symlink(targets.get(kind, path.parents[1] / "outside" / "secret.json"), path)
    return path
